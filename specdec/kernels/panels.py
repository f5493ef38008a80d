"""Bfloat16 weights in panels of 16 outputs, each of pairs of inputs, as CPUs with instructions for such pairs
take them, one panel behind the other: a step of few tokens reads all of them once, as two streams.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import njit
from torch.nn import functional

from specdec.kernels import simd
from specdec.kernels.scalars import INNER, store

PANEL = simd.LANES
"""Outputs of a panel."""
ROWS_PER_PART = 128
"""Threads share the rows when each gets so many, else the panels. What the kernels around the product wrote
of a row is then in the cache of the core that goes on with it; for few rows weights read twice cost more."""


def pack(weight: torch.Tensor, depth: int) -> npt.NDArray[np.int32]:
    """A bfloat16 matrix [out, in] in panels, [n, in / 2, 16] of pairs of inputs; n is even.

    Args:
        weight: the matrix.
        depth: inputs that an instruction takes.

    Raises:
        ValueError: ``in`` is no multiple of ``depth``.
    """
    if weight.shape[1] % depth:
        raise ValueError(f"{weight.shape[1]} inputs are no multiple of {depth}")
    bits = weight.detach().view(torch.int16)
    num_panels = -(-len(bits) // (2 * PANEL)) * 2
    bits = functional.pad(bits, (0, 0, 0, num_panels * PANEL - len(bits)))
    pairs = bits.view(num_panels, PANEL, -1, 2).permute(0, 2, 1, 3).contiguous()
    array: npt.NDArray[np.int32] = pairs.view(torch.int32).squeeze(-1).numpy()
    return array


def pack_bias(bias: torch.Tensor | None, panels: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """A bias [out] as [1, outputs of all panels] float32, filled with zeros; None is all zeros."""
    packed = np.zeros((1, len(panels) * PANEL), np.float32)
    if bias is not None:
        packed[0, : len(bias)] = bias.detach().float().numpy()
    return packed


@njit(**INNER)  # type: ignore[untyped-decorator]
def put(sums: Any, num_rows: int, bias: Any, out: Any, row: int, column: int) -> None:
    """Write a piece's sums, plus the bias, to their place."""
    if column + 2 * PANEL <= out.shape[1]:
        low_bias, high_bias = simd.load(bias, 0, column), simd.load(bias, 0, column + PANEL)
        for i in range(num_rows):
            low = simd.add(simd.load(sums, i, 0), low_bias)
            high = simd.add(simd.load(sums, i, PANEL), high_bias)
            simd.store_rounded(out, row + i, column, low, high, low)
    else:
        for i in range(num_rows):
            for j in range(out.shape[1] - column):
                out[row + i, column + j] = store(out, sums[i, j] + bias[0, column + j])


@njit(**INNER)  # type: ignore[untyped-decorator]
def num_parts(num_rows: int, num_threads: int) -> tuple[int, int]:
    """Into how many parts rows and panels are divided among threads."""
    row_parts = max(1, min(num_threads, num_rows // ROWS_PER_PART))
    return row_parts, (num_threads + row_parts - 1) // row_parts


@njit(**INNER)  # type: ignore[untyped-decorator]
def share(part: int, num_rows: int, num_panels: int, num_threads: int) -> tuple[int, int, int, int]:
    """Rows from and to, and panels from and to, of one of the parts."""
    row_parts, panel_parts = num_parts(num_rows, num_threads)
    i, j, num_pairs = part // panel_parts, part % panel_parts, num_panels // 2
    start, end = num_rows * i // row_parts, num_rows * (i + 1) // row_parts
    return start, end, 2 * (num_pairs * j // panel_parts), 2 * (num_pairs * (j + 1) // panel_parts)
