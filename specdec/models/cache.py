"""The cache of converted models on disk: where it is, when a folder is ready, how one is put there.

A folder appears under its final name by one rename, with a manifest inside, so a crash can leave rubbish but
never a folder that looks ready. Knows nothing of which models there are.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import filelock
import platformdirs

from specdec.errors import ModelUnavailable

CACHE_VARIABLE = "SPECDEC_CACHE"
"""Environment variable that moves the cache."""

MANIFEST_FILE = "specdec_manifest.json"

LOCK_TIMEOUT_S = 1200.0
"""Longer than any pull takes: its download and conversion have deadlines of their own."""


def models_dir() -> Path:
    """Return the folder that holds one folder per embedded model; it need not exist."""
    root = os.environ.get(CACHE_VARIABLE)
    base = Path(root).expanduser().absolute() if root else platformdirs.user_cache_path("specdec")
    return base / "models"


def is_ready(folder: Path) -> bool:
    """Return whether ``folder`` was installed whole and still has every file at its full size.

    Reads the manifest and file sizes only: well under a millisecond. Contents were hashed at installation.
    """
    try:
        manifest = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
        return all(
            (folder / name).stat().st_size == entry["bytes"] for name, entry in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        # Absent, cut short or from something else: in every case the remedy is to install anew.
        return False


@contextlib.contextmanager
def pull_lock(name: str, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """Hold the lock that lets one process of this node at a time install ``name``.

    Raises:
        ModelUnavailable: it was not to be had within ``timeout_s`` seconds, or the cache is not writable.
    """
    path = models_dir() / f".{name}.lock"
    lock = filelock.FileLock(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=timeout_s)
    except filelock.Timeout as error:
        raise ModelUnavailable(
            f"another process has been pulling {name!r} for over {timeout_s:.0f} s (it holds {path}); "
            "wait for it or end it, then try again"
        ) from error
    except OSError as error:
        raise ModelUnavailable(
            f"the model cache {path.parent} is not writable ({error}); point {CACHE_VARIABLE} elsewhere"
        ) from error
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def building(folder: Path, facts: Mapping[str, object]) -> Iterator[Path]:
    """Yield an empty sibling of ``folder`` to build in; rename it to ``folder`` if the block succeeds.

    Call it under `pull_lock`: a predecessor's abandoned build is then known to be dead and is removed.

    Args:
        folder: final place; whatever is there is replaced.
        facts: what the manifest should record besides the files: sources and versions.
    """
    with scratch_dir(folder.parent, ".building-") as build:
        yield build
        write_manifest(build, facts)
        _make_readable(build)
        _replace(build, folder)


@contextlib.contextmanager
def scratch_dir(parent: Path, prefix: str) -> Iterator[Path]:
    """Yield a new folder ``parent/prefix*``, first removing those left behind; remove it at the end.

    Call it under `pull_lock`.
    """
    for leftover in parent.glob(f"{prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def write_manifest(folder: Path, facts: Mapping[str, object]) -> None:
    """Write the manifest: ``facts`` and the size and SHA-256 of each file in ``folder``."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in sorted(folder.iterdir())
        if path.name != MANIFEST_FILE
    }
    text = json.dumps({**facts, "files": files}, indent=2)
    (folder / MANIFEST_FILE).write_text(text + "\n", encoding="utf-8")


def sha256_of(path: Path) -> str:
    """Return the file's SHA-256 in hex; about 0.4 GB/s."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _replace(build: Path, folder: Path) -> None:
    """Rename ``build`` to ``folder``; readers of a damaged old folder keep their open files."""
    if folder.exists():
        # A folder with files in it cannot be renamed over: move the old one aside, to be deleted.
        with scratch_dir(folder.parent, ".replaced-") as graveyard:
            folder.rename(graveyard / folder.name)
            build.rename(folder)
    else:
        build.rename(folder)


def _make_readable(folder: Path) -> None:
    """Let other users of a shared cache read the folder; mkdtemp and safetensors make theirs private."""
    folder.chmod(0o755)
    for path in folder.iterdir():
        path.chmod(0o644)
