"""The body of ``POST /v1/responses`` in its stateless text form, and its translation to a `ClientRequest`.

Nothing is stored: what asks for state is refused by name. See `specdec.gateway.openai_fields` for what all
fields have in common.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from specdec.errors import InvalidRequest
from specdec.gateway import structured
from specdec.gateway.openai_fields import Fields, GenerationFields, StreamOptions, only
from specdec.gateway.openai_structured import Schema, StructuredOutputsFields, constraint_of
from specdec.gateway.openai_tools import FunctionDefinitionFields, ResponsesToolChoice, ToolChoice
from specdec.gateway.requests import ChatPrompt, ClientRequest
from specdec.gateway.responses_input import ItemFields, conversation
from specdec.gateway.structured import Constraint
from specdec.gateway.tools.definitions import ToolUse, make_tool_use


def _input(value: object) -> object:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if isinstance(value, list):
        return value
    raise PydanticCustomError("input_type", "must be a string or a list of items")


class TextFormatFields(Fields):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Schema = None
    strict: bool | None = None
    """Without effect: a schema is always followed."""

    def constraint(self) -> Constraint | None:
        """Translate.

        Raises:
            InvalidRequest: the schema is missing, or stands where none is asked for.
        """
        param = "text.format"
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise InvalidRequest(f'{param}: schema and type "json_schema" go together', param)
        if self.schema_ is not None:
            return structured.json_schema(self.schema_, param)
        return structured.json_object(param) if self.type == "json_object" else None


class TextFields(Fields):
    format: TextFormatFields | None = None
    verbosity: Annotated[object, only(None)] = None


class _FunctionType(Fields):
    type: Literal["function"]


class ResponseToolFields(FunctionDefinitionFields, _FunctionType):
    """The type is looked at first: tools of other types have other fields."""


class ResponseStreamOptions(StreamOptions):
    include_usage: Annotated[bool | None, only(None)] = None


class ResponsesRequest(GenerationFields):
    """Body of ``POST /v1/responses``."""

    input: Annotated[list[ItemFields], BeforeValidator(_input, json_schema_input_type=str | list[ItemFields])]
    instructions: str | None = None
    max_output_tokens: Annotated[int | None, Field(ge=1)] = None
    text: TextFields | None = None
    tools: list[ResponseToolFields] | None = None
    tool_choice: ResponsesToolChoice = None
    parallel_tool_calls: bool | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    top_logprobs: int | None = None
    stream_options: ResponseStreamOptions | None = None
    structured_outputs: StructuredOutputsFields | None = None
    chat_template_kwargs: dict[str, object] | None = None

    # Called otherwise here, or not supported; accepted where the value asks for nothing.
    max_tokens: Annotated[int | None, only(None)] = None
    n: Annotated[int | None, only(None, 1)] = None
    previous_response_id: Annotated[object, only(None)] = None
    conversation: Annotated[object, only(None)] = None
    background: Annotated[bool | None, only(None, False)] = None
    prompt: Annotated[object, only(None)] = None
    max_tool_calls: Annotated[object, only(None)] = None
    reasoning: Annotated[object, only(None, {})] = None
    truncation: Annotated[str | None, only(None, "disabled")] = None

    # Changes nothing in the output.
    prompt_cache_retention: str | None = None

    @property
    def tool_use(self) -> ToolUse | None:
        """The tools to offer.

        Raises:
            InvalidRequest: they are malformed.
        """
        choice = self.tool_choice or ToolChoice()
        return make_tool_use(
            [tool.to_tool(f"tools[{idx}]") for idx, tool in enumerate(self.tools or ())],
            choice.word,
            choice.forced,
            is_parallel=self.parallel_tool_calls is not False,
        )

    def to_client_request(self, request_id: str) -> ClientRequest:
        """Translate.

        Raises:
            InvalidRequest: fields contradict each other.
        """
        self.check_stream_options()
        if self.top_logprobs and not self.include:
            raise InvalidRequest(
                'top_logprobs is only allowed with include: ["message.output_text.logprobs"]', "top_logprobs"
            )
        text_format = self.text.format if self.text is not None else None
        constraint = constraint_of(
            text_format.constraint() if text_format is not None else None, self.structured_outputs
        )
        prompt = ChatPrompt(
            messages=conversation(self.instructions, self.input),
            param="input",
            tools=self.tool_use,
            template_options=self.chat_template_kwargs or {},
        )
        return ClientRequest(
            request_id=request_id,
            prompts=(prompt,),
            num_logprobs=(self.top_logprobs or 0) if self.include else None,
            logprobs_field="top_logprobs",
            places_tokens=bool(self.include),
            model=self.model,
            sampling=self.sampling_options(self.max_output_tokens, constraint),
            speculative=self.speculative_options(),
        )
