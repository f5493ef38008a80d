"""From a model's name to a ready `ModelRunner`: device, dtype, checks, warm-up."""

from __future__ import annotations

import logging
import os

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils.logging import disable_progress_bar

from specdec.config import ModelConfig
from specdec.engine import attention
from specdec.engine.compatibility import refuse_incompatible
from specdec.engine.model_runner import ModelRunner
from specdec.errors import ConfigError, ModelUnavailable
from specdec.models import resolve_model

logger = logging.getLogger(__name__)

_WITHOUT_STATE = frozenset(
    {"full_attention", "sliding_attention", "chunked_attention", "mlp", "moe", "dense", "sparse"}
)
"""Layer types that leave nothing behind but keys and values, if that."""


def load_runner(config: ModelConfig, *, vocab_size: int, max_context: int) -> ModelRunner:
    """Load a model. The check at load makes its first forwards, so the first request does not pay for them.

    Args:
        config: which model, and how to hold it.
        vocab_size: ids that may be emitted.
        max_context: the model's own limit; the configuration may lower it, and so may the KV capacity.

    Raises:
        ModelUnavailable: the files cannot be found or read.
        ConfigError: the device or architecture cannot serve.
    """
    torch.set_num_threads(config.num_threads or len(os.sched_getaffinity(0)))
    max_context = min(config.max_context or max_context, max_context, config.kv_capacity_tokens)
    model = load_model(
        resolve_model(config.model), config.dtype, choose_device(config.device), max_context=max_context
    )
    return ModelRunner(
        model,
        vocab_size=vocab_size,
        max_context=max_context,
        kv_capacity_tokens=config.kv_capacity_tokens,
    )


def choose_device(device: str) -> torch.device:
    """``auto`` is the first CUDA device this process may see, else the CPU.

    Raises:
        ConfigError: a CUDA device is asked for and none is visible.
    """
    if device == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    chosen = torch.device(device)
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device {device!r} asked for, but no CUDA device is visible to this worker", "device"
        )
    return chosen


def load_model(
    path: str, dtype: str, device: torch.device, *, max_context: int | None = None
) -> PreTrainedModel:
    """Load weights with our attention in place.

    Args:
        path: a folder that transformers loads.
        dtype: of the weights.
        device: where they go.
        max_context: positions that will be served; None is the model's own limit.

    Raises:
        ModelUnavailable: transformers cannot load it.
        ConfigError: its state cannot be rolled back, or its attention cannot be replaced without changing
            what it says.
    """
    attention.register()
    disable_progress_bar()  # weights load in seconds; workers' output is a log
    try:
        config = AutoConfig.from_pretrained(path)
        _refuse_recurrent(path, config.get_text_config())
        _refuse_foreign_attention(path, config)
        _settle_rope(config.get_text_config(), max_context)
        model = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=getattr(torch, dtype), attn_implementation=attention.IMPLEMENTATION
        )
    except (OSError, ValueError) as error:
        raise ModelUnavailable(f"cannot load model {path!r}: {error}") from error
    model = model.to(device).eval().requires_grad_(False)
    refuse_incompatible(path, model)
    return model


def _refuse_recurrent(path: str, config: object) -> None:
    """A recurrent state cannot be rolled back to an earlier position, so speculation would corrupt it."""
    layer_types = set(getattr(config, "layer_types", None) or ())
    recurrent = layer_types - _WITHOUT_STATE
    if recurrent:
        raise ConfigError(
            f"model {path!r} has layers whose state cannot be rolled back ({', '.join(sorted(recurrent))})"
        )
    if "chunked_attention" in layer_types:
        raise ConfigError(f"model {path!r} uses chunked attention, which is not supported")


def _refuse_foreign_attention(path: str, config: PreTrainedConfig) -> None:
    """Known before any weight is read."""
    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), ())
    states_layers = bool(getattr(config.get_text_config(), "layer_types", None))
    for model_class in found if isinstance(found, tuple) else (found,):
        # A hybrid family may be configured without recurrent layers; `_refuse_recurrent` has looked.
        if getattr(model_class, "_is_stateful", False) and not states_layers:
            raise ConfigError(f"model {path!r} is recurrent: its state cannot be rolled back")
        if not getattr(model_class, "_supports_attention_backend", False):
            raise ConfigError(
                f"model {path!r} ({model_class.__name__}) does not allow its attention to be replaced"
            )


def _settle_rope(config: PreTrainedConfig, max_context: int | None) -> None:
    """Choose LongRoPE's factors once, by the context served, whatever a sequence's length.

    transformers chooses anew in each forward, by its furthest position: what a sequence says would depend on
    its neighbours in the batch and on where its chunks end.
    """
    served = max_context or getattr(config, "max_position_embeddings", 0)
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        if parameters.get("rope_type") == "longrope":
            is_long = served > parameters["original_max_position_embeddings"]
            factors = parameters["long_factor" if is_long else "short_factor"]
            parameters["long_factor"] = parameters["short_factor"] = factors
