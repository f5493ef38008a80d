"""Refuses, at load, a model that our attention and rollback would not serve exactly.

transformers hands each attention layer's work to us, but nothing forces a model to put all of it into that
call: it may add a bias, mask in its own way, keep a state elsewhere, or drop position ids, and wrong text
would be the only symptom. So a dozen tokens are fed at load: once to see what the layers ask of us, and once
in chunks with a rollback, whose logits must be those of the model's own attention. The fast path has to give
the same logits, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from specdec.engine.attention import AttentionTraits
from specdec.engine.attention.interface import IMPLEMENTATION, PackedBatch, packed_attention, traits_of
from specdec.engine.kv_cache import PagedKVCache
from specdec.engine.model_runner import Forward, ModelRunner, TransformersForward
from specdec.engine.runner import ForwardItem
from specdec.errors import ConfigError
from specdec.types import SequenceId

_INSPECTION = "specdec-inspection"
_OWN = "eager"

_NUM_TOKENS = 12
_SEQUENCE = SequenceId("compatibility-check")
_NEIGHBOUR = SequenceId("compatibility-check-neighbour")

_HARMLESS = frozenset({"dropout", "position_ids", "cache_position"})
"""Arguments of an attention call that do not change what is computed here; so do None and False."""
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.1}
"""Mean error of a row of logits, in standard deviations of the logits."""
_COARSE_TOLERANCE = 0.25
"""For bfloat16, where rounding alone comes to 0.04 in the 30 layers of SmolLM2-135M."""


@dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """What a model does by itself."""

    name: str
    """For messages."""
    token_ids: list[int]
    logits: torch.Tensor
    """[tokens, vocab] by its own attention, all tokens at once."""
    traits: dict[int, AttentionTraits]
    """Of each layer's attention."""


def observe(path: str, model: PreTrainedModel) -> Observation:
    """Feed a few tokens and see what the layers ask for.

    Args:
        path: the model's name, for messages.
        model: loaded with our attention; left as it was.

    Raises:
        ConfigError: naming what the model does that we cannot reproduce.
    """
    name = f"{path!r} ({type(model).__name__})"
    vocab_size = int(model.config.get_text_config().vocab_size)
    # Low ids: they are text even where a model reserves ids for images.
    token_ids = [(37 * i + 11) % min(vocab_size, 1000) for i in range(_NUM_TOKENS)]
    try:
        traits = _inspect(model, token_ids)
        return Observation(name, token_ids, _forward(model, _OWN, token_ids), traits)
    except Exception as error:
        raise _refusal(name, error) from error
    finally:
        model.set_attn_implementation(IMPLEMENTATION)


def check(forward: Forward, observed: Observation) -> None:
    """Compare a forward with what was observed of the model.

    Raises:
        ConfigError: it gives other logits.
    """
    try:
        _compare(_served_logits(forward, observed), observed.logits)
    except Exception as error:
        raise _refusal(observed.name, error) from error


def refuse_incompatible(path: str, model: PreTrainedModel) -> None:
    """Both, for a model on the general path.

    Raises:
        ConfigError: as `observe` and `check`.
    """
    check(TransformersForward(model), observe(path, model))


def _refusal(name: str, error: Exception) -> ConfigError:
    if isinstance(error, _Unsupported):
        return ConfigError(f"model {name} cannot be served: {error}")
    return ConfigError(
        f"model {name} cannot be served: its forward fails with specdec's attention "
        f"({type(error).__name__}: {error})"
    )


class _Unsupported(Exception):
    """A reason to refuse the model."""


# What the layers ask for ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _CausalMask:
    """Stands where a mask tensor would: all of it is said by the window."""

    window: int | None


@dataclass(slots=True, eq=False)
class _Inspection:
    """Handed through the model's forward in place of a `PackedBatch`."""

    batch: PackedBatch
    max_positions: int
    traits: dict[int, AttentionTraits] = field(default_factory=dict)

    def check(
        self,
        layer_idx: int,
        mask: object,
        traits: AttentionTraits,
        sliding_window: int | None,
        arguments: dict[str, object],
    ) -> None:
        if layer_idx in self.traits:
            raise _Unsupported(f"layer {layer_idx} attends more than once per token")
        self.traits[layer_idx] = traits
        if not isinstance(mask, _CausalMask):
            raise _Unsupported("it makes its own attention mask")
        if self._reach(mask.window) != self._reach(sliding_window):
            raise _Unsupported(f"its mask has a window of {mask.window}, its layers {sliding_window}")
        unknown = sorted(name for name, value in arguments.items() if not _is_harmless(name, value))
        if unknown:
            raise _Unsupported(f"its attention takes {', '.join(unknown)}, which specdec does not know")

    def _reach(self, window: int | None) -> int:
        return self.max_positions if window is None else min(window, self.max_positions)


def _is_harmless(name: str, value: object) -> bool:
    if name == "is_causal":
        return value is not False
    return value is None or value is False or name in _HARMLESS


