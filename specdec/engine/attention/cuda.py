"""Attention on CUDA: FlashAttention over block tables, all sequences in one kernel.

torch's FlashAttention 2 takes block tables from 2.13 on. Before, the blocks are copied next to each other
first: three times the cache's memory traffic, and the same result.

Three properties of FlashAttention 2, as torch ships it, shape the call:

- One query per sequence and no window: the query heads that share a key head are made its queries, so that a
  block is read once for all of them, and the keys are split among processors. Only the whole window, (-1,
  -1), gets that, and for one query at the end it says the same as a causal one.
- Any other call with block tables must not split the keys: the parts are put together as if all sequences had
  the first one's place in the output (pytorch/pytorch#194167). ``num_splits=1`` rules that out.
- Queries end where the keys end (causality is aligned at the lower right), so ``max_queries`` and
  ``max_kv_length`` only size the launch: any bounds do, the lengths are read on the device.
"""

from __future__ import annotations

import torch
from torch.nn.attention.varlen import varlen_attn
from torch.torch_version import TorchVersion

from specdec.engine.attention.traits import AttentionTraits
from specdec.engine.batch import BatchTensors
from specdec.engine.kv_layout import FlatLayer

DTYPES = (torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256
_flash_attention = torch.ops.aten._flash_attention_forward
HAS_BLOCK_TABLES = TorchVersion(torch.__version__) >= "2.13"


def can_attend(dtype: torch.dtype, head_dim: int, value_dim: int, traits: AttentionTraits) -> bool:
    """Whether FlashAttention knows these traits and shapes."""
    has_shape = head_dim == value_dim and head_dim % 8 == 0 and head_dim <= MAX_HEAD_DIM
    return dtype in DTYPES and has_shape and traits.is_plain


def attend(
    query: torch.Tensor, layer: FlatLayer, batch: BatchTensors, traits: AttentionTraits
) -> torch.Tensor:
    """See `attend` of the package; waits for nothing on the device, so a graph can capture it."""
    pages = (-1, batch.block_size, *layer.keys.shape[1:])
    keys, values = layer.keys.view(pages), layer.values.view(pages)
    window = _window(batch, traits)
    attend_to = _attend_to_pages if HAS_BLOCK_TABLES else _attend_to_copies
    return attend_to(query, keys, values, batch, traits.scale, window)


def _window(batch: BatchTensors, traits: AttentionTraits) -> tuple[int, int]:
    """(positions seen before a query's own, after it); -1 is all."""
    if traits.window is not None:
        return traits.window - 1, 0
    return -1, -1 if batch.max_queries == 1 else 0


def _attend_to_pages(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: BatchTensors,
    scale: float,
    window: tuple[int, int],
) -> torch.Tensor:
    """``keys`` and ``values`` are [blocks, block_size, kv_heads, head_dim]."""
    is_grouped = query.shape[1] != keys.shape[2]
    attended = varlen_attn(
        query,
        keys,
        values,
        batch.query_starts,
        batch.query_starts,  # lengths of the keys are `seqused_k`'s
        batch.max_queries,
        batch.max_kv_length,
        scale=scale,
        window_size=window,
        enable_gqa=is_grouped,
        seqused_k=batch.kv_lengths,
        block_table=batch.tables,
        num_splits=None if is_grouped and window == (-1, -1) else 1,
    )
    assert isinstance(attended, torch.Tensor)
    return attended


def _attend_to_copies(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: BatchTensors,
    scale: float,
    window: tuple[int, int],
) -> torch.Tensor:
    """The same without block tables: each sequence's blocks are copied to a place of its own."""
    num_segments, width = batch.tables.shape
    blocks = batch.tables.reshape(-1)
    room = width * batch.block_size
    starts = torch.arange(0, (num_segments + 1) * room, room, dtype=torch.int32, device=query.device)
    # varlen_attn of torch 2.11 leaves out `seqused_k`, which the operator below it has.
    attended = _flash_attention(
        query,
        keys.index_select(0, blocks).flatten(0, 1),
        values.index_select(0, blocks).flatten(0, 1),
        batch.query_starts,
        starts,
        batch.max_queries,
        batch.max_kv_length,
        0.0,
        window == (-1, 0),
        False,
        scale=scale,
        window_size_left=window[0],
        window_size_right=window[1],
        seqused_k=batch.kv_lengths,
    )[0]
    assert isinstance(attended, torch.Tensor)
    return attended
