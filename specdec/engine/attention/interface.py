"""Our attention as an attention implementation of transformers: the general path, for any causal LM.

A forward packs the new tokens of all sequences into one row of the batch, so every other layer runs on real
tokens only and needs no padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from transformers import AttentionInterface

from specdec.engine.attention.dispatch import attend
from specdec.engine.attention.traits import AttentionTraits
from specdec.engine.batch import StepBatch
from specdec.engine.kv_cache import PagedKVCache

IMPLEMENTATION = "specdec"
"""Name under which transformers finds it."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """Handed through the model's forward to every attention layer as ``specdec_batch``."""

    cache: PagedKVCache
    batch: StepBatch


def traits_of(
    query: torch.Tensor,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
) -> AttentionTraits:
    """From the arguments of an attention call in transformers."""
    return AttentionTraits(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )


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
        sliding_window: see `AttentionTraits`.
        softcap: see `AttentionTraits`.
        s_aux: sinks, see `AttentionTraits`.

    Returns:
        [1, tokens, heads, value_head_dim] and None, as transformers expects.
    """
    layer_idx = cast("int", module.layer_idx)
    batch = specdec_batch.batch
    keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)
    layer = specdec_batch.cache.layer(layer_idx, keys, values)
    layer.write(keys, values, batch)
    traits = traits_of(query, scaling, sliding_window, softcap, s_aux)
    return attend(query[0].transpose(0, 1), layer, batch, traits, values.shape[-1]).unsqueeze(0), None


def register() -> None:
    """Make the implementation known to transformers; may be called again.

    No mask builder is registered with it, and so transformers builds none.
    """
    AttentionInterface.register(IMPLEMENTATION, packed_attention)
