"""The simulated pair as an operator serves it, with less patience where no worker is left."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import yaml

from tests.e2e.conftest import run_server
from tests.e2e.harness import Server
from tests.e2e.simulated.settings import FILE, IDLE_WAIT_S


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    args = yaml.safe_load(FILE.read_text(encoding="utf-8"))["applications"][0]["args"]
    # A request caps this number; by measurement, next to nothing may be drafted for a short answer.
    args["speculation"]["num_speculative_tokens"] = 3
    args["coordinator"] = {"idle_wait_s": IDLE_WAIT_S}
    yield from run_server(tmp_path_factory.mktemp("simulated"), args)
