"""The condition of a row of logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.messages import Int32Array
from specdec.types import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class RowContext:
    """What one row of logits is conditioned on: ``token_ids[:length]``."""

    params: SamplingParams
    token_ids: Sequence[int]
    """Prompt, committed and drafted tokens; may be longer than ``length``."""
    prompt_len: int
    length: int
    stop_token_ids: frozenset[int] = frozenset()
    """They end the sequence: not before ``params.min_tokens`` output tokens."""
    allowed: Int32Array | None = None
    """[ceil(vocab / 32)] bits of the tokens that the grammar allows; None: any."""
