"""An answer's parts as OpenAI's chat objects know them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from specdec.gateway.answers import (
    Answer,
    CallArguments,
    CallBroken,
    CallStart,
    Content,
    Part,
    Reasoning,
    new_call_id,
)

JsonObject = dict[str, object]


def message_of(parts: Iterable[Part]) -> JsonObject:
    """Return the fields of a whole message; ``content`` is null where there is something else alone."""
    answer = Answer()
    answer.add(parts)
    is_empty = not answer.content and bool(answer.calls or answer.reasoning)
    message: JsonObject = {"content": None if is_empty else answer.content}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [
            {
                "id": new_call_id(),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in answer.calls
        ]
    return message


def delta_of(part: Part) -> JsonObject:
    """Return a streamed part: a call's name comes first, then its arguments."""
    match part:
        case Content() | CallBroken():
            return {"content": part.text}
        case Reasoning():
            return {"reasoning_content": part.text}
        case CallStart():
            function = {"name": part.name, "arguments": ""}
            call = {"index": part.index, "id": new_call_id(), "type": "function", "function": function}
            return {"tool_calls": [call]}
        case CallArguments():
            return {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}
        case _:
            assert_never(part)
