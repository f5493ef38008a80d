"""Small host values that a row's law depends on, to the device of the logits, without waiting for it.

A copy out of ordinary memory waits for all work queued on the device; one out of pinned memory does not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor on the device."""
    pinned = tensor.pin_memory() if device.type == "cuda" else tensor
    return pinned.to(device, non_blocking=True)


def index_of(idx: Sequence[int], device: torch.device) -> torch.Tensor:
    """[len(idx)] int64"""
    return to_device(torch.tensor(idx, dtype=torch.int64), device)


def picked(rows: torch.Tensor, idx: Sequence[int]) -> torch.Tensor:
    """Some of the rows in ascending order; all of them cost nothing."""
    return rows if len(idx) == len(rows) else rows.index_select(0, index_of(idx, rows.device))


def placed(rows: torch.Tensor, idx: Sequence[int], values: torch.Tensor) -> torch.Tensor:
    """``rows`` with ``values`` at the ascending ``idx``."""
    return values if len(idx) == len(rows) else rows.index_copy(0, index_of(idx, rows.device), values)
