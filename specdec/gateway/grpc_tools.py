"""Tools in gRPC messages: those a request offers, and the calls and the reasoning of an answer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Literal, assert_never

from specdec.errors import InvalidRequest
from specdec.gateway.answers import (
    Answer,
    CallArguments,
    CallBroken,
    CallStart,
    Content,
    Part,
    Reasoning,
    merged,
    new_call_id,
)
from specdec.gateway.proto import generation_pb2 as pb
from specdec.gateway.tools.definitions import Tool, ToolUse, make_tool, make_tool_use

_CHOICES: dict[int, Literal["none", "auto", "required"] | None] = {
    pb.TOOL_CHOICE_MODE_UNSPECIFIED: None,
    pb.TOOL_CHOICE_MODE_NONE: "none",
    pb.TOOL_CHOICE_MODE_AUTO: "auto",
    pb.TOOL_CHOICE_MODE_REQUIRED: "required",
}


def to_tool_use(request: pb.GenerateRequest) -> ToolUse | None:
    """Translate the tools of a request; None where nothing may be called.

    Raises:
        InvalidRequest: they are malformed, or stand beside another prompt than messages.
    """
    if request.tools and request.WhichOneof("prompt") != "messages":
        raise InvalidRequest("tools are only allowed with messages", "tools")
    choice = request.tool_choice
    if choice.mode not in _CHOICES:
        raise InvalidRequest(f"unknown tool choice mode {choice.mode}", "tool_choice.mode")
    return make_tool_use(
        [_tool(tool, f"tools[{idx}]") for idx, tool in enumerate(request.tools)],
        _CHOICES[choice.mode],
        choice.name if choice.WhichOneof("choice") == "name" else None,
        is_parallel=request.parallel_tool_calls if request.HasField("parallel_tool_calls") else True,
    )


def _tool(tool: pb.Tool, param: str) -> Tool:
    parameters = _schema(tool.parameters, f"{param}.parameters") if tool.HasField("parameters") else None
    return make_tool(tool.name, tool.description, parameters, param, is_strict=tool.strict)


def _schema(text: str, param: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param} is not valid JSON: {str(error)[:200]}", param) from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"{param}: a JSON schema must be an object", param)
    return value


def write_answer(parts: Iterable[Part], choice: pb.Choice) -> None:
    """Write a whole answer, taken apart, into its choice."""
    answer = Answer()
    answer.add(parts)
    choice.text, choice.reasoning_content = answer.content, answer.reasoning
    choice.tool_calls.extend(
        pb.ToolCall(id=new_call_id(), name=call.name, arguments=call.arguments) for call in answer.calls
    )


def write_delta(parts: Iterable[Part], message: pb.GenerateStreamResponse) -> None:
    """Write new parts of an answer into a message of its stream."""
    for part in merged(parts):
        match part:
            case Content() | CallBroken():
                message.text += part.text
            case Reasoning():
                message.reasoning_content += part.text
            case CallStart():
                message.tool_calls.add(index=part.index, id=new_call_id(), name=part.name)
            case CallArguments():
                message.tool_calls.add(index=part.index, arguments=part.text)
            case _:
                assert_never(part)
