"""Reads transformers models into `DecoderWeights`: Llama, Mistral, Qwen 2 and 3, Gemma 1 to 3, Phi 3.

A model is taken apart layer by layer: a matrix is let go of as soon as it is packed, so that no more than
one layer is held twice.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec.engine.attention import AttentionTraits
from specdec.engine.decoder.weights import Activation, DecoderWeights, Layer, Linear, Norm, Rope, make_linear

_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3"})
_NORM_OF_ONE_PLUS_WEIGHT = frozenset({"gemma", "gemma2", "gemma3_text"})
_ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
Module = Any
"""A module of transformers, whose attributes no type checker knows."""

_CHANGING_ROPES = frozenset({"dynamic"})
"""Tables of these depend on the length of what is fed."""


def is_known(model: PreTrainedModel) -> bool:
    """Whether the fast path can say what this model says; whether it does is compared at load."""
    config = model.config
    return (
        config.model_type in _FAMILIES
        and _activation_name(model) in _ACTIVATIONS
        and not _rope_changes(config)
    )


def take_apart(
    model: PreTrainedModel,
    traits: Mapping[int, AttentionTraits],
    max_context: int,
    vocab_map: torch.Tensor | None = None,
) -> DecoderWeights:
    """Pack a model's weights; the model is of no use afterwards.

    Args:
        model: of a known family.
        traits: of each layer's attention.
        max_context: positions that will be used.
        vocab_map: ids to compute logits of; None is all.
    """
    decoder, config = model.base_model, model.config
    ropes = _ropes(decoder, max_context)
    attention = decoder.layers[0].self_attn
    head_dim = int(attention.head_dim)
    head, bias = model.get_output_embeddings().weight, model.get_output_embeddings().bias
    if vocab_map is not None:
        vocab_map = vocab_map.to(head.device)
    return DecoderWeights(
        embed=decoder.embed_tokens,
        layers=tuple(
            _layer(model, layer, traits[idx], ropes[_layer_type(config, idx)])
            for idx, layer in enumerate(decoder.layers)
        ),
        norm=_norm(model, decoder.norm),
        head=make_linear(
            head if vocab_map is None else head[vocab_map],
            bias if vocab_map is None or bias is None else bias[vocab_map],
        ),
        logit_softcap=getattr(config, "final_logit_softcapping", None),
        activation=_ACTIVATIONS[_activation_name(model)],
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        hidden_size=config.hidden_size,
        vocab_rows=head.shape[0],
        vocab_map=vocab_map,
        dtype=head.dtype,
        device=head.device,
    )


def _activation_name(model: PreTrainedModel) -> str:
    config = model.config
    return str(getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", ""))


def _rope_changes(config: object) -> bool:
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return any(parameters.get("rope_type") in _CHANGING_ROPES for parameters in [rope, *nested])


def _layer_type(config: object, idx: int) -> str | None:
    layer_types = getattr(config, "layer_types", None)
    return layer_types[idx] if layer_types else None


def _ropes(decoder: Module, max_context: int) -> dict[str | None, Rope]:
    """Rotary tables by layer type."""
    rotary = decoder.rotary_emb
    layer_types = set(getattr(decoder.config, "layer_types", None) or [None])
    by_layer_type = "layer_type" in inspect.signature(type(rotary).forward).parameters
    if by_layer_type:
        return {name: _rope(rotary, decoder, max_context, name) for name in layer_types}
    return dict.fromkeys(layer_types, _rope(rotary, decoder, max_context))


def _rope(rotary: Module, decoder: Module, max_context: int, *layer_type: str | None) -> Rope:
    device = decoder.embed_tokens.weight.device
    positions = torch.arange(max_context, device=device).unsqueeze(0)
    # The dtype of the first argument is the tables'.
    cos, sin = rotary(torch.empty(0, device=device), positions, *layer_type)
    half = cos.shape[-1] // 2
    return Rope(cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous())


def _norm(model: PreTrainedModel, module: Module) -> Norm:
    weight = module.weight.detach().float()
    if model.config.model_type in _NORM_OF_ONE_PLUS_WEIGHT:
        weight = weight + 1.0
    eps = module.eps if hasattr(module, "eps") else module.variance_epsilon
    return Norm(weight.contiguous(), float(eps))


def _optional_norm(model: PreTrainedModel, owner: Module, name: str) -> Norm | None:
    module = getattr(owner, name, None)
    return None if module is None else _norm(model, module)


def _layer(model: PreTrainedModel, layer: Module, traits: AttentionTraits, rope: Rope) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    # With norms on both sides of the MLP, the one behind attention is attention's own.
    is_sandwich = hasattr(layer, "pre_feedforward_layernorm")
    return Layer(
        input_norm=_norm(model, layer.input_layernorm),
        qkv=_fused(attention, "qkv_proj", ("q_proj", "k_proj", "v_proj")),
        q_norm=_optional_norm(model, attention, "q_norm"),
        k_norm=_optional_norm(model, attention, "k_norm"),
        rope=rope,
        traits=traits,
        out=_fused(attention, "o_proj", ()),
        attention_out_norm=_norm(model, layer.post_attention_layernorm) if is_sandwich else None,
        mlp_norm=_norm(
            model, layer.pre_feedforward_layernorm if is_sandwich else layer.post_attention_layernorm
        ),
        gate_up=_fused(mlp, "gate_up_proj", ("gate_proj", "up_proj")),
        down=_fused(mlp, "down_proj", ()),
        mlp_out_norm=_norm(model, layer.post_feedforward_layernorm) if is_sandwich else None,
    )


def _fused(owner: Module, whole: str, parts: tuple[str, ...]) -> Linear:
    """One matrix for all: the model's own if it has it, else its parts one below the other."""
    names = (whole,) if hasattr(owner, whole) else parts
    linears = [getattr(owner, name) for name in names]
    weight = torch.cat([linear.weight for linear in linears]) if len(linears) > 1 else linears[0].weight
    biases = [linear.bias for linear in linears if linear.bias is not None]
    packed = make_linear(weight, torch.cat(biases) if biases else None)
    for name in names:
        delattr(owner, name)
    return packed
