"""Tokens that must not come next, whatever their logits: bad words, early ends, what a grammar forbids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from specdec.messages import Int32Array
from specdec.sampling.rows import RowContext
from specdec.sampling.transfer import index_of, to_device
from specdec.types import SamplingParams


def may_exclude(params: SamplingParams) -> bool:
    """Whether anything can be excluded for these parameters, in whatever row."""
    return bool(params.bad_words or params.min_tokens or params.grammar)


def exclude(logits: torch.Tensor, rows: Sequence[RowContext]) -> torch.Tensor:
    """Give excluded tokens a logit of -inf.

    A row keeps at least one token: where nothing else is left, bad words and early ends are allowed, and
    where a grammar allows nothing that the model can say (a draft's vocabulary may be reduced), anything is.

    Args:
        logits: [rows, vocab], not modified.
        rows: one context per row.
    """
    affected = [(i, row) for i, row in enumerate(rows) if may_exclude(row.params)]
    if not affected:
        return logits
    logits = logits.clone()
    for i, row in affected:
        if row.allowed is not None:
            _mask(logits[i], _forbidden(row.allowed, logits[i]))
        _mask(logits[i], index_of(excluded_ids(row), logits.device))
    return logits


def excluded_ids(row: RowContext) -> list[int]:
    """Tokens that would complete a bad word, and those that would end the sequence too early."""
    params = row.params
    is_early = row.length - row.prompt_len < params.min_tokens
    ids = set(row.stop_token_ids) if is_early else set()
    for *front, last in params.bad_words:
        start = row.length - len(front)
        if start >= 0 and list(row.token_ids[start : row.length]) == front:
            ids.add(last)
    return sorted(ids)


def _forbidden(allowed: Int32Array, row_logits: torch.Tensor) -> torch.Tensor:
    bits = np.unpackbits(allowed.view(np.uint8), bitorder="little")[: len(row_logits)]
    return to_device(torch.from_numpy(bits == 0), row_logits.device)


def _mask(row_logits: torch.Tensor, excluded: torch.Tensor) -> None:
    """Exclude in place, unless nothing would be left."""
    if len(excluded):
        before = row_logits.clone()
        row_logits[excluded] = -torch.inf
        if bool(torch.isneginf(row_logits).all()):
            row_logits.copy_(before)
