"""Messages of a conversation as OpenAI's clients send them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from specdec.errors import InvalidRequest
from specdec.gateway.openai_fields import Fields, only
from specdec.gateway.requests import ChatMessage, ToolCall


def _text_parts(value: object) -> object:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if value is None or isinstance(value, list):
        return value
    raise PydanticCustomError("content_type", "must be a string or a list of text parts")


class TextPart(Fields):
    type: Literal["text"]
    text: str


class FunctionFields(Fields):
    name: str
    arguments: str


class ToolCallFields(Fields):
    id: str
    type: Literal["function"] = "function"
    function: FunctionFields
    index: int | None = None


class ChatMessageFields(Fields):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        list[TextPart] | None,
        BeforeValidator(_text_parts, json_schema_input_type=str | list[TextPart] | None),
    ] = None
    name: str | None = None
    tool_calls: list[ToolCallFields] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    type: Literal["text"] | None = None
    """Without effect; lm-eval writes it into every message."""

    # Clients send an assistant's earlier answer back as they received it.
    refusal: Annotated[str | None, only(None)] = None
    annotations: Annotated[list[object] | None, only(None, [])] = None
    audio: Annotated[object, only(None)] = None
    function_call: Annotated[object, only(None)] = None

    def to_message(self, idx: int) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise InvalidRequest(
                f"messages[{idx}].content must not be null in a {self.role} message",
                f"messages[{idx}].content",
            )
        return ChatMessage(
            role=self.role,
            # Parts are joined as they are: nothing is invented between them.
            content="".join(part.text for part in self.content or ()),
            name=self.name,
            tool_calls=tuple(
                ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
                for call in self.tool_calls or ()
            ),
            tool_call_id=self.tool_call_id,
            reasoning=self.reasoning_content or "",
        )
