"""What a run measures, and how long it may take."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Of one run."""

    device: torch.device
    target: str
    draft: str
    exactness: str
    """The model whose text is checked."""
    dtype: torch.dtype
    exactness_tokens: int
    text_tokens: int
    prompt_tokens: int
    """Cached before a step that is timed."""
    prefill_tokens: int
    gammas: tuple[int, ...]
    batches: tuple[int, ...]
    repeats: int
    bandwidth_bytes: int
    """Read to measure the memory's bandwidth; far more than any cache."""


def gpu_settings(device: torch.device, target: str, draft: str, exactness: str) -> Settings:
    return Settings(
        device=device,
        target=target,
        draft=draft,
        exactness=exactness,
        dtype=torch.bfloat16,
        exactness_tokens=32,
        text_tokens=64,
        prompt_tokens=512,
        prefill_tokens=1500,
        gammas=(0, 1, 2, 3, 4, 6, 8),
        batches=(1, 2, 4, 8, 16, 32),
        repeats=15,
        bandwidth_bytes=8 * 1024**3,
    )


def tiny_settings(device: torch.device) -> Settings:
    """The same code in seconds."""
    return Settings(
        device=device,
        target="tiny",
        draft="tiny-draft",
        exactness="tiny",
        dtype=torch.bfloat16,
        exactness_tokens=6,
        text_tokens=8,
        prompt_tokens=32,
        prefill_tokens=96,
        gammas=(0, 2),
        batches=(1, 2),
        repeats=2,
        bandwidth_bytes=2**24,
    )


class Budget:
    """Seconds that a section may take; it looks, and ends early."""

    def __init__(self, seconds: float) -> None:
        self._ends_s = time.perf_counter() + seconds

    @property
    def is_spent(self) -> bool:
        return time.perf_counter() > self._ends_s


def random_tokens(count: int, vocab_size: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(3, vocab_size, (count,), generator=generator).tolist()
    return ids
