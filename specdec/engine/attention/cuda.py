"""Attention on CUDA: FlashAttention over block tables, all sequences in one kernel."""

from __future__ import annotations

import torch
from torch.nn.attention.varlen import varlen_attn

from specdec.engine.attention.traits import AttentionTraits
from specdec.engine.batch import BatchTensors
from specdec.engine.kv_layout import FlatLayer

DTYPES = (torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256


def can_attend(query: torch.Tensor, value_dim: int, traits: AttentionTraits) -> bool:
    """Whether FlashAttention knows these traits and shapes."""
    head_dim = query.shape[-1]
    has_shape = head_dim == value_dim and head_dim % 8 == 0 and head_dim <= MAX_HEAD_DIM
    return query.dtype in DTYPES and has_shape and traits.is_plain


def attend(
    query: torch.Tensor, layer: FlatLayer, batch: BatchTensors, traits: AttentionTraits
) -> torch.Tensor:
    """See `attend` of the package; waits for nothing on the device, so a graph can capture it."""
    keys = layer.keys.view(-1, batch.block_size, *layer.keys.shape[1:])
    values = layer.values.view(-1, batch.block_size, *layer.values.shape[1:])
    # The window on the left does not count the query's own position.
    left = -1 if traits.window is None else traits.window - 1
    attended = varlen_attn(
        query,
        keys,
        values,
        batch.query_starts,
        batch.query_starts,  # lengths of the keys are `seqused_k`'s
        batch.max_queries,
        batch.max_kv_length,
        scale=traits.scale,
        window_size=(left, 0),
        enable_gqa=query.shape[1] != keys.shape[2],
        seqused_k=batch.kv_lengths,
        block_table=batch.tables,
    )
    assert isinstance(attended, torch.Tensor)
    return attended
