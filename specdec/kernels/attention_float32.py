"""One tile of attention with products in float32; see `specdec.kernels.attention`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from specdec.kernels import memory, simd
from specdec.kernels.running_softmax import cap, hide, raise_best
from specdec.kernels.scalars import OPTIONS, load

BLOCK = simd.LANES
CHUNK = 8
"""Blocks whose scores are kept at once."""
ROWS = 8 if simd.IS_WIDE else 6
"""Of the piece of a product that is computed at once: as many sums as there are registers for."""
FEW_ROWS = 4
"""Of the last piece, if they suffice."""

_piece = simd.product(ROWS)
_low_piece = simd.product(FEW_ROWS)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _multiply(
    left: Any,
    left_column: int,
    num_rows: int,
    right: Any,
    depth: int,
    out: Any,
    out_column: int,
    num_columns: int,
    is_added: bool,
) -> None:
    """out[r, out_column + c] = sum over k < depth of left[r, left_column + k] * right[k, c], or adds it.

    Rows are computed, and written, in whole pieces: fewer than `ROWS` more of them.
    """
    for column in range(0, num_columns, BLOCK):  # the outer loop, for its part of ``right`` to stay in L1
        row = 0
        while num_rows - row > FEW_ROWS:
            _piece(left, left_column, right, column, depth, row, out, out_column + column, is_added)
            row += ROWS
        if row < num_rows:
            _low_piece(left, left_column, right, column, depth, row, out, out_column + column, is_added)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _weigh(scores: Any, width: int, row: int, best: Any, totals: Any, sums: Any) -> None:
    """Turn scores[row, :width] into weights relative to the best score so far."""
    top = simd.splat(best[row])
    for j in range(0, width, BLOCK):
        top = simd.larger(simd.load(scores, row, j), top)
    raise_best(row, simd.largest_lane(top), best, totals, sums)
    top, total = simd.splat(best[row]), simd.load(totals, row, 0)
    for j in range(0, width, BLOCK):
        weight = simd.exp_of_difference(simd.load(scores, row, j), top)
        simd.store(scores, row, j, weight)
        total = simd.add(total, weight)
    simd.store(totals, row, 0, total)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def walk(
    query: Any,
    keys: Any,
    values: Any,
    tile: Any,
    table: Any,
    kv_head: int,
    scale: Any,
    window: int,
    softcap: Any,
    best: Any,
    totals: Any,
    sums: Any,
) -> None:
    """The softmax of one tile's queries over their sequence, of the heads that share a key head.

    See `specdec.kernels.attention.attend` for most arguments, and `running_softmax.raise_best` for the last
    three, of which ``totals`` and ``sums`` are zeros, the latter with `ROWS` rows to spare.
    """
    start, num_queries, end = tile[1], tile[2], tile[3]
    head_dim, value_dim, padded_value_dim = query.shape[2], values.shape[3], sums.shape[1]
    group = query.shape[1] // keys.shape[1]
    num_rows, before = num_queries * group, end - num_queries
    last_block = (end - 1) // BLOCK

    rows = memory.zeros((num_rows + ROWS, head_dim), np.float32)
    for r in range(num_rows):
        for d in range(head_dim):
            rows[r, d] = load(query[start + r // group, kv_head * group + r % group, d]) * scale
    scores = memory.empty((num_rows + ROWS, CHUNK * BLOCK), np.float32)
    # Copies as float32 pay where several pieces read them.
    is_copied = num_rows > ROWS or value_dim < padded_value_dim
    copied = CHUNK * BLOCK if is_copied else 0
    chunk_keys = memory.empty((head_dim, copied), np.float32)
    chunk_values = memory.zeros((copied, padded_value_dim), np.float32)

    block = max(0, before - window + 1) // BLOCK if window > 0 else 0
    while block <= last_block:
        behind = min((block // CHUNK + 1) * CHUNK, last_block + 1)
        first, width = block * BLOCK, (behind - block) * BLOCK
        for b in range(block, behind):
            source, column = keys[table[b], kv_head], b * BLOCK - first
            if is_copied:
                for d in range(head_dim):
                    simd.store(chunk_keys, d, column, simd.load(source, d, 0))
            else:
                _multiply(rows, 0, num_rows, source, head_dim, scores, column, BLOCK, False)
        if is_copied:
            _multiply(rows, 0, num_rows, chunk_keys, head_dim, scores, 0, width, False)
        if softcap > 0.0:
            cap(scores, num_rows, width, np.float32(1.0), softcap)
        for r in range(num_rows):
            position = before + r // group - first
            hide(scores, r, position - window + 1 if window > 0 else 0, position + 1, width)
            _weigh(scores, width, r, best, totals, sums)
        for b in range(block, behind):
            source, num_positions = values[table[b], kv_head], min(BLOCK, end - b * BLOCK)
            column = b * BLOCK - first
            if is_copied:
                for j in range(num_positions):
                    for d in range(value_dim):
                        chunk_values[column + j, d] = load(source[j, d])
            else:
                _multiply(scores, column, num_rows, source, num_positions, sums, 0, padded_value_dim, True)
        if is_copied:
            depth = min(width, end - first)
            _multiply(scores, 0, num_rows, chunk_values, depth, sums, 0, padded_value_dim, True)
        block = behind
