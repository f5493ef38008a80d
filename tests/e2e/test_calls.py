"""Calls between real replicas: what comes back when a method raises, is late, or its replica dies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from specdec.cluster.server import SERVE_ENVIRONMENT
from tests.e2e.harness import private_env
from tests.e2e.pinned_calls import Caller

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

CHECKS = [name for name in vars(Caller) if name.startswith("check_")]


@pytest.mark.parametrize("settings", [SERVE_ENVIRONMENT, {}], ids=["ours", "serves_own"])
def test_pinned_calls(tmp_path: Path, settings: dict[str, str]) -> None:
    """With one event loop per replica, as `specdec serve` starts Serve, and with three."""
    run = subprocess.run(
        [sys.executable, "-c", "from tests.e2e.pinned_calls import main; main()"],
        capture_output=True,
        text=True,
        timeout=240,
        env={**private_env(tmp_path), **settings},
        cwd=Path(__file__).parents[2],
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith("check_")]
    assert lines == [f"{name} passed" for name in CHECKS], run.stdout + run.stderr
