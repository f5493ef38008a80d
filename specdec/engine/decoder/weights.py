"""What a decoder's forward multiplies with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional

from specdec.engine.attention import AttentionTraits

Linear = Callable[[torch.Tensor], torch.Tensor]
"""[tokens, in] to [tokens, out]."""
Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """RMSNorm."""

    weight: torch.Tensor
    """[hidden] float32."""
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """Rotary position tables, halves paired."""

    cos: torch.Tensor
    """[positions, rotary_dim / 2] float32."""
    sin: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Layer:
    """One decoder layer."""

    input_norm: Norm
    qkv: Linear
    q_norm: Norm | None
    k_norm: Norm | None
    rope: Rope
    traits: AttentionTraits
    out: Linear
    attention_out_norm: Norm | None
    """Of what attention adds (Gemma 2 and 3)."""
    mlp_norm: Norm
    gate_up: Linear
    down: Linear
    mlp_out_norm: Norm | None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DecoderWeights:
    """A whole model."""

    embed: torch.nn.Module
    layers: tuple[Layer, ...]
    norm: Norm
    head: Linear
    logit_softcap: float | None
    activation: Activation
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_rows: int
    """Width of a row of logits, padding included."""
    vocab_map: torch.Tensor | None
    """[rows of the head] int64: the ids it computes, if not all."""
    dtype: torch.dtype
    device: torch.device


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """Hold a matrix [out, in] as its device multiplies fastest.

    On the CPU bfloat16 is laid out for oneDNN once, here, and not in every call: SmolLM2-135M's matmuls then
    take a third of the time (docs/decisions/0011-cpu-kernels.md). oneDNN refuses where the processor has
    neither AVX-512 nor AVX-NE-CONVERT; torch's own matmul is slower and runs everywhere.
    """
    weight = weight.detach().contiguous()
    if weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and _can_pack():
        return _packed(weight, bias)
    return lambda x: functional.linear(x, weight, bias)


def _can_pack() -> bool:
    return bool(torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _packed(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_TOKENS)
    multiply = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: multiply(x, packed, bias, "none", [], "")


_PACKED_FOR_TOKENS = 8
"""The batch oneDNN chooses the layout for; other sizes use it too."""
