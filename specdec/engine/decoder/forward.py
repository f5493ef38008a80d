"""The layers of a decoder, once, for every device; see `Step` for what differs."""

from __future__ import annotations

from typing import Protocol

import torch

from specdec.engine.batch import StepBatch
from specdec.engine.decoder.cpu_step import CpuStep
from specdec.engine.decoder.torch_step import TorchStep
from specdec.engine.decoder.weights import DecoderWeights, Layer, Norm
from specdec.engine.kv_cache import PagedKVCache


class Step(Protocol):
    """What happens between the matmuls of one forward. The residual stream is float32 and the step's own.

    Results may have more rows than there are tokens, for the matmuls' sake; those behind are not looked at.
    What a method returns is valid until the same method is called again.
    """

    def begin(self, embedded: torch.Tensor) -> None:
        """Start the residual stream at zero; the embedded tokens, [tokens, hidden], are added first."""
        ...

    def add_and_norm(self, delta: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Add to the residual stream and return it normed, [tokens, hidden]."""
        ...

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """[tokens, hidden] normed."""
        ...

    def attend(self, layer_idx: int, layer: Layer, qkv: torch.Tensor) -> torch.Tensor:
        """Rotate, cache and attend: fused projections [tokens, ...] to [tokens, heads * head_dim]."""
        ...

    def gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Activation of the gates times the others: [tokens, 2 * n] to [tokens, n]."""
        ...

    def keep_rows(self, rows: torch.Tensor) -> None:
        """Go on with these tokens' residual streams only."""
        ...


class Decoder:
    """A model on the fast path."""

    def __init__(self, weights: DecoderWeights) -> None:
        self.weights = weights
        can_use_kernels = CpuStep.supports(weights.device, weights.dtype)
        self._step: type[CpuStep] | type[TorchStep] = CpuStep if can_use_kernels else TorchStep

    @property
    def device(self) -> torch.device:
        return self.weights.device

    def forward(self, batch: StepBatch, cache: PagedKVCache) -> torch.Tensor:
        """Feed a batch.

        Args:
            batch: at least one token.
            cache: takes the tokens' keys and values.

        Returns:
            [rows, vocab_rows] logits of the batch's rows.
        """
        weights = self.weights
        step: Step = self._step(weights, batch, cache)
        delta = weights.embed(batch.tensors.token_ids)
        step.begin(delta)
        for idx, layer in enumerate(weights.layers):
            normed = step.add_and_norm(delta, layer.input_norm)
            delta = layer.out(step.attend(idx, layer, layer.qkv(normed)))
            if layer.attention_out_norm is not None:
                delta = step.norm(delta, layer.attention_out_norm)
            normed = step.add_and_norm(delta, layer.mlp_norm)
            delta = layer.down(step.gated(layer.gate_up(normed)))
            if layer.mlp_out_norm is not None:
                delta = step.norm(delta, layer.mlp_out_norm)
        return self._logits(step, delta, batch)

    def _logits(self, step: Step, delta: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        weights, rows = self.weights, batch.tensors.rows
        if len(rows) == 0:
            return delta.new_empty(0, weights.vocab_rows)
        step.keep_rows(rows)
        logits = weights.head(step.add_and_norm(delta[rows], weights.norm))[: len(rows)]
        if weights.logit_softcap is not None:
            logits = torch.tanh(logits / weights.logit_softcap) * weights.logit_softcap
        if weights.vocab_map is None:
            return logits
        whole = logits.new_full((len(logits), weights.vocab_rows), -torch.inf)
        return whole.index_copy_(1, weights.vocab_map, logits)
