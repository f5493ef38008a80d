"""Attention of ragged queries over a paged KV cache, laid out so that every inner loop runs along memory.

Keys are [blocks, kv_heads, head_dim, BLOCK] and values [blocks, kv_heads, BLOCK, head_dim]: scores of a
block's positions are sums of rows of its keys, results are sums of rows of its values. Such a cache is
multiplied in float32 (`specdec.kernels.attention_float32`).

A cache in pairs is bfloat16, for CPUs with AMX: keys are [blocks, kv_heads, padded head_dim / 2, BLOCK, 2]
and values [blocks, kv_heads, BLOCK / 2, padded head_dim, 2], as tiles take them
(`specdec.kernels.attention_tiles`); padding is zeros.

A sequence's positions are taken in chunks, with the running softmax of FlashAttention (Dao et al. 2022,
arXiv:2205.14135), so that what is computed of a chunk fits into L2. Chunks begin at fixed
positions, and what a query does not see adds exact zeros: its result is the same bits in any company.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

from specdec.kernels import attention_float32, attention_tiles, memory, simd, tiles
from specdec.kernels.running_softmax import LOWEST
from specdec.kernels.scalars import OPTIONS, exp, store

BLOCK = simd.LANES
"""Positions per block."""
CHUNK = max(attention_float32.CHUNK, attention_tiles.CHUNK)
"""Most blocks whose scores are kept at once."""
KEY_PADDING, VALUE_PADDING = 2 * tiles.PAIRS, tiles.LANES
"""A cache in pairs has head sizes padded to multiples of these."""

_SPARE_ROWS = max(attention_float32.ROWS, tiles.ROWS)
_CONFIGURATIONS = tiles.CONFIGURATIONS
_walk_in_float32, _walk_in_tiles = attention_float32.walk, attention_tiles.walk


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
    start, value_dim = tile[1], out.shape[2]
    group = query.shape[1] // keys.shape[1]
    num_rows = tile[2] * group
    best = np.empty(num_rows, np.float32)
    for r in range(num_rows):
        best[r] = max(sinks[kv_head * group + r % group], LOWEST)
    totals = memory.zeros((num_rows, simd.LANES), np.float32)
    padded_value_dim = (value_dim + simd.LANES - 1) // simd.LANES * simd.LANES
    sums = memory.zeros((num_rows + _SPARE_ROWS, padded_value_dim), np.float32)
    if keys.ndim == 5:  # numba compiles the one that a cache needs
        _walk_in_tiles(
            query,
            keys,
            values,
            tile,
            table,
            kv_head,
            scale,
            window,
            softcap,
            _CONFIGURATIONS,
            best,
            totals,
            sums,
        )
    else:
        _walk_in_float32(
            query, keys, values, tile, table, kv_head, scale, window, softcap, best, totals, sums
        )
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
        keys: those of a cache, see above, the new tokens' included.
        values: likewise.
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
