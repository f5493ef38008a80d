"""What a generation gives back, whichever protocol carries it.

Every event belongs to one choice: first its `PromptEcho`, if asked for, then its `TextDelta`, then its
`Finished`. The choices' events interleave; the last of all carries the `Totals`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from specdec.errors import InvariantViolation
from specdec.gateway.answers import Part
from specdec.types import FinishReason, SpeculationStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    prompt_tokens: int
    """Each prompt's once."""
    completion_tokens: int
    """Tokens generated, the EOS or stop token included: of all choices, and of candidates not returned."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class LikelyToken:
    """One of the likeliest tokens at a position; see `specdec.gateway.vocabulary.TokenPiece`."""

    token_id: int
    text: str
    utf8: bytes
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredToken:
    """A token of prompt or output with the target's opinion of it; see `specdec.types.TokenLogprob`."""

    token_id: int
    text: str
    utf8: bytes
    logprob: float | None
    """None for the first token of a prompt."""
    top: tuple[LikelyToken, ...] = ()
    """The likeliest tokens, likeliest first; the token itself need not be among them."""
    text_offset: int
    """Characters of the choice's text before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptEcho:
    """The prompt, given back."""

    index: int = 0
    text: str
    tokens: tuple[ScoredToken, ...] = ()
    """One per token if log-probabilities were asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """What one round added. Text can lag behind the tokens while a character or stop string is incomplete."""

    index: int = 0
    """Of the choice."""
    text: str
    token_ids: tuple[int, ...]
    tokens: tuple[ScoredToken, ...] = ()
    """One per token id if log-probabilities were asked for."""
    parts: tuple[Part, ...] | None = None
    """What the text is, as far as that is certain; None where all of it is content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Of the whole request."""

    usage: Usage
    stats: SpeculationStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The last event of a choice."""

    index: int = 0
    finish_reason: FinishReason
    has_calls: bool = False
    """There are tool calls among the parts."""
    totals: Totals | None = None
    """Set on the last event of all."""


GenerationEvent = PromptEcho | TextDelta | Finished


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A whole choice."""

    index: int
    text: str
    """Without the prompt."""
    token_ids: tuple[int, ...]
    tokens: tuple[ScoredToken, ...]
    """One per token id if log-probabilities were asked for."""
    echo: PromptEcho | None
    finish_reason: FinishReason
    has_calls: bool
    """There are tool calls among the parts."""
    parts: tuple[Part, ...] | None = None
    """What the text is; None where all of it is content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole generation."""

    choices: tuple[Choice, ...]
    """By index, which counts from 0 without gaps."""
    totals: Totals


@dataclass(slots=True)
class _Parts:
    """What has come of one choice."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    tokens: list[ScoredToken] = field(default_factory=list)
    parts: list[Part] | None = None
    echo: PromptEcho | None = None
    finish_reason: FinishReason | None = None
    has_calls: bool = False

    def add(self, event: GenerationEvent) -> None:
        match event:
            case PromptEcho():
                self.echo = event
            case TextDelta():
                self.texts.append(event.text)
                self.token_ids += event.token_ids
                self.tokens += event.tokens
                if event.parts is not None:
                    self.parts = self.parts or []
                    self.parts += event.parts
            case Finished():
                self.finish_reason = event.finish_reason
                self.has_calls = event.has_calls

    def choice(self, index: int) -> Choice:
        assert self.finish_reason is not None
        return Choice(
            index=index,
            text="".join(self.texts),
            token_ids=tuple(self.token_ids),
            tokens=tuple(self.tokens),
            echo=self.echo,
            finish_reason=self.finish_reason,
            has_calls=self.has_calls,
            parts=None if self.parts is None else tuple(self.parts),
        )


async def collect(events: AsyncGenerator[GenerationEvent, None]) -> Completion:
    """Wait for the whole generation; cancelling this closes ``events``."""
    parts: dict[int, _Parts] = {}
    async with aclosing(events):
        async for event in events:
            parts.setdefault(event.index, _Parts()).add(event)
            if isinstance(event, Finished) and event.totals is not None:
                return Completion(
                    choices=tuple(parts[index].choice(index) for index in sorted(parts)), totals=event.totals
                )
    raise InvariantViolation("a generation ended without its last event")
