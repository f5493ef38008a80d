"""What a deployment serves: models, or simulated ones in their place.

Imports of torch and transformers wait until they are needed: only worker processes should pay for torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from specdec.config import AppConfig, ModelConfig
from specdec.errors import ModelUnavailable, SpecDecError
from specdec.models import check_pair, load_tokenizer, model_info
from specdec.models.simulated import simulated_info, simulated_tokenizer
from specdec.types import ModelInfo

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from specdec.engine.grammar import Grammars
    from specdec.engine.runner import Runner


def target_info(config: AppConfig) -> ModelInfo:
    """Describe the target.

    Raises:
        ModelUnavailable: it, its tokenizer or its context length cannot be found.
    """
    if config.simulation is not None:
        return simulated_info(config.simulation.vocab_size, config.simulation.max_context)
    return model_info(config.target.model)


def target_tokenizer(config: AppConfig) -> PreTrainedTokenizerBase:
    """Load what makes text of the target's token ids.

    Raises:
        ModelUnavailable: the model or its tokenizer cannot be found or loaded.
    """
    if config.simulation is not None:
        return simulated_tokenizer(config.simulation.vocab_size)
    return load_tokenizer(config.target.model)


def grammars_of(config: AppConfig) -> Grammars:
    """What tells a worker, draft or target, which tokens a grammar allows."""
    from specdec.engine.grammar import Grammars

    info = target_info(config)
    return Grammars(lambda: target_tokenizer(config), info.vocab_size, info.eos_token_ids)


def load_target(config: AppConfig, model: ModelConfig) -> Runner:
    """Load the target to its device.

    Args:
        config: the whole configuration.
        model: the target's part of it, with the device decided.

    Raises:
        ModelUnavailable: it cannot be found, read, or held in memory.
        ConfigError: its device or architecture cannot serve.
    """
    if config.simulation is not None:
        from specdec.engine.simulated_pair import make_runner

        return make_runner(config.simulation, "target", kv_capacity_tokens=model.kv_capacity_tokens)
    with _naming("target", model):
        from specdec.engine.loading import load_runner

        info = model_info(model.model)
        return load_runner(model, vocab_size=info.vocab_size, max_context=info.max_context)


def load_draft(config: AppConfig, model: ModelConfig) -> Runner:
    """Load the draft to its device; arguments as of `load_target`.

    Raises:
        ModelUnavailable: as `load_target`.
        ConfigError: likewise, or it does not mean the same tokens as the target.
    """
    if config.simulation is not None:
        from specdec.engine.simulated_pair import make_runner

        return make_runner(config.simulation, "draft", kv_capacity_tokens=model.kv_capacity_tokens)
    with _naming("draft", model):
        from specdec.engine.loading import load_runner

        pair = check_pair(config.target.model, model.model)
        return load_runner(model, vocab_size=pair.vocab_size, max_context=pair.draft_context)


@contextmanager
def _naming(role: str, model: ModelConfig) -> Iterator[None]:
    """Say of whatever a library raises which model it is about, in one line."""
    try:
        yield
    except SpecDecError:
        raise
    except Exception as error:
        name = f"the {role} model {model.model!r}"
        if _is_out_of_memory(error):
            raise ModelUnavailable(
                f"{name} does not fit into memory with a KV cache of {model.kv_capacity_tokens} tokens "
                f"({role}.kv_capacity_tokens)"
            ) from error
        reason = " ".join(str(error).split())
        raise ModelUnavailable(f"{name} cannot be loaded: {type(error).__name__}: {reason}") from error


def _is_out_of_memory(error: Exception) -> bool:
    """Python and numpy raise MemoryError; torch's CPU allocator and CUDA raise kinds of RuntimeError."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or "allocate memory" in text or "out of memory" in text
