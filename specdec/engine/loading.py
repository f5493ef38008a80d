"""From a model's name to a ready `ModelRunner`: device, dtype, checks, warm-up."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils.logging import disable_progress_bar

from specdec.config import DraftConfig, ModelConfig
from specdec.engine.attention import interface
from specdec.engine.compatibility import check, observe
from specdec.engine.decoder import families
from specdec.engine.decoder.forward import Decoder
from specdec.engine.decoder.graphs import GraphedDecoder
from specdec.engine.model_runner import Forward, ModelRunner, TransformersForward
from specdec.engine.runner import ForwardItem
from specdec.engine.threads import set_num_threads
from specdec.errors import ConfigError, ModelUnavailable
from specdec.models import resolve_model
from specdec.types import SequenceId

logger = logging.getLogger(__name__)

_WITHOUT_STATE = frozenset(
    {"full_attention", "sliding_attention", "chunked_attention", "mlp", "moe", "dense", "sparse"}
)
"""Layer types that leave nothing behind but keys and values, if that."""


def load_runner(config: ModelConfig, *, vocab_size: int, max_context: int) -> ModelRunner:
    """Load a model and warm it up, so that the first request does not pay for it.

    Args:
        config: which model, and how to hold it.
        vocab_size: ids that may be emitted.
        max_context: the model's own limit; the configuration may lower it, and so may the KV capacity.

    Raises:
        ModelUnavailable: the files cannot be found or read.
        ConfigError: the device or architecture cannot serve.
    """
    set_num_threads(config.num_threads)
    path, device = resolve_model(config.model), choose_device(config.device)
    max_context = min(config.max_context or max_context, max_context, config.kv_capacity_tokens)
    vocab_map = load_vocab_map(config, path, vocab_size) if isinstance(config, DraftConfig) else None
    forward = load_forward(path, config.dtype, device, max_context=max_context, vocab_map=vocab_map)
    runner = ModelRunner(
        forward,
        vocab_size=vocab_size,
        max_context=max_context,
        kv_capacity_tokens=config.kv_capacity_tokens,
        shares_prefixes=config.prefix_caching,
    )
    warm_up(runner)
    if config.cuda_graphs and isinstance(forward, Decoder):
        use_graphs(runner, forward)
    return runner


def use_graphs(runner: ModelRunner, decoder: Decoder) -> None:
    """Let a warm runner launch small batches as CUDA graphs, if its decoder allows it."""
    if not GraphedDecoder.supports(decoder):
        return
    graphed = GraphedDecoder(decoder, runner.cache, runner.max_context)
    try:
        graphed.prepare()
    except RuntimeError as error:  # what CUDA and torch raise
        logger.warning("CUDA graphs are off, which is slower: they cannot be captured (%s)", error)
    else:
        runner.model = graphed


def load_vocab_map(config: DraftConfig, path: str, vocab_size: int) -> torch.Tensor | None:
    """The token ids a draft may say, [n] int64 ascending; None is all of them.

    Raises:
        ConfigError: the file cannot be read, or does not hold distinct ids of the vocabulary.
    """
    file = Path(path, "draft_vocab.npy") if config.draft_vocab_map == "auto" else config.draft_vocab_map
    if file is None or (config.draft_vocab_map == "auto" and not Path(file).exists()):
        return None
    try:
        ids = np.load(file, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"draft_vocab_map {str(file)!r} cannot be read: {error}", "draft_vocab_map"
        ) from error
    known = np.unique(ids)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or len(known) != len(ids) or not len(ids):
        raise ConfigError(f"draft_vocab_map {str(file)!r} is not a list of distinct ids", "draft_vocab_map")
    if known[0] < 0 or known[-1] >= vocab_size:
        raise ConfigError(
            f"draft_vocab_map {str(file)!r} names ids outside the vocabulary of {vocab_size}",
            "draft_vocab_map",
        )
    return torch.from_numpy(known.astype(np.int64))


def load_forward(
    path: str,
    dtype: str,
    device: torch.device,
    *,
    max_context: int,
    vocab_map: torch.Tensor | None = None,
) -> Forward:
    """Load a model's forward: the fast path where it is known to say the same, else the general one.

    Args:
        path: a folder that transformers loads.
        dtype: of the weights.
        device: where they go.
        max_context: positions that will be served.
        vocab_map: ids to compute logits of; the others' are -inf. The general path computes all.

    Raises:
        ModelUnavailable: transformers cannot load it.
        ConfigError: its state cannot be rolled back, or its attention cannot be replaced without changing
            what it says.
    """
    model = load_model(path, dtype, device, max_context=max_context)
    observed = observe(path, model)
    if families.is_known(model):
        decoder = Decoder(families.take_apart(model, observed.traits, max_context, vocab_map))
        try:
            check(decoder, observed)
            return decoder
        except ConfigError as error:
            logger.warning("%s; it is served by transformers' own layers, which is slower", error.message)
            model = load_model(path, dtype, device, max_context=max_context)
    forward = TransformersForward(model)
    check(forward, observed)
    return forward


_WARM_UP = SequenceId("warm-up")


def warm_up(runner: ModelRunner) -> None:
    """Feed what serving feeds: a prompt, single tokens and a few tokens.

    Compiles what is compiled at first use, and claims the KV cache's memory.
    """
    runner.open(_WARM_UP)
    limit = min(runner.max_context, runner.kv_capacity_tokens) - 8
    for num_tokens in (max(1, min(64, limit)), 1, 6):
        if runner.length(_WARM_UP) + num_tokens <= runner.max_context:
            runner.forward([ForwardItem(sequence_id=_WARM_UP, token_ids=[0] * num_tokens, num_rows=1)])
    runner.close(_WARM_UP)


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
    """Load weights into transformers' own layers, with our attention in place.

    Args:
        path: a folder that transformers loads.
        dtype: of the weights.
        device: where they go.
        max_context: positions that will be served; None is the model's own limit.

    Raises:
        ModelUnavailable: transformers cannot load it.
        ConfigError: its state cannot be rolled back, or its attention cannot be replaced.
    """
    interface.register()
    disable_progress_bar()  # weights load in seconds; workers' output is a log
    try:
        config = AutoConfig.from_pretrained(path)
        _refuse_recurrent(path, config.get_text_config())
        _refuse_foreign_attention(path, config)
        _settle_rope(config.get_text_config(), max_context)
        model = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=getattr(torch, dtype), attn_implementation=interface.IMPLEMENTATION
        )
    except (OSError, ValueError) as error:
        raise ModelUnavailable(f"cannot load model {path!r}: {error}") from error
    return model.to(device).eval().requires_grad_(False)


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
