"""Products with bfloat16 weights on CPUs with AVX512-BF16, which multiply pairs of numbers, and no tiles.

Weights lie as `specdec.kernels.panels` has them.

Every output is a sum over the inputs in the same order, whichever rows are multiplied beside it: a row's
results are the same bits in any company.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
import numpy as np
from numba import njit, prange

from specdec.kernels import memory, simd
from specdec.kernels.panels import PANEL, num_parts, put, share
from specdec.kernels.scalars import INNER, OPTIONS

IS_AVAILABLE: bool = llvmlite.binding.get_host_cpu_features().get("avx512bf16", False)
"""Whether `multiply` may be called."""
DEPTH = 2
"""Inputs that one instruction takes for each output; those of a matrix must be a multiple."""
ROWS = 12
"""Rows of a piece: with two panels it has 24 sums, in 32 registers."""

_BLOCK_BYTES = 512 * 1024
"""Of the rows that are multiplied with all panels before the next ones: a core's second cache holds them."""


# Not for every number of rows: of others LLVM makes slower loops than of these with some rows repeated.
_piece_1, _piece_2, _piece_3, _piece_4 = (simd.dot_product(rows) for rows in range(1, 5))
_piece_6, _piece_8, _piece_12 = simd.dot_product(6), simd.dot_product(8), simd.dot_product(ROWS)


@njit(**INNER)  # type: ignore[untyped-decorator]
def _multiply_rows(x: Any, row: int, count: int, panels: Any, panel: int, sums: Any) -> None:
    """Up to 12 rows; see `specdec.kernels.simd.dot_product`."""
    if count == 1:
        _piece_1(x, row, count, panels, panel, sums)
    elif count == 2:
        _piece_2(x, row, count, panels, panel, sums)
    elif count == 3:
        _piece_3(x, row, count, panels, panel, sums)
    elif count == 4:
        _piece_4(x, row, count, panels, panel, sums)
    elif count <= 6:
        _piece_6(x, row, count, panels, panel, sums)
    elif count <= 8:
        _piece_8(x, row, count, panels, panel, sums)
    else:
        _piece_12(x, row, count, panels, panel, sums)


@njit(**INNER)  # type: ignore[untyped-decorator]
def _multiply_block(
    x: Any, start: int, end: int, panels: Any, first: int, last: int, bias: Any, sums: Any, out: Any
) -> None:
    """Rows that a cache holds, in groups as equal as possible, with panels ``first`` to ``last`` - 1, each of
    which is read once from memory.
    """
    num_rows = end - start
    num_groups = (num_rows + ROWS - 1) // ROWS
    for panel in range(first, last, 2):
        for group in range(num_groups):
            row = start + num_rows * group // num_groups
            count = start + num_rows * (group + 1) // num_groups - row
            _multiply_rows(x, row, count, panels, panel, sums)
            put(sums, count, bias, out, row, panel * PANEL)


@njit(parallel=True, **OPTIONS)  # type: ignore[untyped-decorator]
def multiply(x: Any, panels: Any, bias: Any, num_threads: int, out: Any) -> None:
    """Set ``out`` to x times the transposed weight, plus the bias.

    Args:
        x: [rows, in] bfloat16 bits.
        panels: as `specdec.kernels.panels.pack` makes them.
        bias: [1, 16 * panels] float32.
        num_threads: that the work is divided among.
        out: [rows, out] bfloat16 bits, written.
    """
    num_rows = x.shape[0]
    row_parts, panel_parts = num_parts(num_rows, num_threads)
    height = max(1, _BLOCK_BYTES // (2 * x.shape[1] * ROWS)) * ROWS
    for part in prange(row_parts * panel_parts):
        start, end, first, last = share(part, num_rows, panels.shape[0], num_threads)
        sums = memory.empty((ROWS, 2 * PANEL), np.float32)
        for row in range(start, end, height):
            _multiply_block(x, row, min(row + height, end), panels, first, last, bias, sums, out)
