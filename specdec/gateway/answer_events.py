"""A choice's events with its text taken apart."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from specdec.gateway.answers import Answer, TextParser
from specdec.gateway.events import Finished, GenerationEvent, TextDelta
from specdec.gateway.placed_tokens import PlacedTokens


async def with_parts(
    events: AsyncGenerator[GenerationEvent, None], parser: TextParser, *, places_tokens: bool
) -> AsyncGenerator[GenerationEvent, None]:
    """Yield one choice's events, with the parts of its text and whether there are calls among them.

    What a parser holds back until the end comes in a `TextDelta` of its own. Closing this closes ``events``.

    Args:
        events: of one choice.
        parser: of its text.
        places_tokens: whether parts of content have their tokens.
    """
    answer = Answer()
    placed = PlacedTokens(parser) if places_tokens else None
    async with aclosing(events):
        async for event in events:
            match event:
                case TextDelta():
                    parts = tuple(
                        placed.push(event.text, event.tokens) if placed else parser.push(event.text)
                    )
                    answer.add(parts)
                    yield replace(event, parts=parts)
                case Finished():
                    rest = tuple((placed or parser).finish())
                    answer.add(rest)
                    if rest:
                        yield TextDelta(index=event.index, text="", token_ids=(), parts=rest)
                    yield replace(event, has_calls=bool(answer.calls))
                case _:
                    yield event