def _inspect(model: PreTrainedModel, token_ids: list[int]) -> dict[int, AttentionTraits]:
    AttentionInterface.register(_INSPECTION, _inspecting_attention)
    AttentionMaskInterface.register(_INSPECTION, _describe_mask)
    cache = PagedKVCache(_NUM_TOKENS, model.device)
    item = ForwardItem(sequence_id=_SEQUENCE, token_ids=token_ids, num_rows=_NUM_TOKENS)
    cache.open(_SEQUENCE)
    cache.reserve(item)
    inspection = _Inspection(
        batch=PackedBatch(cache, cache.batch([item])), max_positions=_max_positions(model)
    )
    _forward(model, _INSPECTION, token_ids, specdec_batch=inspection)
    if not inspection.traits:
        raise _Unsupported("its layers do not use the attention they are given")
    return inspection.traits


def _max_positions(model: PreTrainedModel) -> int:
    """Beyond it a window makes no difference."""
    return int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**62)


def _inspecting_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    *,
    specdec_batch: _Inspection | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **arguments: object,
) -> tuple[torch.Tensor, None]:
    if specdec_batch is None:
        raise _Unsupported("it does not hand its arguments on to its attention layers")
    traits = traits_of(query, scaling, sliding_window, softcap, s_aux)
    layer_idx = cast("int", module.layer_idx)
    specdec_batch.check(layer_idx, attention_mask, traits, sliding_window, arguments)
    return packed_attention(
        module,
        query,
        key,
        value,
        None,
        specdec_batch=specdec_batch.batch,
        scaling=scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        s_aux=s_aux,
    )


def _describe_mask(
    *,
    mask_function: Callable[..., torch.Tensor],
    device: torch.device,
    local_size: int | None = None,
    **_: object,
) -> _CausalMask:
    """Take the place of a mask builder: see that the mask is causal, and note its window."""
    positions = torch.arange(_NUM_TOKENS, device=device)
    query, key, zero = positions.unsqueeze(1), positions.unsqueeze(0), positions[0]
    expected = key <= query
    if local_size is not None:
        expected = expected & (key > query - local_size)
    if not torch.equal(mask_function(zero, zero, query, key).expand_as(expected), expected):
        raise _Unsupported("its attention is not causal")
    return _CausalMask(local_size)


# What comes out -------------------------------------------------------------------------------------------


def _served_logits(forward: Forward, observed: Observation) -> torch.Tensor:
    """[tokens, vocab] as a worker would get them: beside a neighbour, in chunks, and over a rollback."""
    token_ids = observed.token_ids
    runner = ModelRunner(
        forward,
        vocab_size=observed.logits.shape[-1],
        max_context=2 * _NUM_TOKENS,
        kv_capacity_tokens=4 * _NUM_TOKENS,
    )
    runner.open(_SEQUENCE)
    runner.open(_NEIGHBOUR)
    rows = [_step(runner, token_ids[:5], num_rows=5)]
    _step(runner, token_ids[:3], num_rows=1)
    runner.truncate(_SEQUENCE, 5)
    rows.append(_step(runner, token_ids[5:-1], num_rows=_NUM_TOKENS - 6))
    rows.append(_step(runner, token_ids[-1:], num_rows=1))
    return torch.cat(rows)


def _step(runner: ModelRunner, token_ids: list[int], num_rows: int) -> torch.Tensor:
    neighbour = ForwardItem(sequence_id=_NEIGHBOUR, token_ids=token_ids[::-1], num_rows=0)
    return runner.forward(
        [neighbour, ForwardItem(sequence_id=_SEQUENCE, token_ids=token_ids, num_rows=num_rows)]
    )


@torch.inference_mode()
def _forward(
    model: PreTrainedModel, implementation: str, token_ids: list[int], **arguments: object
) -> torch.Tensor:
    model.set_attn_implementation(implementation)
    ids = torch.tensor([token_ids], device=model.device)
    positions = torch.arange(len(token_ids), device=model.device).unsqueeze(0)
    return cast(
        "torch.Tensor",
        model(
            input_ids=ids,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=positions[0],
            **arguments,
        ).logits[0],
    )


def _compare(served: torch.Tensor, own: torch.Tensor) -> None:
    is_computed = served[0] != -torch.inf  # a draft may leave part of the vocabulary out
    served, own, dtype = served[:, is_computed].float(), own[:, is_computed].float(), own.dtype
    tolerance = _TOLERANCE.get(dtype, _COARSE_TOLERANCE)
    error = float((served - own).abs().mean(dim=-1).max())
    limit = tolerance * float(own.std()) + torch.finfo(torch.float32).tiny
    if not error <= limit:
        raise _Unsupported(
            "fed in pieces it gives other logits than its own attention, fed whole "
            f"(mean difference {error:.2g}, at most {limit:.2g} expected of {dtype})"
        )
