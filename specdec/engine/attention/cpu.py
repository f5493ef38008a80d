"""Attention on the CPU: one compiled kernel for decoding, verification and prefill."""

from __future__ import annotations

import functools

import numpy as np
import torch

from specdec.engine.attention.traits import AttentionTraits
from specdec.engine.batch import StepBatch
from specdec.engine.kv_layout import BlockLayer
from specdec.kernels import as_array
from specdec.kernels import attention as kernels


def attend_into(
    query: torch.Tensor, layer: BlockLayer, batch: StepBatch, traits: AttentionTraits, out: torch.Tensor
) -> None:
    """As `specdec.engine.attention.attend`, written to ``out`` ([tokens, heads, value_head_dim])."""
    kernels.attend(
        as_array(query),
        layer.key_array,
        layer.value_array,
        batch.tiles,
        batch.tables,
        traits.scale,
        traits.window or 0,
        traits.softcap or 0.0,
        _no_sinks(query.shape[1]) if traits.sinks is None else traits.sinks.detach().float().numpy(),
        as_array(out),
    )


@functools.cache
def _no_sinks(num_heads: int) -> np.ndarray:
    """The kernel only reads it, so that all layers and steps share one."""
    return np.full(num_heads, -np.inf, np.float32)
