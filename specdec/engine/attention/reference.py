"""Attention in plain torch, one sequence at a time: any device, dtype and trait."""

from __future__ import annotations

import torch
from torch.nn import functional

from specdec.engine.attention.traits import AttentionTraits
from specdec.engine.batch import StepBatch
from specdec.engine.kv_layout import LayerCache


def attend(
    query: torch.Tensor, layer: LayerCache, batch: StepBatch, traits: AttentionTraits, value_dim: int
) -> torch.Tensor:
    """See `specdec.engine.attention.dispatch.attend`."""
    out = query.new_empty(*query.shape[:2], value_dim)
    for idx, (start, num_queries, kv_length) in enumerate(batch.segments[:, 1:].tolist()):
        first = traits.first_visible(num_queries, kv_length)
        keys, values = layer.gather(batch, idx, first)
        span = slice(start, start + num_queries)
        mask = _mask(num_queries, kv_length, first, traits.window, query.device)
        out[span] = _attend(query[span].transpose(0, 1), keys, values, mask, traits).transpose(0, 1)
    return out


def _mask(
    num_queries: int, kv_length: int, first: int, window: int | None, device: torch.device
) -> torch.Tensor | None:
    """[queries, keys from ``first`` on] of bool, True where a query sees a key; None when all see all."""
    if num_queries == 1:
        return None
    keys = torch.arange(first, kv_length, device=device)
    queries = torch.arange(kv_length - num_queries, kv_length, device=device).unsqueeze(1)
    mask = keys <= queries
    if window is not None:
        mask &= keys > queries - window
    return mask


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    traits: AttentionTraits,
) -> torch.Tensor:
    """[heads, queries, value_head_dim] of one sequence."""
    if traits.is_plain:
        return functional.scaled_dot_product_attention(
            query.unsqueeze(0),
            keys.unsqueeze(0),
            values.unsqueeze(0),
            attn_mask=mask,
            scale=traits.scale,
            enable_gqa=query.shape[0] != keys.shape[0],
        ).squeeze(0)
    groups = query.shape[0] // keys.shape[0]
    keys, values = keys.repeat_interleave(groups, dim=0), values.repeat_interleave(groups, dim=0)
    scores = (query @ keys.transpose(1, 2)).float() * traits.scale
    if traits.softcap is not None:
        scores = traits.softcap * torch.tanh(scores / traits.softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if traits.sinks is None:
        return torch.softmax(scores, dim=-1).to(values.dtype) @ values
    sinks = traits.sinks.float().view(-1, 1, 1).expand(-1, scores.shape[1], 1)
    weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
    return weights.to(values.dtype) @ values
