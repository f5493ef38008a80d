"""The operations between the matmuls in plain torch: CUDA, and CPU dtypes without kernels of their own."""

from __future__ import annotations

import torch
from torch.nn import functional

from specdec.engine.attention import attend
from specdec.engine.batch import StepBatch
from specdec.engine.decoder.weights import DecoderWeights, Layer, Norm, Rope
from specdec.engine.kv_cache import PagedKVCache


class TorchStep:
    """See `specdec.engine.decoder.forward.Step`."""

    def __init__(self, weights: DecoderWeights, batch: StepBatch, cache: PagedKVCache) -> None:
        self._weights = weights
        self._batch = batch
        self._cache = cache
        self._residual = torch.empty(0)

    def begin(self, embedded: torch.Tensor) -> None:
        self._residual = torch.zeros_like(embedded, dtype=torch.promote_types(embedded.dtype, torch.float32))

    def add_and_norm(self, delta: torch.Tensor, norm: Norm) -> torch.Tensor:
        self._residual += delta
        return _rms_norm(self._residual, norm).to(delta.dtype)

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return _rms_norm(x.float(), norm).to(x.dtype)

    def attend(self, layer_idx: int, layer: Layer, qkv: torch.Tensor) -> torch.Tensor:
        weights, tensors = self._weights, self._batch.tensors
        heads = qkv.view(len(qkv), -1, weights.head_dim)
        sizes = [weights.num_heads, weights.num_kv_heads, weights.num_kv_heads]
        query, key, value = torch.split(heads, sizes, dim=1)
        query = _rotated(query, layer.q_norm, layer.rope, tensors.positions)
        key = _rotated(key, layer.k_norm, layer.rope, tensors.positions)
        cached = self._cache.layer(layer_idx, key, value)
        cached.write(key, value, self._batch)
        return attend(query, cached, self._batch, layer.traits, weights.head_dim).flatten(1)

    def gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        if self._weights.activation == "silu":
            return functional.silu(gate) * up
        return functional.gelu(gate, approximate="tanh") * up

    def keep_rows(self, rows: torch.Tensor) -> None:
        self._residual = self._residual[rows]


def _rms_norm(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    return functional.rms_norm(x, (x.shape[-1],), norm.weight.to(x.dtype), norm.eps)


def _rotated(heads: torch.Tensor, norm: Norm | None, rope: Rope, positions: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, head_dim] normed per head and rotated; dimensions beyond the tables' pass through."""
    x = heads.float()
    if norm is not None:
        x = _rms_norm(x, norm)
    cos, sin = rope.cos[positions].unsqueeze(1), rope.sin[positions].unsqueeze(1)
    half = cos.shape[-1]
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    rotated = torch.cat([low * cos - high * sin, high * cos + low * sin, rest], dim=-1)
    return rotated.to(heads.dtype)
