"""What is said when a model cannot be loaded: by its worker, and by `specdec serve` of what Serve says."""

from __future__ import annotations

import pytest

from specdec.cluster import served
from specdec.cluster.server import MAX_ERROR_CHARS, _root_cause
from specdec.config import parse_config
from specdec.engine import loading
from specdec.errors import ConfigError, ModelUnavailable

CONFIG = parse_config({"target": {"model": "smollm2"}, "draft": {"model": "smollm2-draft"}})


def load(role: str) -> object:
    if role == "target":
        return served.load_target(CONFIG, CONFIG.target)
    assert CONFIG.draft is not None
    return served.load_draft(CONFIG, CONFIG.draft)


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (KeyError("model.layers.0"), "cannot be loaded: KeyError: 'model.layers.0'"),
        (RuntimeError("a\n  b"), "cannot be loaded: RuntimeError: a b"),
        (MemoryError(), "does not fit into memory with a KV cache of 65536 tokens"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "does not fit into memory"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "does not fit into memory"),
    ],
)
def test_whatever_a_library_raises_names_the_model(
    monkeypatch: pytest.MonkeyPatch, role: str, error: Exception, words: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(served, "model_info", fail)
    monkeypatch.setattr(served, "check_pair", fail)
    model = "smollm2" if role == "target" else "smollm2-draft"
    with pytest.raises(ModelUnavailable, match=f"the {role} model '{model}'") as caught:
        load(role)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_our_own_errors_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ConfigError("device 'cuda:0' asked for", "device")

    monkeypatch.setattr(loading, "load_runner", refuse)
    monkeypatch.setattr(served, "check_pair", lambda *_: pytest.fail("not asked"))
    monkeypatch.setattr(served, "model_info", refuse)
    with pytest.raises(ConfigError, match="device 'cuda:0' asked for") as caught:
        load("target")
    assert caught.value.param == "device"


def test_serves_traceback_becomes_our_line() -> None:
    message = (
        "A replica failed to start with exception. Retrying 2 more time(s). Error:\n"
        "ray::ServeReplica:specdec:DraftWorker.initialize_and_get_metadata()\n"
        '  File "served.py", line 80, in load_draft\n'
        "RuntimeError: an older one\n"
        "specdec.errors.ModelUnavailable: the draft model 'x' cannot be loaded: OSError: no"
    )
    assert _root_cause(message) == "the draft model 'x' cannot be loaded: OSError: no"


def test_a_process_that_was_killed_is_told_as_such() -> None:
    message = (
        "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.\n\tpid: 7"
    )
    assert _root_cause(message).startswith("its process died while it started")


def test_a_foreign_error_is_its_last_line_and_not_too_long() -> None:
    assert _root_cause("Traceback\nValueError: one\nImportError: two\n    at somewhere") == "ImportError: two"
    assert len(_root_cause("ValueError: " + "x" * 10_000)) == MAX_ERROR_CHARS
    assert _root_cause("") == "no reason given"
