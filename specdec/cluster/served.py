"""What a deployment serves: models, or simulated ones in their place.

Imports of torch and transformers wait until they are needed: only worker processes should pay for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.config import AppConfig, ModelConfig
from specdec.models import check_pair, load_tokenizer, model_info
from specdec.models.simulated import simulated_info, simulated_tokenizer
from specdec.types import ModelInfo

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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


def load_target(config: AppConfig, model: ModelConfig) -> Runner:
    """Load the target to its device.

    Args:
        config: the whole configuration.
        model: the target's part of it, with the device decided.
    """
    if config.simulation is not None:
        from specdec.engine.simulated_pair import make_runner

        return make_runner(config.simulation, "target", kv_capacity_tokens=model.kv_capacity_tokens)
    from specdec.engine.loading import load_runner

    info = model_info(model.model)
    return load_runner(model, vocab_size=info.vocab_size, max_context=info.max_context)


def load_draft(config: AppConfig, model: ModelConfig) -> Runner:
    """Load the draft to its device; arguments as of `load_target`."""
    if config.simulation is not None:
        from specdec.engine.simulated_pair import make_runner

        return make_runner(config.simulation, "draft", kv_capacity_tokens=model.kv_capacity_tokens)
    from specdec.engine.loading import load_runner

    pair = check_pair(config.target.model, model.model)
    return load_runner(model, vocab_size=pair.vocab_size, max_context=pair.draft_context)
