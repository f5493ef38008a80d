"""Norms, rotary positions and gated activations over the tokens of a step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit, prange

from specdec.kernels.scalars import OPTIONS, exp, load, store


@njit(parallel=True, **OPTIONS)  # type: ignore[untyped-decorator]
def add_and_norm(residual: Any, delta: Any, weight: Any, eps: Any, out: Any) -> None:
    """Add to the residual stream and write its RMSNorm (Zhang, Sennrich 2019, arXiv:1910.07467) to ``out``.

    Args:
        residual: [tokens, hidden] float32, changed.
        delta: [tokens, hidden].
        weight: [hidden] float32.
        eps: added to the mean square.
        out: [tokens, hidden], written.
    """
    hidden = residual.shape[1]
    for t in prange(residual.shape[0]):
        squares = np.float32(0.0)
        for i in range(hidden):
            value = residual[t, i] + load(delta[t, i])
            residual[t, i] = value
            squares += value * value
        factor = np.float32(1.0) / np.float32(math.sqrt(squares / np.float32(hidden) + eps))
        for i in range(hidden):
            out[t, i] = store(out, residual[t, i] * factor * weight[i])


@njit(parallel=True, **OPTIONS)  # type: ignore[untyped-decorator]
def norm(x: Any, weight: Any, eps: Any, out: Any) -> None:
    """RMSNorm of [tokens, hidden] into ``out``."""
    hidden = x.shape[1]
    for t in prange(x.shape[0]):
        squares = np.float32(0.0)
        for i in range(hidden):
            value = load(x[t, i])
            squares += value * value
        factor = np.float32(1.0) / np.float32(math.sqrt(squares / np.float32(hidden) + eps))
        for i in range(hidden):
            out[t, i] = store(out, load(x[t, i]) * factor * weight[i])


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _normed_head(head: Any, weight: Any, eps: Any, normed: Any) -> None:
    """One head as float32, with RMSNorm if there is a weight."""
    head_dim = head.shape[0]
    squares = np.float32(0.0)
    for d in range(head_dim):
        value = load(head[d])
        normed[d] = value
        squares += value * value
    if weight.shape[0] > 0:
        factor = np.float32(1.0) / np.float32(math.sqrt(squares / np.float32(head_dim) + eps))
        for d in range(head_dim):
            normed[d] *= factor * weight[d]


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _rotate(head: Any, cos: Any, sin: Any, out: Any) -> None:
    """Rotary position (Su et al. 2021, arXiv:2104.09864), halves paired; dimensions beyond pass through."""
    half = cos.shape[0]
    for d in range(half):
        low, high = head[d], head[d + half]
        out[d] = store(out, low * cos[d] - high * sin[d])
        out[d + half] = store(out, high * cos[d] + low * sin[d])
    for d in range(2 * half, head.shape[0]):
        out[d] = store(out, head[d])


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _put(key: Any, value: Any, block: int, head: int, offset: int, keys: Any, values: Any) -> None:
    """One position's key and value of a head into a cache of either layout of `specdec.kernels.attention`."""
    if keys.ndim == 5:
        for d in range(key.shape[0]):
            keys[block, head, d // 2, offset, d % 2] = key[d]
        for d in range(value.shape[0]):
            values[block, head, offset // 2, d, offset % 2] = value[d]
    else:
        for d in range(key.shape[0]):
            keys[block, head, d, offset] = key[d]
        for d in range(value.shape[0]):
            values[block, head, offset, d] = value[d]


@njit(parallel=True, **OPTIONS)  # type: ignore[untyped-decorator]
def rotate_and_store(
    qkv: Any,
    positions: Any,
    slots: Any,
    cos: Any,
    sin: Any,
    q_weight: Any,
    k_weight: Any,
    eps: Any,
    query: Any,
    keys: Any,
    values: Any,
) -> None:
    """Split fused projections: rotated queries to ``query``, rotated keys and values to the KV cache.

    Args:
        qkv: [tokens, heads + 2 * kv_heads, head_dim].
        positions: [tokens] int64.
        slots: [tokens] int64, where each token's key and value go.
        cos: [positions, rotary_dim / 2] float32.
        sin: the same.
        q_weight: [head_dim] of the queries' RMSNorm, or [0] for none.
        k_weight: of the keys'.
        eps: of these norms.
        query: [tokens, heads, head_dim], written.
        keys: a cache's, see `specdec.kernels.attention`, written.
        values: likewise.
    """
    num_heads, head_dim = query.shape[1], query.shape[2]
    num_kv_heads, block_size = keys.shape[1], keys.shape[3]
    for t in prange(qkv.shape[0]):
        position, block, offset = positions[t], slots[t] // block_size, slots[t] % block_size
        head, key = np.empty(head_dim, np.float32), np.empty(head_dim, keys.dtype)
        for h in range(num_heads):
            _normed_head(qkv[t, h], q_weight, eps, head)
            _rotate(head, cos[position], sin[position], query[t, h])
        for h in range(num_kv_heads):
            _normed_head(qkv[t, num_heads + h], k_weight, eps, head)
            _rotate(head, cos[position], sin[position], key)
            _put(key, qkv[t, num_heads + num_kv_heads + h], block, h, offset, keys, values)


@njit(parallel=True, **OPTIONS)  # type: ignore[untyped-decorator]
def store_keys_and_values(key: Any, value: Any, slots: Any, keys: Any, values: Any) -> None:
    """Scatter new tokens' keys and values, [tokens, kv_heads, head_dim], as `rotate_and_store` does."""
    block_size = keys.shape[3]
    for t in prange(key.shape[0]):
        block, offset = slots[t] // block_size, slots[t] % block_size
        for h in range(key.shape[1]):
            _put(key[t, h], value[t, h], block, h, offset, keys, values)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _gate_by_silu(gate: Any, up: Any, out: Any) -> None:
    """One row; a function of its own, since in the body of a prange LLVM makes no vectors of the loop."""
    for i in range(out.shape[0]):
        x = load(gate[i])
        out[i] = store(out, x / (np.float32(1.0) + exp(-x)) * load(up[i]))


@njit(parallel=True, **OPTIONS)  # type: ignore[untyped-decorator]
def gated_silu(gate_up: Any, out: Any) -> None:
    """silu(gate) * up: [tokens, 2 * n] to [tokens, n]."""
    n = out.shape[1]
    for t in prange(out.shape[0]):
        _gate_by_silu(gate_up[t, :n], gate_up[t, n:], out[t])


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _gate_by_gelu_tanh(gate: Any, up: Any, out: Any) -> None:
    """One row, see `_gate_by_silu`."""
    for i in range(out.shape[0]):
        x = load(gate[i])
        inner = np.float32(0.7978845608028654) * (x + np.float32(0.044715) * x * x * x)
        # x * (1 + tanh(inner)) / 2 is x * sigmoid(2 * inner).
        out[i] = store(out, x / (np.float32(1.0) + exp(np.float32(-2.0) * inner)) * load(up[i]))


@njit(parallel=True, **OPTIONS)  # type: ignore[untyped-decorator]
def gated_gelu_tanh(gate_up: Any, out: Any) -> None:
    """gelu(gate) * up, gelu by its tanh approximation: [tokens, 2 * n] to [tokens, n]."""
    n = out.shape[1]
    for t in prange(out.shape[0]):
        _gate_by_gelu_tanh(gate_up[t, :n], gate_up[t, n:], out[t])
