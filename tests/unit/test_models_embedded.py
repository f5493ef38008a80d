"""Pulling, with the network and the conversion faked: which steps run, and what a failure leaves behind."""

import io
import json
import subprocess
import sys
import threading

import numpy as np
import pytest
from rich.console import Console

import specdec.models
from specdec.errors import ModelUnavailable
from specdec.models import cache, catalog, convert, embedded
from specdec.models.progress import Step, no_report, progress_bar


class Fakes:
    """Stand-ins for download and conversion that write tiny files and count their calls."""

    def __init__(self):
        self.calls = []

    def fetch_gguf(self, scratch, report):
        self.calls.append("fetch")
        (scratch / "model.gguf").write_text("gguf")
        return scratch / "model.gguf"

    def convert_target(self, gguf, folder):
        self.calls.append("convert")
        (folder / "model.safetensors").write_text(gguf.read_text())

    def save_tokenizer(self, gguf, folder):
        self.calls.append("tokenizer")
        (folder / "tokenizer.json").write_text("{}")

    def assemble_draft(self, data, target, folder):
        self.calls.append("draft")
        (folder / "model.safetensors").write_text((target / "model.safetensors").read_text())


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    fakes = Fakes()
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(embedded, "_fetch_gguf", fakes.fetch_gguf)
    for name in ("convert_target", "save_tokenizer", "assemble_draft"):
        monkeypatch.setattr(embedded.convert, name, getattr(fakes, name))
    return fakes


@pytest.mark.parametrize("name", ["smollm2", "smollm2-draft"])
def test_pull_of_either_makes_the_pair_ready_once(fakes, name):
    paths = specdec.models.pull(name)
    assert set(paths) == {"smollm2", "smollm2-draft"}
    assert all(cache.is_ready(path) for path in paths.values())
    assert specdec.models.pull(name) == paths
    assert fakes.calls == ["fetch", "convert", "tokenizer", "draft"]


def test_pull_leaves_only_the_models_and_the_lock(fakes):
    paths = specdec.models.pull("smollm2")
    left = {path.name for path in cache.models_dir().iterdir()}
    assert left - {".smollm2.lock"} == {path.name for path in paths.values()}


def test_lost_draft_is_assembled_without_a_new_download(fakes):
    paths = specdec.models.pull("smollm2")
    (paths["smollm2-draft"] / cache.MANIFEST_FILE).unlink()
    fakes.calls.clear()
    specdec.models.pull("smollm2")
    assert fakes.calls == ["draft"]


def test_concurrent_pulls_do_the_work_once(fakes):
    threads = [threading.Thread(target=specdec.models.pull, args=("smollm2",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert fakes.calls == ["fetch", "convert", "tokenizer", "draft"]


def test_failed_conversion_leaves_nothing_that_looks_ready(fakes, monkeypatch):
    def fail(gguf, folder):
        (folder / "model.safetensors").write_text("half")
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(embedded.convert, "save_tokenizer", fail)
        with pytest.raises(RuntimeError, match="killed"):
            specdec.models.pull("smollm2")
    assert not any(status.is_ready for status in specdec.models.list_embedded())
    specdec.models.pull("smollm2")
    assert all(status.is_ready for status in specdec.models.list_embedded())


def test_full_disk_is_reported_with_the_folder(fakes, monkeypatch):
    def fail(gguf, folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(embedded.convert, "convert_target", fail)
    with pytest.raises(ModelUnavailable, match="No space left on device"):
        specdec.models.pull("smollm2")


def test_unknown_name_is_refused_naming_the_embedded_models(fakes):
    with pytest.raises(ModelUnavailable, match="'smollm2', 'smollm2-draft'"):
        specdec.models.pull("gpt2")


def test_list_embedded_tells_what_a_pull_would_make(fakes):
    before = specdec.models.list_embedded()
    assert [(status.name, status.role, status.is_ready) for status in before] == [
        ("smollm2", "target", False),
        ("smollm2-draft", "draft", False),
    ]
    paths = specdec.models.pull("smollm2")
    assert {status.name: status.path for status in before} == paths


def test_version_key_follows_the_drafts_own_bytes(monkeypatch):
    target, draft = catalog.version_key(catalog.TARGET), catalog.version_key(catalog.DRAFT)
    changed = {**catalog.draft_data_sha256(), "layers.safetensors": "0" * 64}
    monkeypatch.setattr(catalog, "draft_data_sha256", lambda: changed)
    assert catalog.version_key(catalog.TARGET) == target
    assert catalog.version_key(catalog.DRAFT) != draft


def test_draft_is_package_data():
    assert all((catalog.DRAFT_DATA / file).is_file() for file in catalog.DRAFT_DATA_FILES)


def test_draft_may_say_what_ends_a_text_and_nothing_outside_the_vocabulary():
    ids = np.load(catalog.DRAFT_DATA / "draft_vocab.npy")
    assert (np.diff(ids) > 0).all()
    assert {convert.BOS_TOKEN_ID, convert.EOS_TOKEN_ID, convert.PAD_TOKEN_ID} <= set(ids.tolist())
    vocab_size = json.loads((catalog.DRAFT_DATA / "config.json").read_text())["vocab_size"]
    assert 0 <= ids[0] < ids[-1] < vocab_size


def test_bar_names_the_model_and_ends_full():
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    with progress_bar(console, "smollm2") as report:
        for step in Step:
            report(step)
    output = console.file.getvalue()
    assert "smollm2: assembling the draft" in output
    assert "smollm2: ready" in output


def test_without_a_console_nobody_is_told():
    with progress_bar(None, "smollm2") as report:
        assert report is no_report


def test_exports_are_sorted_and_present():
    assert specdec.models.__all__ == sorted(specdec.models.__all__)
    assert all(hasattr(specdec.models, name) for name in specdec.models.__all__)


def test_import_is_light():
    heavy = "{'torch', 'transformers', 'ray', 'rich'} & set(sys.modules)"
    code = f"import sys, specdec.models; sys.exit(str({heavy}) if {heavy} else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
