"""The CPU threads of a model, for torch and for our kernels, which share one team of them."""

from __future__ import annotations

import os
from typing import Any

import numba
import numpy as np
import torch
from numba import types

# torch brings libgomp, and numba's OpenMP layer then uses the same: one team of threads for both. A second
# team would compete with the first for the cores.
numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]

_BITS_PER_WORD = 64


def set_num_threads(num_threads: int | None) -> None:
    """For the calling thread; None takes every core this process may use."""
    chosen = num_threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(chosen)
    numba.set_num_threads(min(chosen, numba.config.NUMBA_NUM_THREADS))


def get_num_threads() -> int:
    """Of the calling thread."""
    return torch.get_num_threads()


def pin_threads() -> bool:
    """Give every thread of the calling thread's team a core of its own, if it has as many as there are cores.

    A thread that was pushed off its core by another process may else be put on the core of its partner. Then
    both take turns there, each waiting for the other at the next barrier, beside an idle core: nothing
    moves them apart. A team smaller than the machine is left alone, since others may have been given the same
    first cores.

    Returns:
        Whether they were pinned.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2 or get_num_threads() != len(cores) or numba.get_num_threads() != len(cores):
        return False
    masks = np.zeros((len(cores), cores[-1] // _BITS_PER_WORD + 1), np.uint64)
    for thread, core in enumerate(cores):
        masks[thread, core // _BITS_PER_WORD] = np.uint64(1) << np.uint64(core % _BITS_PER_WORD)
    return not _pin_each(masks).any()


# By name, not by address: numba keeps what it compiled for the next process.
_sched_setaffinity = types.ExternalFunction(
    "sched_setaffinity", types.int32(types.int32, types.uintp, types.uintp)
)


@numba.njit(parallel=True, cache=True)  # type: ignore[untyped-decorator]
def _pin_each(masks: Any) -> Any:
    """Each thread of the team takes one row of masks; 0 for each that was accepted."""
    results = np.ones(len(masks), np.int32)
    for row in numba.prange(len(masks)):
        results[row] = _sched_setaffinity(0, masks.shape[1] * 8, masks[row:].ctypes.data)
    return results
