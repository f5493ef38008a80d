"""What a gateway must know of the served model beyond its tokenizer and the configuration."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Facts about the target model that requests are checked against."""

    max_context: int
    """Prompt and output tokens together. A target worker that reports less lowers it."""
    vocab_size: int
    """Ids the tokenizer knows; a prompt or logit bias may name no other."""
    eos_token_ids: frozenset[int]
    """Every id that ends a sequence by itself: the tokenizer's and the generation configuration's."""
    created: int = 0
    """Unix time in whole seconds, shown by ``/v1/models``."""
