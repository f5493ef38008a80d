"""What a server answers, whichever protocol carried it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """A request's counters: docs/metrics.md."""

    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A function that the model calls."""

    id: str
    name: str
    arguments: str
    """JSON text; incomplete where ``max_tokens`` cut it off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A whole answer."""

    id: str
    model: str
    text: str
    finish_reason: str
    """``stop``, ``length`` or ``tool_calls``."""
    usage: Usage
    speculation: Speculation | None = None
    """Where ``speculative.metrics`` asked for it."""
    reasoning: str = ""
    """What a thinking model wrote in front of its answer to a conversation."""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a stream; the last has all that the earlier ones lack, and no text."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    """All of the answer's; in the last piece."""
    finish_reason: str | None = None
    usage: Usage | None = None
    speculation: Speculation | None = None
