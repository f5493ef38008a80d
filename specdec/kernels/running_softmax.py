"""A softmax over scores that come in chunks (Dao et al. 2022, arXiv:2205.14135), row by row."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from specdec.kernels import simd
from specdec.kernels.scalars import INNER

LOWEST = np.float32(-1e38)
"""The best score before there is any; finite, also as a power of two's exponent."""


@njit(**INNER)  # type: ignore[untyped-decorator]
def cap(scores: Any, num_rows: int, width: int, scale: Any, softcap: Any) -> None:
    """Scale scores[:num_rows, :width] and bend them towards +-softcap."""
    for r in range(num_rows):
        for j in range(width):
            scores[r, j] = softcap * np.float32(math.tanh(scores[r, j] * scale / softcap))


@njit(**INNER)  # type: ignore[untyped-decorator]
def hide(scores: Any, row: int, low: int, high: int, width: int) -> None:
    """Leave of scores[row, :width] those from ``low`` to before ``high``."""
    for j in range(min(low, width)):
        scores[row, j] = -np.inf
    for j in range(max(high, 0), width):
        scores[row, j] = -np.inf


@njit(**INNER)  # type: ignore[untyped-decorator]
def raise_best(row: int, new_best: Any, best: Any, totals: Any, sums: Any) -> None:
    """Make weights so far relative to a new best score.

    Args:
        row: which one.
        new_best: not below the one before.
        best: [rows], the best scores so far.
        totals: [rows, LANES], sums of weights relative to them.
        sums: [rows, a multiple of LANES], weighted values.
    """
    if new_best == best[row]:
        return
    if best[row] > LOWEST:  # else there are none, and memory that is not written need not be waited for
        factor = simd.exp_of_difference(simd.splat(best[row]), simd.splat(new_best))
        simd.store(totals, row, 0, simd.multiply(simd.load(totals, row, 0), factor))
        for d in range(0, sums.shape[1], simd.LANES):
            simd.store(sums, row, d, simd.multiply(simd.load(sums, row, d), factor))
    best[row] = new_best
