"""Attention over ragged sequences, plugged into transformers models as an attention implementation.

A forward packs the new tokens of all sequences into one row of the batch, so every other layer runs on real
tokens only and needs no padding. Here, per sequence, the new keys and values go to the `KVStore` and the
queries attend to everything the sequence holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch.nn import functional
from transformers import AttentionInterface

from specdec.engine.kv_store import KVStore
from specdec.types import SequenceId

IMPLEMENTATION = "specdec"
"""Name under which transformers finds it."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """One sequence's share of the packed tokens: ``[start, end)`` of the row."""

    sequence_id: SequenceId
    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """Handed through the model's forward to every attention layer as ``specdec_batch``."""

    store: KVStore
    segments: tuple[Segment, ...]


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    specdec_batch: PackedBatch,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,  # `specdec.engine.compatibility` has seen them at load and found them harmless
) -> tuple[torch.Tensor, None]:
    """Attention of packed tokens, each over its own sequence's cache.

    Args:
        module: the attention layer; ``layer_idx`` names its slot in the cache.
        query: [1, heads, tokens, head_dim].
        key: [1, kv_heads, tokens, head_dim].
        value: [1, kv_heads, tokens, value_head_dim].
        attention_mask: unused; causality follows from positions.
        specdec_batch: the segments and the cache.
        scaling: factor on the scores; None is ``head_dim ** -0.5``.
        sliding_window: a query sees this many positions, its own included; None sees all.
        softcap: scores become ``softcap * tanh(scores / softcap)`` (Gemma 2).
        s_aux: [heads] attention-sink logits (gpt-oss).

    Returns:
        [1, tokens, heads, value_head_dim] and None, as transformers expects.
    """
    layer_idx = cast("int", module.layer_idx)
    outputs = []
    for segment in specdec_batch.segments:
        span = slice(segment.start, segment.end)
        keys, values = specdec_batch.store.append(
            segment.sequence_id, layer_idx, key[0, :, span], value[0, :, span]
        )
        mask = _mask(segment.end - segment.start, keys.shape[1], sliding_window, query.device)
        outputs.append(_attend(query[0, :, span], keys, values, mask, scaling, softcap, s_aux))
    # Contiguous, as transformers' own attentions return it: some models view the result.
    return torch.cat(outputs, dim=1).transpose(0, 1).contiguous().unsqueeze(0), None


def _mask(
    num_queries: int, num_keys: int, sliding_window: int | None, device: torch.device
) -> torch.Tensor | None:
    """[queries, keys] of bool, True where a query sees a key; None when all see all."""
    is_windowed = sliding_window is not None and num_keys > sliding_window
    if num_queries == 1 and not is_windowed:
        return None
    key_positions = torch.arange(num_keys, device=device)
    query_positions = key_positions[num_keys - num_queries :].unsqueeze(1)
    mask = key_positions <= query_positions
    if sliding_window is not None and is_windowed:
        mask &= key_positions > query_positions - sliding_window
    return mask


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float | None,
    s_aux: torch.Tensor | None,
) -> torch.Tensor:
    """[heads, queries, value_head_dim] of one sequence."""
    if softcap is None and s_aux is None:
        return functional.scaled_dot_product_attention(
            query.unsqueeze(0),
            keys.unsqueeze(0),
            values.unsqueeze(0),
            attn_mask=mask,
            scale=scaling,
            enable_gqa=query.shape[0] != keys.shape[0],
        ).squeeze(0)
    return _attend_with_extras(query, keys, values, mask, scaling, softcap, s_aux)


def _attend_with_extras(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float | None,
    s_aux: torch.Tensor | None,
) -> torch.Tensor:
    groups = query.shape[0] // keys.shape[0]
    keys, values = keys.repeat_interleave(groups, dim=0), values.repeat_interleave(groups, dim=0)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = (query @ keys.transpose(1, 2)).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if s_aux is None:
        return torch.softmax(scores, dim=-1).to(values.dtype) @ values
    sinks = s_aux.float().view(-1, 1, 1).expand(-1, scores.shape[1], 1)
    weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
    return weights.to(values.dtype) @ values


def register() -> None:
    """Make the implementation known to transformers; may be called again.

    No mask builder is registered with it, and so transformers builds none.
    """
    AttentionInterface.register(IMPLEMENTATION, packed_attention)
