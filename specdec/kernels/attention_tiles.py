"""One tile of attention with products of bfloat16 in AMX's tiles; see `specdec.kernels.attention`.

Scores are sums in float32 of products of bfloat16, as of any other kernel; weights are rounded to bfloat16
before they multiply the values, and it is the rounded ones that are summed up.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from specdec.kernels import memory, simd, tiles
from specdec.kernels.running_softmax import cap, hide, raise_best
from specdec.kernels.scalars import INNER, OPTIONS

BLOCK = simd.LANES
CHUNK = 8
"""Blocks whose scores are kept at once; even."""

_MARGIN = np.float32(5.0)
"""How far scores may lie above the one that weights are relative to: to raise it costs more than it gains."""
_LOG2_E = np.float32(1.4426950408889634)
_score_4, _score_1 = tiles.score(4), tiles.score(1)
_load_4, _load_1 = tiles.load_sums(4), tiles.load_sums(1)
_store_4, _store_1 = tiles.store_sums(4), tiles.store_sums(1)
_add_4, _add_1 = tiles.add_values(4), tiles.add_values(1)


@njit(**INNER)  # type: ignore[untyped-decorator]
def _copy_row(source: Any, target: Any) -> None:
    """target[: len(source)] = source; a function of its own, for LLVM to see that neither moves."""
    for i in range(source.shape[0]):
        target[i] = source[i]


@njit(**INNER)  # type: ignore[untyped-decorator]
def _stack(query: Any, first: int, num_queries: int, kv_head: int, group: int, rows: Any) -> None:
    """Queries of the heads that share a key head, one below the other."""
    for i in range(num_queries):
        for g in range(group):
            _copy_row(query[first + i, kv_head * group + g], rows[i * group + g])


@njit(**INNER)  # type: ignore[untyped-decorator]
def _copy_values(source: Any, num_positions: int, target: Any) -> None:
    """A block's values, [BLOCK / 2, 2 * padded head_dim], the first positions' only, into zeros.

    What nobody wrote may be anything, and would spoil a sum even if it weighs nothing.
    """
    for pair in range(num_positions // 2):
        _copy_row(source[pair], target[pair])
    if num_positions % 2:
        pair = num_positions // 2
        for i in range(0, source.shape[1], 2):
            target[pair, i] = source[pair, i]


@njit(**INNER)  # type: ignore[untyped-decorator]
def _prefetch(array: Any, table: Any, first: int, behind: int, kv_head: int) -> None:
    """Ask for keys or values of the blocks from ``first`` to before ``behind``."""
    for block in range(first, behind):
        tiles.prefetch(array, np.int64(table[block]), kv_head)


@njit(**INNER)  # type: ignore[untyped-decorator]
def _score(
    rows: Any, row: int, keys: Any, table: Any, first: int, behind: int, kv_head: int, scores: Any
) -> None:
    """Scores of a tile of rows over the blocks from ``first`` to before ``behind``."""
    block = first
    while block + 4 <= behind:
        _score_4(rows, row, keys, table, block, kv_head, scores, (block - first) * BLOCK)
        block += 4
    while block < behind:
        _score_1(rows, row, keys, table, block, kv_head, scores, (block - first) * BLOCK)
        block += 1


@njit(**INNER)  # type: ignore[untyped-decorator]
def _weigh(
    scores: Any,
    r: int,
    width: int,
    scale: Any,
    weights: Any,
    row: int,
    best: Any,
    totals: Any,
    sums: Any,
) -> None:
    """Turn scores[r, :width] times scale into weights[r, :width], relative to a row's best or nearly best."""
    top = simd.splat(np.float32(-np.inf))
    for j in range(0, width, simd.LANES):
        top = simd.larger(simd.load(scores, r, j), top)
    if simd.any_larger(simd.multiply(top, simd.splat(scale)), simd.splat(best[row] + _MARGIN)):
        raise_best(row, simd.largest_lane(top) * scale, best, totals, sums)
    factor, shift = simd.splat(scale * _LOG2_E), simd.splat(best[row] * _LOG2_E)
    total = simd.load(totals, row, 0)
    for j in range(0, width, 2 * simd.LANES):
        low = simd.power_of_two(simd.load(scores, r, j), factor, shift)
        high = simd.power_of_two(simd.load(scores, r, j + simd.LANES), factor, shift)
        total = simd.store_rounded(weights, r, j, low, high, total)
    simd.store(totals, row, 0, total)


