"""Products with bfloat16 weights on CPUs with AMX, tile by tile.

Weights lie in panels of 16 outputs, in the order in which tiles take them, one panel behind the other: a step
of few tokens reads all of them once, as two streams.

Every output is a sum over the inputs in the same order, whichever rows are multiplied beside it: a row's
results are the same bits in any company.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import njit, prange
from torch.nn import functional

from specdec.kernels import memory, simd, tiles
from specdec.kernels.scalars import INNER, OPTIONS, store

PANEL = tiles.LANES
"""Outputs of a panel."""
DEPTH = 2 * tiles.PAIRS
"""Inputs that one instruction takes; those of a matrix must be a multiple."""

_PIECE = 2 * tiles.ROWS
"""Rows of a piece of a large product: with two panels it has as many sums as there are tiles for."""
_BLOCK_BYTES = 640 * 1024
"""Of the rows that are multiplied with all panels before the next ones: a core's second cache holds them."""
_ROWS_PER_PART = 128
"""Threads share the rows when each gets so many, else the panels. What the kernels around the product wrote
of a row is then in the cache of the core that goes on with it; for few rows weights read twice cost more."""

_few_rows = tiles.multiply(1, reads_weights_once=True)
_one_by_two = tiles.multiply(1, reads_weights_once=False)
_two_by_two = tiles.multiply(2, reads_weights_once=False)
CONFIGURATIONS = tiles.PRODUCT_CONFIGURATIONS


def pack(weight: torch.Tensor) -> npt.NDArray[np.int32]:
    """A bfloat16 matrix [out, in] in panels, [n, in / 2, 16] of pairs of inputs; n is even.

    Raises:
        ValueError: ``in`` is no multiple of 32.
    """
    if weight.shape[1] % DEPTH:
        raise ValueError(f"{weight.shape[1]} inputs are no multiple of {DEPTH}")
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
def _put(sums: Any, num_rows: int, bias: Any, out: Any, row: int, column: int) -> None:
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
def _multiply_block(
    x: Any,
    start: int,
    end: int,
    panels: Any,
    first: int,
    last: int,
    bias: Any,
    configurations: Any,
    sums: Any,
    out: Any,
) -> None:
    """Rows that a cache holds, with panels ``first`` to ``last`` - 1, each of which is read once."""
    rest = (end - start) % tiles.ROWS
    full = end - rest
    tiles.configure(configurations, tiles.ROWS)
    for panel in range(first, last, 2):
        column, row = panel * PANEL, start
        while row + _PIECE <= full:
            _two_by_two(x, row, panels, panel, sums)
            _put(sums, _PIECE, bias, out, row, column)
            row += _PIECE
        if row < full:
            _one_by_two(x, row, panels, panel, sums)
            _put(sums, tiles.ROWS, bias, out, row, column)
        if rest:
            tiles.configure(configurations, rest)
            _one_by_two(x, full, panels, panel, sums)
            _put(sums, rest, bias, out, full, column)
            tiles.configure(configurations, tiles.ROWS)


@njit(**INNER)  # type: ignore[untyped-decorator]
def _multiply_few(
    x: Any, panels: Any, first: int, last: int, bias: Any, configurations: Any, sums: Any, out: Any
) -> None:
    """Up to 16 rows with panels ``first`` to ``last`` - 1."""
    tiles.configure(configurations, x.shape[0])
    for panel in range(first, last, 2):
        _few_rows(x, 0, panels, panel, sums)
        _put(sums, x.shape[0], bias, out, 0, panel * PANEL)


@njit(parallel=True, **OPTIONS)  # type: ignore[untyped-decorator]
def multiply(x: Any, panels: Any, bias: Any, num_threads: int, configurations: Any, out: Any) -> None:
    """Set ``out`` to x times the transposed weight, plus the bias.

    Args:
        x: [rows, in] bfloat16 bits.
        panels: as `pack` makes them.
        bias: [1, 16 * panels] float32.
        num_threads: that the work is divided among.
        configurations: `CONFIGURATIONS`.
        out: [rows, out] bfloat16 bits, written.
    """
    num_rows, num_pairs = x.shape[0], panels.shape[0] // 2
    row_parts = max(1, min(num_threads, num_rows // _ROWS_PER_PART))
    panel_parts = (num_threads + row_parts - 1) // row_parts
    height = max(1, _BLOCK_BYTES // (2 * x.shape[1] * _PIECE)) * _PIECE
    for part in prange(row_parts * panel_parts):
        i, j = part // panel_parts, part % panel_parts
        start, end = num_rows * i // row_parts, num_rows * (i + 1) // row_parts
        first, last = 2 * (num_pairs * j // panel_parts), 2 * (num_pairs * (j + 1) // panel_parts)
        sums = memory.empty((_PIECE, 2 * PANEL), np.float32)
        if num_rows <= tiles.ROWS:
            _multiply_few(x, panels, first, last, bias, configurations, sums, out)
        else:
            for row in range(start, end, height):
                block_end = min(row + height, end)
                _multiply_block(x, row, block_end, panels, first, last, bias, configurations, sums, out)
        tiles.release()
