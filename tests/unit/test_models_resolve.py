import pytest

from specdec.errors import ModelUnavailable
from specdec.models import cache, embedded, resolve
from specdec.models.resolve import resolve_model


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path / "cache"))


def make_model(folder):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_local_folder_becomes_absolute(tmp_path):
    folder = make_model(tmp_path / "my-model")
    assert resolve_model("my-model") == str(folder)
    assert resolve_model(str(folder)) == str(folder)


def test_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = make_model(tmp_path / "my-model")
    assert resolve_model("~/my-model") == str(folder)


def test_local_folder_wins_over_a_hub_id_of_the_same_name(tmp_path):
    folder = make_model(tmp_path / "org" / "name")
    assert resolve_model("org/name") == str(folder)


def test_hub_id_is_left_to_transformers():
    assert resolve_model("HuggingFaceTB/SmolLM2-1.7B-Instruct") == "HuggingFaceTB/SmolLM2-1.7B-Instruct"


@pytest.mark.parametrize(
    "name", ["", "gpt2", "./org/name", "../name", "/no/such/folder", "a/b/c", "org/", "org/n m"]
)
def test_anything_else_is_refused_naming_the_embedded_models(name):
    with pytest.raises(ModelUnavailable, match="'smollm2', 'smollm2-draft'"):
        resolve_model(name)


def test_folder_without_config_is_refused(tmp_path):
    (tmp_path / "stuff").mkdir()
    with pytest.raises(ModelUnavailable, match="holds no model"):
        resolve_model("stuff")


def test_embedded_name_wins_over_a_folder_and_is_pulled_only_when_missing(tmp_path, monkeypatch):
    make_model(tmp_path / "smollm2")
    pulls = []

    def pull(name):
        pulls.append(name)
        path = embedded.embedded_path(name)
        path.parent.mkdir(parents=True)
        with cache.building(path, {}) as build:
            (build / "config.json").write_text("{}")
        return {name: path}

    monkeypatch.setattr(resolve, "pull", pull)
    expected = str(embedded.embedded_path("smollm2"))
    assert resolve_model("smollm2") == expected
    assert resolve_model("smollm2") == expected
    assert pulls == ["smollm2"]
    assert resolve_model("./smollm2") == str(tmp_path / "smollm2")