@njit(**INNER)  # type: ignore[untyped-decorator]
def _add(
    weights: Any,
    values: Any,
    table: Any,
    first: int,
    behind: int,
    kv_head: int,
    last_block: int,
    last_values: Any,
    sums: Any,
    row: int,
) -> None:
    """Add the blocks' weighted values to sums of a tile of rows."""
    inner = min(behind, last_block)
    column, num_columns = 0, sums.shape[1]
    while column + 4 * tiles.LANES <= num_columns:
        _load_4(sums, row, column)
        for block in range(first, inner):
            _add_4(weights, (block - first) * BLOCK, values, np.int64(table[block]), kv_head, column)
        if inner < behind:
            _add_4(weights, (inner - first) * BLOCK, last_values, 0, 0, column)
        _store_4(sums, row, column)
        column += 4 * tiles.LANES
    while column < num_columns:
        _load_1(sums, row, column)
        for block in range(first, inner):
            _add_1(weights, (block - first) * BLOCK, values, np.int64(table[block]), kv_head, column)
        if inner < behind:
            _add_1(weights, (inner - first) * BLOCK, last_values, 0, 0, column)
        _store_1(sums, row, column)
        column += tiles.LANES


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
    configurations: Any,
    best: Any,
    totals: Any,
    sums: Any,
) -> None:
    """The softmax of one tile's queries over their sequence, of the heads that share a key head.

    See `specdec.kernels.attention.attend` for most arguments, and `running_softmax.raise_best` for the last
    three, of which ``totals`` and ``sums`` are zeros, the latter with rows for whole tiles.
    ``configurations`` are `tiles.CONFIGURATIONS`.
    """
    num_queries, end = tile[2], tile[3]
    group = query.shape[1] // keys.shape[1]
    num_tiles = (num_queries * group + tiles.ROWS - 1) // tiles.ROWS
    last_block = (end - 1) // BLOCK
    rows = memory.zeros((num_tiles * tiles.ROWS, 2 * keys.shape[2]), np.int16)
    _stack(query, tile[1], num_queries, kv_head, group, rows)
    last_values = memory.zeros((1, 1, *values.shape[2:]), np.int16)
    pairs = 2 * values.shape[3]
    _copy_values(
        values[table[last_block], kv_head].reshape(BLOCK // 2, pairs),
        end - last_block * BLOCK,
        last_values.reshape(BLOCK // 2, pairs),
    )
    scores = memory.empty((tiles.ROWS, CHUNK * BLOCK), np.float32)
    weights = memory.empty((tiles.ROWS, CHUNK * BLOCK), np.int16)
    _walk(
        rows,
        keys,
        values,
        last_values,
        table,
        kv_head,
        num_queries,
        group,
        end,
        scale,
        window,
        softcap,
        configurations,
        scores,
        weights,
        best,
        totals,
        sums,
    )


@njit(**INNER)  # type: ignore[untyped-decorator]
def _walk(
    rows: Any,
    keys: Any,
    values: Any,
    last_values: Any,
    table: Any,
    kv_head: int,
    num_queries: int,
    group: int,
    end: int,
    scale: Any,
    window: int,
    softcap: Any,
    configurations: Any,
    scores: Any,
    weights: Any,
    best: Any,
    totals: Any,
    sums: Any,
) -> None:
    """`walk` in memory that is there: the scores and weights of one tile of rows."""
    num_rows, before = num_queries * group, end - num_queries
    last_block = (end - 1) // BLOCK
    tiles.configure(configurations, min(num_rows, tiles.ROWS))
    # Weights are added up by pairs of blocks, which begin at fixed places too.
    first_block = max(0, before - window + 1) // (2 * BLOCK) * 2 if window > 0 else 0
    block = first_block
    while block <= last_block:
        chunk_end = min((block // CHUNK + 1) * CHUNK, last_block + 1)
        if num_rows <= tiles.ROWS:  # else what is read once is found in a cache by the other rows
            _prefetch(values, table, block, chunk_end, kv_head)
            if chunk_end <= last_block:
                _prefetch(keys, table, chunk_end, min(chunk_end + CHUNK, last_block + 1), kv_head)
            elif kv_head + 1 < keys.shape[1]:  # which the same thread is likely to get next
                _prefetch(keys, table, first_block, min(first_block + CHUNK, last_block + 1), kv_head + 1)
        for row in range(0, num_rows, tiles.ROWS):
            count = min(tiles.ROWS, num_rows - row)
            # What none of these rows sees would add zeros.
            behind = min(chunk_end, (before + (row + count - 1) // group) // BLOCK + 1)
            if behind <= block:
                continue
            width = (behind - block + 1) // 2 * 2 * BLOCK
            first = block * BLOCK
            _score(rows, row, keys, table, block, behind, kv_head, scores)
            factor = scale
            if softcap > 0.0:
                cap(scores, count, width, scale, softcap)
                factor = np.float32(1.0)
            for r in range(count):
                position = before + (row + r) // group - first
                hide(scores, r, position - window + 1 if window > 0 else 0, position + 1, width)
                _weigh(scores, r, width, factor, weights, row + r, best, totals, sums)
            _add(weights, values, table, block, behind, kv_head, last_block, last_values, sums, row)
        block = chunk_end
    tiles.release()
