"""The operations between the matmuls as compiled CPU loops, over buffers that all layers of a step share."""

from __future__ import annotations

import numpy as np
import torch

from specdec.engine.attention import cpu as cpu_attention
from specdec.engine.batch import StepBatch
from specdec.engine.decoder.weights import DecoderWeights, Layer, Norm
from specdec.engine.kv_cache import PagedKVCache
from specdec.engine.kv_layout import BlockLayer
from specdec.kernels import DTYPES, as_array
from specdec.kernels import layers as kernels

_NO_WEIGHT = np.empty(0, np.float32)


class CpuStep:
    """See `specdec.engine.decoder.forward.Step`."""

    def __init__(self, weights: DecoderWeights, batch: StepBatch, cache: PagedKVCache) -> None:
        num_tokens, dtype = len(batch.token_ids), weights.dtype
        num_rows = weights.head.padded_rows(num_tokens)
        self._weights = weights
        self._batch = batch
        self._cache = cache
        self._residual = torch.empty(0)
        # Rows behind the tokens' stay 0 here, and what is made of them is never read.
        self._normed = torch.zeros(num_rows, weights.hidden_size, dtype=dtype)
        self._query = torch.empty(num_tokens, weights.num_heads, weights.head_dim, dtype=dtype)
        self._attended = torch.zeros(num_rows, weights.num_heads * weights.head_dim, dtype=dtype)
        self._attended_heads = self._attended.view(num_rows, weights.num_heads, weights.head_dim)
        self._gated: torch.Tensor | None = None
        self._is_silu = weights.activation == "silu"
        self._take_arrays()

    def _take_arrays(self) -> None:
        """Ask the buffers for their memory once, and not in every layer."""
        self._residual_array, self._normed_array = self._residual.numpy(), as_array(self._normed)

    @staticmethod
    def supports(device: torch.device, dtype: torch.dtype) -> bool:
        return device.type == "cpu" and dtype in DTYPES

    def begin(self, embedded: torch.Tensor) -> None:
        self._residual = torch.zeros_like(embedded, dtype=torch.float32)
        self._take_arrays()

    def add_and_norm(self, delta: torch.Tensor, norm: Norm) -> torch.Tensor:
        kernels.add_and_norm(self._residual_array, as_array(delta), norm.array, norm.eps, self._normed_array)
        return self._normed

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        normed = torch.empty_like(x)
        kernels.norm(as_array(x), norm.array, norm.eps, as_array(normed))
        return normed

    def attend(self, layer_idx: int, layer: Layer, qkv: torch.Tensor) -> torch.Tensor:
        weights, batch = self._weights, self._batch
        heads = qkv[: len(batch.token_ids)].view(len(batch.token_ids), -1, weights.head_dim)
        new = heads[:, -weights.num_kv_heads :]
        cached = self._cache.layer(layer_idx, new, new)
        assert isinstance(cached, BlockLayer)
        kernels.rotate_and_store(
            as_array(heads),
            batch.positions,
            batch.slots,
            *layer.rope.arrays,
            _NO_WEIGHT if layer.q_norm is None else layer.q_norm.array,
            _NO_WEIGHT if layer.k_norm is None else layer.k_norm.array,
            0.0 if layer.q_norm is None else layer.q_norm.eps,
            as_array(self._query),
            cached.key_array,
            cached.value_array,
        )
        cpu_attention.attend_into(self._query, cached, batch, layer.traits, self._attended_heads)
        return self._attended

    def gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        if self._gated is None:
            self._gated = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        kernel = kernels.gated_silu if self._is_silu else kernels.gated_gelu_tanh
        kernel(as_array(gate_up), as_array(self._gated))
        return self._gated

    def keep_rows(self, rows: torch.Tensor) -> None:
        self._residual = self._residual[rows]
        num_rows = self._weights.head.padded_rows(len(rows))
        self._normed = torch.zeros(num_rows, self._weights.hidden_size, dtype=self._weights.dtype)
        self._take_arrays()
