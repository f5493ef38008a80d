"""Products with bfloat16 weights on CPUs with AMX, tile by tile.

Weights lie as `specdec.kernels.panels` has them.

Every output is a sum over the inputs in the same order, whichever rows are multiplied beside it: a row's
results are the same bits in any company.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

from specdec.kernels import memory, tiles
from specdec.kernels.panels import PANEL, num_parts, put, share
from specdec.kernels.scalars import INNER, OPTIONS

DEPTH = 2 * tiles.PAIRS
"""Inputs that one instruction takes; those of a matrix must be a multiple."""

_PIECE = 2 * tiles.ROWS
"""Rows of a piece of a large product: with two panels it has as many sums as there are tiles for."""
_BLOCK_BYTES = 640 * 1024
"""Of the rows that are multiplied with all panels before the next ones: a core's second cache holds them."""

_few_rows = tiles.multiply(1, reads_weights_once=True)
_one_by_two = tiles.multiply(1, reads_weights_once=False)
_two_by_two = tiles.multiply(2, reads_weights_once=False)
CONFIGURATIONS = tiles.PRODUCT_CONFIGURATIONS


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
            put(sums, _PIECE, bias, out, row, column)
            row += _PIECE
        if row < full:
            _one_by_two(x, row, panels, panel, sums)
            put(sums, tiles.ROWS, bias, out, row, column)
        if rest:
            tiles.configure(configurations, rest)
            _one_by_two(x, full, panels, panel, sums)
            put(sums, rest, bias, out, full, column)
            tiles.configure(configurations, tiles.ROWS)


@njit(**INNER)  # type: ignore[untyped-decorator]
def _multiply_few(
    x: Any, panels: Any, first: int, last: int, bias: Any, configurations: Any, sums: Any, out: Any
) -> None:
    """Up to 16 rows with panels ``first`` to ``last`` - 1."""
    tiles.configure(configurations, x.shape[0])
    for panel in range(first, last, 2):
        _few_rows(x, 0, panels, panel, sums)
        put(sums, x.shape[0], bias, out, 0, panel * PANEL)


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
    num_rows = x.shape[0]
    row_parts, panel_parts = num_parts(num_rows, num_threads)
    height = max(1, _BLOCK_BYTES // (2 * x.shape[1] * _PIECE)) * _PIECE
    for part in prange(row_parts * panel_parts):
        start, end, first, last = share(part, num_rows, panels.shape[0], num_threads)
        sums = memory.empty((_PIECE, 2 * PANEL), np.float32)
        if num_rows <= tiles.ROWS:
            _multiply_few(x, panels, first, last, bias, configurations, sums, out)
        else:
            for row in range(start, end, height):
                block_end = min(row + height, end)
                _multiply_block(x, row, block_end, panels, first, last, bias, configurations, sums, out)
        tiles.release()
