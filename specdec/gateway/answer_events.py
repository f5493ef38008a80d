"""A choice's events with its text taken apart."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from specdec.gateway.answers import Answer, TextParser
from specdec.gateway.events import Finished, GenerationEvent, TextDelta


async def with_parts(
    events: AsyncGenerator[GenerationEvent, None], parser: TextParser
) -> AsyncGenerator[GenerationEvent, None]:
    """Yield one choice's events, with the parts of its text and whether there are calls among them.

    What a parser holds back until the end comes in a `TextDelta` of its own. Closing this closes ``events``.
    """
    answer = Answer()
    async with aclosing(events):
        async for event in events:
            match event:
                case TextDelta():
                    parts = tuple(parser.push(event.text))
                    answer.add(parts)
                    yield replace(event, parts=parts)
                case Finished():
                    rest = tuple(parser.finish())
                    answer.add(rest)
                    if rest:
                        yield TextDelta(index=event.index, text="", token_ids=(), parts=rest)
                    yield replace(event, has_calls=bool(answer.calls))
                case _:
                    yield event
