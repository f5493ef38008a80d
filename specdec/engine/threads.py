"""The number of CPU threads, for torch and for our kernels, which share one team of them."""

from __future__ import annotations

import os

import numba
import torch

# torch brings libgomp, and numba's OpenMP layer then uses the same: one team of threads for both. A second
# team would compete with the first for the cores.
numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]


def set_num_threads(num_threads: int | None) -> None:
    """For the calling thread; None takes every core this process may use."""
    chosen = num_threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(chosen)
    numba.set_num_threads(min(chosen, numba.config.NUMBA_NUM_THREADS))


def get_num_threads() -> int:
    """Of the calling thread."""
    return torch.get_num_threads()
