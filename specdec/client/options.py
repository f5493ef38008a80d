"""What a caller may ask for: the same names over HTTP and gRPC, described in docs/api.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

Message = Mapping[str, Any]
"""As in OpenAI's API: ``role``, ``content``, ``tool_calls``, ``reasoning_content``, ``tool_call_id``."""

ToolChoice = Literal["none", "auto", "required"] | Mapping[str, Any]
"""A word, or ``{"type": "function", "function": {"name": ...}}``."""

Prompt = str | Sequence[int] | Sequence[Message]
"""A text to continue, token ids to continue, or a conversation."""


class Options(TypedDict, total=False):
    """Left out, an option is the server's default."""

    model: str
    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    bad_words: Sequence[str]
    ignore_eos: bool
    tools: Sequence[Mapping[str, Any]]
    """Of a conversation: ``{"type": "function", "function": {"name": ..., "parameters": ...}}`` each."""
    tool_choice: ToolChoice
    parallel_tool_calls: bool
    speculative: SpeculativeOptions


class SpeculativeOptions(TypedDict, total=False):
    """How the request is decoded; the law of the output is the same."""

    num_speculative_tokens: int
    mode: Literal["rejection", "coupled"]
    pipeline: Literal["serial", "lookahead", "auto"]
    metrics: bool
    """Answer with this request's counters."""


def is_chat(prompt: Prompt) -> bool:
    """Whether a prompt is a conversation."""
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
