"""The items of a ``POST /v1/responses`` and the conversation they make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal, TypeVar

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from specdec.errors import InvalidRequest
from specdec.gateway.openai_fields import Fields, only
from specdec.gateway.requests import ChatMessage, ToolCall

Value = TypeVar("Value")


def _parts(value: object) -> object:
    if isinstance(value, str):
        return [{"type": "input_text", "text": value}]
    if value is None or isinstance(value, list):
        return value
    raise PydanticCustomError("content_type", "must be a string or a list of text parts")


class PartFields(Fields):
    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str

    # As they come back in an answer.
    annotations: Annotated[list[object] | None, only(None, [])] = None
    logprobs: list[object] | None = None


Parts = Annotated[list[PartFields] | None, BeforeValidator(_parts)]


class ItemFields(Fields):
    """One item; which fields it needs depends on its type."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Parts = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Parts = None

    # As they come back in an answer.
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    summary: list[PartFields] | None = None
    encrypted_content: Annotated[object, only(None)] = None
    phase: str | None = None


def conversation(instructions: str | None, items: Sequence[ItemFields]) -> tuple[ChatMessage, ...]:
    """Translate items to messages. What the assistant thought, said and called in a row is one message.

    Raises:
        InvalidRequest: an item lacks a field of its type.
    """
    messages = [ChatMessage(role="system", content=instructions)] if instructions else []
    thought = ""
    for idx, item in enumerate(items):
        param = f"input[{idx}]"
        if item.type == "reasoning":
            thought += _text(item.content)
            continue
        message = replace(_message(item, param), reasoning=thought)
        thought = ""
        last = messages[-1] if messages else None
        if item.type == "function_call" and last is not None and last.role == "assistant":
            messages[-1] = replace(last, tool_calls=last.tool_calls + message.tool_calls)
        else:
            messages.append(message)
    return tuple(messages)


def _message(item: ItemFields, param: str) -> ChatMessage:
    match item.type:
        case "function_call":
            call = ToolCall(
                id=_needed(item.call_id, f"{param}.call_id"),
                name=_needed(item.name, f"{param}.name"),
                arguments=_needed(item.arguments, f"{param}.arguments"),
            )
            return ChatMessage(role="assistant", tool_calls=(call,))
        case "function_call_output":
            return ChatMessage(
                role="tool",
                content=_text(_needed(item.output, f"{param}.output")),
                tool_call_id=_needed(item.call_id, f"{param}.call_id"),
            )
        case _:
            return ChatMessage(
                role=_needed(item.role, f"{param}.role"),
                content=_text(_needed(item.content, f"{param}.content")),
            )


def _text(parts: Sequence[PartFields] | None) -> str:
    return "".join(part.text for part in parts or ())


def _needed(value: Value | None, param: str) -> Value:
    if value is None:
        raise InvalidRequest(f"{param} is required", param)
    return value
