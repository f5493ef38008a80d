"""The fields that say what an output must look like: ``response_format`` and ``structured_outputs``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from specdec.errors import InvalidRequest
from specdec.gateway import structured
from specdec.gateway.openai_fields import Fields
from specdec.gateway.structured import Constraint

Schema = Annotated[dict[str, object] | None, Field(alias="schema")]


class JsonSchemaFields(Fields):
    name: str | None = None
    description: str | None = None
    schema_: Schema = None
    strict: bool | None = None
    """Without effect: a schema is always followed."""


class ResponseFormatFields(Fields):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFields | None = None

    def constraint(self) -> Constraint | None:
        """Translate; what is wrong with it is put on the whole field, as OpenAI does.

        Raises:
            InvalidRequest: the schema is missing, or stands where none is asked for.
        """
        param = "response_format"
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise InvalidRequest(f'{param}: json_schema and type "json_schema" go together', param)
        if self.json_schema is not None:
            if self.json_schema.schema_ is None:
                raise InvalidRequest(f"{param}.json_schema.schema is required", param)
            return structured.json_schema(self.json_schema.schema_, param)
        return structured.json_object(param) if self.type == "json_object" else None


class StructuredOutputsFields(Fields):
    """Not OpenAI's: what other servers for open models call the same. Exactly one of them."""

    json_: Annotated[dict[str, object] | str | None, Field(alias="json")] = None
    """A schema or its JSON text."""
    regex: str | None = None
    grammar: str | None = None
    choice: list[str] | None = None
    json_object: bool | None = None

    def constraint(self) -> Constraint:
        """Translate.

        Raises:
            InvalidRequest: not exactly one is given, or it is malformed.
        """
        param = "structured_outputs"
        given: list[Constraint] = []
        if self.json_ is not None:
            given.append(structured.json_schema(self.json_, f"{param}.json"))
        if self.regex is not None:
            given.append(structured.regex(self.regex, f"{param}.regex"))
        if self.grammar is not None:
            given.append(structured.lark(self.grammar, f"{param}.grammar"))
        if self.choice is not None:
            given.append(structured.choice(self.choice, f"{param}.choice"))
        if self.json_object:
            given.append(structured.json_object(f"{param}.json_object"))
        if len(given) != 1:
            raise InvalidRequest(
                f"{param} must have one of json, regex, grammar, choice and json_object, got {len(given)}",
                param,
            )
        return given[0]


def constraint_of(
    response_format: Constraint | None, structured_outputs: StructuredOutputsFields | None
) -> Constraint | None:
    """Choose the one that is given.

    Raises:
        InvalidRequest: both are given, or one is malformed.
    """
    if structured_outputs is None:
        return response_format
    constraint = structured_outputs.constraint()
    if response_format is not None:
        raise InvalidRequest(
            f"structured_outputs and {response_format.param} both say what the output must look like",
            "structured_outputs",
        )
    return constraint
