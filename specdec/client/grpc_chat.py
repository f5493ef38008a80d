"""Conversations and tools, as OpenAI writes them, in gRPC messages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from specdec.client.options import Message, ToolChoice
from specdec.client.results import ToolCall
from specdec.errors import InvalidRequest
from specdec.gateway.proto import generation_pb2 as pb

_MODES = {
    "none": pb.TOOL_CHOICE_MODE_NONE,
    "auto": pb.TOOL_CHOICE_MODE_AUTO,
    "required": pb.TOOL_CHOICE_MODE_REQUIRED,
}


def message_of(message: Message) -> pb.ChatMessage:
    """Translate a message of a conversation."""
    return pb.ChatMessage(
        role=message["role"],
        content=message.get("content") or "",
        name=message.get("name"),
        tool_call_id=message.get("tool_call_id"),
        reasoning_content=message.get("reasoning_content"),
        tool_calls=[
            pb.ToolCall(id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"])
            for call in message.get("tool_calls") or ()
        ],
    )


def tool_of(tool: Mapping[str, Any]) -> pb.Tool:
    """Translate a tool."""
    function = tool["function"]
    parameters = function.get("parameters")
    return pb.Tool(
        name=function["name"],
        description=function.get("description") or "",
        parameters=None if parameters is None else json.dumps(parameters),
        strict=bool(function.get("strict")),
    )


def choice_of(choice: ToolChoice) -> pb.ToolChoice:
    """Translate a choice among tools.

    Raises:
        InvalidRequest: it is none.
    """
    if isinstance(choice, str):
        if choice not in _MODES:
            raise InvalidRequest(f"tool_choice must be one of {', '.join(_MODES)}", "tool_choice")
        return pb.ToolChoice(mode=_MODES[choice])
    return pb.ToolChoice(name=choice["function"]["name"])


class CallReader:
    """Puts the calls of a stream together."""

    def __init__(self) -> None:
        self._calls: dict[int, ToolCall] = {}

    def read(self, message: pb.GenerateStreamResponse) -> None:
        """Take what a message has of them."""
        for delta in message.tool_calls:
            known = self._calls.get(delta.index)
            arguments = (known.arguments if known else "") + delta.arguments
            call_id, name = (known.id, known.name) if known else (delta.id, delta.name)
            self._calls[delta.index] = ToolCall(id=call_id, name=name, arguments=arguments)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        return tuple(self._calls.values())
