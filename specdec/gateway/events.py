"""What a generation gives back, whichever protocol carries it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from specdec.errors import InvariantViolation
from specdec.types import FinishReason, SpeculationStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    """Tokens returned, the EOS or stop token included."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """What one round added. Text can lag behind the tokens while a character or stop string is incomplete."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The last event of a generation."""

    finish_reason: FinishReason
    usage: Usage
    stats: SpeculationStats


GenerationEvent = TextDelta | Finished


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole generation."""

    text: str
    token_ids: tuple[int, ...]
    finished: Finished


async def collect(events: AsyncGenerator[GenerationEvent, None]) -> Completion:
    """Wait for the whole generation; cancelling this closes ``events``."""
    texts: list[str] = []
    token_ids: list[int] = []
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Finished):
                return Completion(text="".join(texts), token_ids=tuple(token_ids), finished=event)
            texts.append(event.text)
            token_ids.extend(event.token_ids)
    raise InvariantViolation("a generation ended without its last event")
