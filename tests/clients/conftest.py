"""One served pair for all client libraries: float32, a template that takes tools, a draft often wrong."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.chat_templates import HERMES
from tests.clients.asks import MODEL
from tests.e2e.conftest import run_server
from tests.e2e.harness import Server
from tests.e2e.models import target_with_template

# LiteLLM would ask for a newer price list as it is imported.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")


@pytest.fixture(scope="package")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return target_with_template(tmp_path_factory.mktemp("target-with-tools"), HERMES)


@pytest.fixture(scope="package")
def server(target: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    args = {
        "target": {"model": target, "dtype": "float32"},
        "draft": {"model": "smollm2-draft", "dtype": "float32"},
        "served_model_name": MODEL,
        "speculation": {"num_speculative_tokens": 4},
        "coordinator": {"draft_timeout_s": 60.0},
    }
    yield from run_server(tmp_path_factory.mktemp("server-clients"), args)


@pytest.fixture(scope="package")
def base_url(server: Server) -> str:
    return f"{server.url}/v1"
