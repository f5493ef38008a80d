"""What a layer's attention is like, beyond queries, keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AttentionTraits:
    """Fixed for a layer."""

    scale: float
    """Factor on the scores."""
    window: int | None = None
    """Positions a query sees, its own included; None sees all."""
    softcap: float | None = None
    """Scores become ``softcap * tanh(scores / softcap)`` (Gemma 2)."""
    sinks: torch.Tensor | None = None
    """[heads] logits that take a share of the softmax and give nothing (gpt-oss)."""

    @property
    def is_plain(self) -> bool:
        """Whether scale and window say it all."""
        return self.softcap is None and self.sinks is None

    def first_visible(self, num_queries: int, kv_length: int) -> int:
        """First position that any of the last ``num_queries`` positions sees."""
        return 0 if self.window is None else max(0, kv_length - num_queries - self.window + 1)
