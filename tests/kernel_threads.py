"""Kernels divide their work among threads: tests say how many."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numba
import pytest


@contextmanager
def kernel_threads(count: int) -> Iterator[None]:
    """So many inside; skips the test where the machine has fewer."""
    if count > numba.config.NUMBA_NUM_THREADS:
        pytest.skip("this machine has fewer cores")
    before = numba.get_num_threads()
    numba.set_num_threads(count)
    try:
        yield
    finally:
        numba.set_num_threads(before)
