"""The embedded target in float32, where texts and values can be compared, with three kinds of draft."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.conftest import run_server
from tests.e2e.harness import Server


@pytest.fixture(scope="package", params=["trained", "self", "random"])
def draft_kind(request: pytest.FixtureRequest) -> str:
    """``self`` gives accepted and bonus tokens, ``random`` recovered ones, ``trained`` all three."""
    return str(request.param)


@pytest.fixture(scope="package")
def server(draft_kind: str, random_draft: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    draft = {"trained": "smollm2-draft", "self": "smollm2", "random": random_draft}[draft_kind]
    args = {
        "target": {"model": "smollm2", "dtype": "float32"},
        "draft": {"model": draft, "dtype": "float32"},
        "speculation": {"num_speculative_tokens": 8},
        "coordinator": {"draft_timeout_s": 60.0},
    }
    yield from run_server(tmp_path_factory.mktemp(f"server-{draft_kind}"), args)
