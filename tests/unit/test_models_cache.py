import json

import pytest

from specdec.errors import ModelUnavailable
from specdec.models import cache


@pytest.fixture
def models_dir(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path))
    folder = cache.models_dir()
    folder.mkdir()
    return folder


def install(folder, text="weights"):
    with cache.building(folder, {"name": "toy"}) as build:
        (build / "model.bin").write_text(text)


def test_cache_variable_moves_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path))
    assert cache.models_dir() == tmp_path / "models"


def test_empty_cache_variable_counts_as_unset(monkeypatch):
    monkeypatch.delenv(cache.CACHE_VARIABLE, raising=False)
    default = cache.models_dir()
    monkeypatch.setenv(cache.CACHE_VARIABLE, "")
    assert cache.models_dir() == default
    assert default.is_absolute()


def test_installed_folder_is_ready_and_states_hashes(models_dir):
    folder = models_dir / "toy"
    assert not cache.is_ready(folder)
    install(folder)
    assert cache.is_ready(folder)
    manifest = json.loads((folder / cache.MANIFEST_FILE).read_text())
    assert manifest["name"] == "toy"
    assert manifest["files"] == {"model.bin": {"bytes": 7, "sha256": cache.sha256_of(folder / "model.bin")}}


def test_installed_folder_is_readable_by_others(models_dir):
    folder = models_dir / "toy"
    install(folder)
    assert folder.stat().st_mode & 0o777 == 0o755
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in folder.iterdir())


def test_failed_build_leaves_nothing(models_dir):
    def fail():
        with cache.building(models_dir / "toy", {}) as build:
            (build / "model.bin").write_text("half")
            raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        fail()
    assert list(models_dir.iterdir()) == []


def test_build_of_a_killed_process_is_not_ready_and_is_swept_away_by_the_next(models_dir):
    abandoned = models_dir / ".building-dead"
    abandoned.mkdir()
    (abandoned / "model.bin").write_text("half")
    assert not cache.is_ready(models_dir / "toy")
    install(models_dir / "toy")
    assert [path.name for path in models_dir.iterdir()] == ["toy"]


@pytest.mark.parametrize("damage", ["truncate", "delete", "no manifest", "broken manifest", "odd manifest"])
def test_damaged_folder_is_not_ready_and_is_replaced(models_dir, damage):
    folder = models_dir / "toy"
    install(folder)
    match damage:
        case "truncate":
            (folder / "model.bin").write_text("w")
        case "delete":
            (folder / "model.bin").unlink()
        case "no manifest":
            (folder / cache.MANIFEST_FILE).unlink()
        case "broken manifest":
            (folder / cache.MANIFEST_FILE).write_text("{")
        case "odd manifest":
            (folder / cache.MANIFEST_FILE).write_text("[]")
    assert not cache.is_ready(folder)
    install(folder, "anew")
    assert cache.is_ready(folder)
    assert (folder / "model.bin").read_text() == "anew"
    assert [path.name for path in models_dir.iterdir()] == ["toy"]


def test_held_lock_is_waited_for_only_so_long(models_dir):
    with (
        cache.pull_lock("toy"),
        pytest.raises(ModelUnavailable, match="another process has been pulling 'toy'"),
        cache.pull_lock("toy", timeout_s=0.0),
    ):
        pytest.fail("two holders")
    with cache.pull_lock("toy", timeout_s=0.0):
        pass


def test_unusable_cache_says_how_to_move_it(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path / "file"))
    with pytest.raises(ModelUnavailable, match="SPECDEC_CACHE"), cache.pull_lock("toy"):
        pytest.fail("a file is no cache")
