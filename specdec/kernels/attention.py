"""Attention of ragged queries over a paged KV cache, laid out so that every inner loop runs along memory.

Keys are [blocks, kv_heads, head_dim, BLOCK] and values [blocks, kv_heads, BLOCK, head_dim]: scores of a
block's positions are sums of rows of its keys, results are sums of rows of its values.
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
ROWS = 4
"""Queries whose sums are kept in registers at once."""


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _score_block(query: Any, block: Any, keys: Any, scores: Any, offset: int) -> None:
    """scores[r, offset + j] = query[r] . key of the block's position j; four rows at a time."""
    num_dims = block.shape[0]
    for d in range(num_dims):
        simd.store(keys, d, 0, simd.load(block, d, 0))
    for r in range(0, query.shape[0], ROWS):
        s0, s1, s2, s3 = simd.zeros(), simd.zeros(), simd.zeros(), simd.zeros()
        for d in range(num_dims):
            key = simd.load(keys, d, 0)
            s0 = simd.add_scaled(s0, query[r, d], key)
            s1 = simd.add_scaled(s1, query[r + 1, d], key)
            s2 = simd.add_scaled(s2, query[r + 2, d], key)
            s3 = simd.add_scaled(s3, query[r + 3, d], key)
        simd.store(scores, r, offset, s0)
        simd.store(scores, r + 1, offset, s1)
        simd.store(scores, r + 2, offset, s2)
        simd.store(scores, r + 3, offset, s3)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _softmax(row: Any, scale: Any, softcap: Any, sink: Any) -> None:
    """Turn scores into weights, in place; a sink takes its share of the sum and gives nothing."""
    best = np.float32(sink)
    for j in range(row.shape[0]):
        value = row[j] * scale
        if softcap > 0.0:
            value = softcap * np.float32(math.tanh(value / softcap))
        row[j] = value
        best = max(best, value)
    total = np.float32(0.0)
    for j in range(row.shape[0]):
        weight = exp(row[j] - best)
        row[j] = weight
        total += weight
    total += exp(np.float32(sink) - best)
    factor = np.float32(1.0) / total
    for j in range(row.shape[0]):
        row[j] *= factor


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _add_block(weights: Any, offset: int, num_positions: int, block: Any, values: Any, sums: Any) -> None:
    """sums[r] += weighted values of the block's first positions; four rows at a time."""
    value_dim = block.shape[1]
    for j in range(num_positions):
        for d in range(value_dim):
            values[j, d] = load(block[j, d])
    for r in range(0, sums.shape[0], ROWS):
        for d in range(0, sums.shape[1], simd.LANES):
            s0, s1 = simd.load(sums, r, d), simd.load(sums, r + 1, d)
            s2, s3 = simd.load(sums, r + 2, d), simd.load(sums, r + 3, d)
            for j in range(num_positions):
                value = simd.load(values, j, d)
                s0 = simd.add_scaled(s0, weights[r, offset + j], value)
                s1 = simd.add_scaled(s1, weights[r + 1, offset + j], value)
                s2 = simd.add_scaled(s2, weights[r + 2, offset + j], value)
                s3 = simd.add_scaled(s3, weights[r + 3, offset + j], value)
            simd.store(sums, r, d, s0)
            simd.store(sums, r + 1, d, s1)
            simd.store(sums, r + 2, d, s2)
            simd.store(sums, r + 3, d, s3)


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
    head_dim, value_dim = query.shape[2], out.shape[2]
    padded_value_dim = (value_dim + simd.LANES - 1) // simd.LANES * simd.LANES
    num_kv_heads = keys.shape[1]
    group = query.shape[1] // num_kv_heads
    scale32, softcap32 = np.float32(scale), np.float32(softcap)
    for work in prange(tiles.shape[0] * num_kv_heads):
        tile, kv_head = tiles[work // num_kv_heads], work % num_kv_heads
        table, start, num_queries, end = tables[tile[0]], tile[1], tile[2], tile[3]
        num_rows, before = num_queries * group, end - num_queries
        padded_rows = (num_rows + ROWS - 1) // ROWS * ROWS
        first_block = max(0, before - window + 1) // BLOCK if window > 0 else 0
        last_block = (end - 1) // BLOCK
        first = first_block * BLOCK

        rows = np.zeros((padded_rows, head_dim), np.float32)
        for r in range(num_rows):
            for d in range(head_dim):
                rows[r, d] = load(query[start + r // group, kv_head * group + r % group, d])
        weights = np.empty((padded_rows, (last_block + 1) * BLOCK - first), np.float32)
        key_rows = np.empty((head_dim, BLOCK), np.float32)
        for b in range(first_block, last_block + 1):
            _score_block(rows, keys[table[b], kv_head], key_rows, weights, b * BLOCK - first)

        for r in range(num_rows):
            position = before + r // group
            low = max(first, position - window + 1) if window > 0 else first
            sink = sinks[kv_head * group + r % group]
            _softmax(weights[r, low - first : position + 1 - first], scale32, softcap32, sink)
            weights[r, : low - first] = np.float32(0.0)
            weights[r, position + 1 - first :] = np.float32(0.0)

        sums = np.zeros((padded_rows, padded_value_dim), np.float32)
        value_rows = np.zeros((BLOCK, padded_value_dim), np.float32)
        for b in range(first_block, last_block + 1):
            num_positions = min(BLOCK, end - b * BLOCK)
            _add_block(weights, b * BLOCK - first, num_positions, values[table[b], kv_head], value_rows, sums)
        for r in range(num_rows):
            for d in range(value_dim):
                out[start + r // group, kv_head * group + r % group, d] = store(out, sums[r, d])
