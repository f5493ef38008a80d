"""Which kernel attends."""

from __future__ import annotations

import torch

from specdec.engine.attention import cpu, cuda, reference
from specdec.engine.attention.traits import AttentionTraits
from specdec.engine.batch import StepBatch
from specdec.engine.kv_layout import BlockLayer, FlatLayer, LayerCache


def attend(
    query: torch.Tensor, layer: LayerCache, batch: StepBatch, traits: AttentionTraits, value_dim: int
) -> torch.Tensor:
    """Attention of packed tokens, each over its own sequence's cached positions up to its own.

    Args:
        query: [tokens, heads, head_dim].
        layer: its part of the KV cache, the new tokens' keys and values included.
        batch: whose tokens they are.
        traits: the layer's.
        value_dim: of a value's head.

    Returns:
        [tokens, heads, value_dim], contiguous.
    """
    if isinstance(layer, BlockLayer):
        out = query.new_empty(*query.shape[:2], value_dim)
        cpu.attend_into(query.contiguous(), layer, batch, traits, out)
        return out
    can_flash = query.is_cuda and cuda.can_attend(query.dtype, query.shape[-1], value_dim, traits)
    if isinstance(layer, FlatLayer) and can_flash:
        return cuda.attend(query, layer, batch.tensors, traits)
    return reference.attend(query, layer, batch, traits, value_dim)
