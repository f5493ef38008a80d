"""What a worker's process is told before torch is imported in it."""

from __future__ import annotations

import os
import sys

import pytest

from specdec.cluster.deployments import prepare_threads
from specdec.config import ModelConfig


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.delitem(sys.modules, "torch", raising=False)


@pytest.mark.parametrize(("spin_count", "expected"), [(0, "0"), (250, "250"), (None, None)])
def test_libgomp_is_told_how_long_to_spin(monkeypatch, spin_count, expected):
    prepare_threads(ModelConfig(model="m", spin_count=spin_count))
    assert os.environ.get("GOMP_SPINCOUNT") == expected


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_the_operators_own_setting_wins(monkeypatch, name):
    monkeypatch.setenv(name, "7")
    prepare_threads(ModelConfig(model="m", spin_count=0))
    assert os.environ.get("GOMP_SPINCOUNT") == ("7" if name == "GOMP_SPINCOUNT" else None)


def test_too_late_is_said_and_nothing_is_set(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "torch", object())
    prepare_threads(ModelConfig(model="m"))
    assert "GOMP_SPINCOUNT" not in os.environ
    assert "no effect" in caplog.text
