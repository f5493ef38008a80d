"""The fields that offer tools: ``tools``, ``tool_choice``, ``parallel_tool_calls``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, cast

from pydantic import PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from specdec.gateway.openai_fields import Fields
from specdec.gateway.tools.definitions import Tool, make_tool


class FunctionDefinitionFields(Fields):
    name: str
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None
    """A call that is not forced follows its schema, too."""

    def to_tool(self, param: str) -> Tool:
        """Check and translate; see `make_tool`."""
        return make_tool(self.name, self.description, self.parameters, param, is_strict=self.strict is True)


class ToolFields(Fields):
    type: Literal["function"]
    function: FunctionDefinitionFields


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """``tool_choice``: one of its words, or the name of the one function to call."""

    word: Literal["none", "auto", "required"] = "auto"
    forced: str | None = None


def _chat_choice(value: object) -> ToolChoice | None:
    match value:
        case {"type": "function", "function": {"name": str() as name}, **rest} if not rest:
            return ToolChoice(forced=name)
    return _word(value, '{"type": "function", "function": {"name": ...}}')


def _responses_choice(value: object) -> ToolChoice | None:
    match value:
        case {"type": "function", "name": str() as name, **rest} if not rest:
            return ToolChoice(forced=name)
    return _word(value, '{"type": "function", "name": ...}')


def _word(value: object, form: str) -> ToolChoice | None:
    if value is None:
        return None
    if isinstance(value, str) and value in ("none", "auto", "required"):
        return ToolChoice(word=cast("Literal['none', 'auto', 'required']", value))
    raise PydanticCustomError("tool_choice", 'must be "none", "auto", "required" or {form}', {"form": form})


_WORDS = {"enum": ["none", "auto", "required", None]}
_NAME = {"type": "string"}
_FUNCTION = {"const": "function"}

ChatToolChoice = Annotated[
    ToolChoice | None,
    PlainValidator(_chat_choice),
    WithJsonSchema(
        {
            "anyOf": [
                _WORDS,
                {
                    "type": "object",
                    "required": ["type", "function"],
                    "properties": {
                        "type": _FUNCTION,
                        "function": {
                            "type": "object",
                            "required": ["name"],
                            "properties": {"name": _NAME},
                            "additionalProperties": False,
                        },
                    },
                    "additionalProperties": False,
                },
            ]
        }
    ),
]
ResponsesToolChoice = Annotated[
    ToolChoice | None,
    PlainValidator(_responses_choice),
    WithJsonSchema(
        {
            "anyOf": [
                _WORDS,
                {
                    "type": "object",
                    "required": ["type", "name"],
                    "properties": {"type": _FUNCTION, "name": _NAME},
                    "additionalProperties": False,
                },
            ]
        }
    ),
]
