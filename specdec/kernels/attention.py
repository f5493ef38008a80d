"""Attention of ragged queries over a paged KV cache, laid out so that every inner loop runs along memory.

Keys are [blocks, kv_heads, head_dim, BLOCK] and values [blocks, kv_heads, BLOCK, head_dim]: scores of a
block's positions are sums of rows of its keys, results are sums of rows of its values.

A sequence's positions are taken in chunks, with the running softmax of FlashAttention (Dao et al. 2022,
arXiv:2205.14135), so that what is computed of a chunk fits into L2. Chunks begin at fixed
positions, and what a query does not see adds exact zeros: its result is the same bits in any company.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit, prange

from specdec.kernels import simd
from specdec.kernels.scalars import OPTIONS, exp, load, store

BLOCK = simd.LANES
"""Positions per block."""
CHUNK = 8
"""Blocks whose scores are kept at once."""
ROWS = 8 if simd.IS_WIDE else 6
"""Of the piece of a product that is computed at once: as many sums as there are registers for."""
FEW_ROWS = 4
"""Of the last piece, if they suffice."""

_LOWEST = np.float32(-3.4e38)
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
def _cap(scores: Any, num_rows: int, width: int, softcap: Any) -> None:
    """Bend scores[:num_rows, :width] towards +-softcap."""
    for r in range(num_rows):
        for j in range(width):
            scores[r, j] = softcap * np.float32(math.tanh(scores[r, j] / softcap))


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _hide(scores: Any, low: int, high: int, width: int) -> None:
    """Leave of a row of scores those from ``low`` to before ``high``."""
    for j in range(min(low, width)):
        scores[j] = -np.inf
    for j in range(max(high, 0), width):
        scores[j] = -np.inf


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _weigh(scores: Any, width: int, row: int, best: Any, totals: Any, sums: Any) -> None:
    """Turn a row of a chunk's scores into weights relative to the best score so far.

    Args:
        scores: [rows, chunk's positions], whose row is changed.
        width: number of positions.
        row: which one.
        best: [rows], the best score of the chunks before; raised.
        totals: [rows, LANES], sums of their weights; scaled to the new best score and added to.
        sums: [rows, padded value_head_dim], their weighted values; scaled likewise.
    """
    before = simd.splat(best[row])
    top = before
    for j in range(0, width, BLOCK):
        top = simd.larger(simd.load(scores, row, j), top)
    new_best = simd.largest_lane(top)
    top = simd.splat(new_best)
    if new_best != best[row]:
        factor = simd.exp_of_difference(before, top)
        simd.store(totals, row, 0, simd.multiply(simd.load(totals, row, 0), factor))
        for d in range(0, sums.shape[1], BLOCK):
            simd.store(sums, row, d, simd.multiply(simd.load(sums, row, d), factor))
        best[row] = new_best
    total = simd.load(totals, row, 0)
    for j in range(0, width, BLOCK):
        weight = simd.exp_of_difference(simd.load(scores, row, j), top)
        simd.store(scores, row, j, weight)
        total = simd.add(total, weight)
    simd.store(totals, row, 0, total)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _attend_tile(
    query: Any,
    keys: Any,
    values: Any,
    tile: Any,
    table: Any,
    kv_head: int,
    scale: Any,
    window: int,
    softcap: Any,
    sinks: Any,
    out: Any,
) -> None:
    """One tile's queries of the heads that share a key head; see `attend`."""
    start, num_queries, end = tile[1], tile[2], tile[3]
    head_dim, value_dim = query.shape[2], out.shape[2]
    padded_value_dim = (value_dim + simd.LANES - 1) // simd.LANES * simd.LANES
    group = query.shape[1] // keys.shape[1]
    num_rows, before = num_queries * group, end - num_queries
    last_block = (end - 1) // BLOCK

    rows = np.zeros((num_rows + ROWS, head_dim), np.float32)
    best = np.empty(num_rows, np.float32)
    for r in range(num_rows):
        best[r] = max(sinks[kv_head * group + r % group], _LOWEST)
        for d in range(head_dim):
            rows[r, d] = load(query[start + r // group, kv_head * group + r % group, d]) * scale
    totals = np.zeros((num_rows, simd.LANES), np.float32)
    sums = np.zeros((num_rows + ROWS, padded_value_dim), np.float32)
    scores = np.empty((num_rows + ROWS, CHUNK * BLOCK), np.float32)
    # Copies as float32 pay where several pieces read them.
    is_copied = num_rows > ROWS or value_dim < padded_value_dim
    copied = CHUNK * BLOCK if is_copied else 0
    chunk_keys = np.empty((head_dim, copied), np.float32)
    chunk_values = np.zeros((copied, padded_value_dim), np.float32)

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
            _cap(scores, num_rows, width, softcap)
        for r in range(num_rows):
            position = before + r // group - first
            _hide(scores[r], position - window + 1 if window > 0 else 0, position + 1, width)
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

    for r in range(num_rows):
        head = kv_head * group + r % group
        total = simd.sum_of_lanes(simd.load(totals, r, 0)) + exp(sinks[head] - best[r])
        factor = np.float32(1.0) / total
        for d in range(value_dim):
            out[start + r // group, head, d] = store(out, sums[r, d] * factor)


@njit(parallel=True, **OPTIONS)  # type: ignore[untyped-decorator]
def attend(
    query: Any,
    keys: Any,
    values: Any,
    tiles: Any,
    tables: Any,
    scale: Any,
    window: int,
    softcap: Any,
    sinks: Any,
    out: Any,
) -> None:
    """Attention of tiles of queries, each over its own sequence's blocks.

    Args:
        query: [tokens, heads, head_dim].
        keys: [blocks, kv_heads, head_dim, BLOCK], the new tokens' included.
        values: [blocks, kv_heads, BLOCK, value_head_dim].
        tiles: [n, 4] int64: row of the table, first token, number of tokens, position behind the last one.
        tables: [sequences, blocks] int32.
        scale: factor on the scores.
        window: positions a query sees, its own included; 0 sees all.
        softcap: 0 is none.
        sinks: [heads] float32, -inf where there is none.
        out: [tokens, heads, value_head_dim], written.
    """
    num_kv_heads = keys.shape[1]
    scale32, softcap32 = np.float32(scale), np.float32(softcap)
    for work in prange(tiles.shape[0] * num_kv_heads):
        tile, kv_head = tiles[work // num_kv_heads], work % num_kv_heads
        table = tables[tile[0]]
        _attend_tile(query, keys, values, tile, table, kv_head, scale32, window, softcap32, sinks, out)
