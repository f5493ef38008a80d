"""From the host to the model's device without waiting: one copy for many small arrays, out of pinned memory.

A copy out of ordinary memory may wait for all work queued on the device. Pinned memory comes from torch's
caching allocator, which gives it out again only once the copy is done.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

_ALIGNMENT = 8
"""Of each array in a packed buffer: that of its widest element."""

AnyArray = np.ndarray[tuple[int, ...], np.dtype[np.generic]]


def upload(arrays: Sequence[AnyArray], device: torch.device) -> list[torch.Tensor]:
    """Arrays as tensors on the device; on the CPU they share their memory."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    return unpack(pack(arrays, device).to(device, non_blocking=True), arrays)


def pack(arrays: Sequence[AnyArray], device: torch.device) -> torch.Tensor:
    """[bytes] uint8 on the host, all arrays behind each other; pinned for a CUDA device."""
    offsets = _offsets(arrays)
    packed = torch.empty(offsets[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    view = packed.numpy()
    for array, start in zip(arrays, offsets, strict=False):
        view[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return packed


def unpack(packed: torch.Tensor, like: Sequence[AnyArray]) -> list[torch.Tensor]:
    """Views of a packed buffer with the dtypes and shapes of the arrays it was made from."""
    return [
        packed[start : start + array.nbytes].view(_DTYPES[array.dtype]).view(array.shape)
        for array, start in zip(like, _offsets(like), strict=False)
    ]


_DTYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32}


def _offsets(arrays: Sequence[AnyArray]) -> list[int]:
    """Where each array begins, and the length of all."""
    offsets = [0]
    for array in arrays:
        offsets.append(offsets[-1] + -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT)
    return offsets
