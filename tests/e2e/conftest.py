"""Servers for end-to-end tests; two cores hold one at a time, so every fixture stops its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specdec.models import load_tokenizer, pull, resolve_model
from tests.e2e.harness import Server


@pytest.fixture(scope="session")
def random_draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A draft of the trained one's shape with random weights: almost everything it says is refused."""
    pull("smollm2")
    folder: Path = tmp_path_factory.mktemp("random-draft")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(resolve_model("smollm2-draft")))
    model.to(torch.float32).save_pretrained(folder)
    load_tokenizer("smollm2").save_pretrained(folder)
    return str(folder)


def run_server(folder: Path, args: dict[str, object]) -> Iterator[Server]:
    """Fixture body: a ready server, stopped with Ctrl-C at the end."""
    server = Server(folder, args)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()
    assert server.process.returncode == 0
    assert "Traceback" not in server.log()
