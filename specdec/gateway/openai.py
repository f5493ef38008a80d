"""The OpenAI-compatible request bodies and their translation to a `ClientRequest`.

See `specdec.gateway.openai_fields` for what all fields have in common.
"""

from __future__ import annotations

from typing import Annotated, TypeGuard

from pydantic import Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from specdec.errors import InvalidRequest
from specdec.gateway.openai_fields import GenerationFields, only
from specdec.gateway.openai_messages import ChatMessageFields
from specdec.gateway.openai_structured import ResponseFormatFields, StructuredOutputsFields, constraint_of
from specdec.gateway.openai_tools import ChatToolChoice, ToolChoice, ToolFields
from specdec.gateway.requests import ChatPrompt, ClientRequest, TextPrompt, TokenPrompt
from specdec.gateway.tools.definitions import ToolUse, make_tool_use

PromptValue = str | list[int]


class ChatCompletionRequest(GenerationFields):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[ChatMessageFields]
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormatFields | None = None
    tools: list[ToolFields] | None = None
    tool_choice: ChatToolChoice = None
    parallel_tool_calls: bool | None = None
    structured_outputs: StructuredOutputsFields | None = None
    chat_template_kwargs: dict[str, object] | None = None

    # Not supported yet; accepted where the value asks for nothing.
    functions: Annotated[list[object] | None, only(None, [])] = None
    function_call: Annotated[object, only(None, "none", "auto")] = None
    modalities: Annotated[list[object] | None, only(None, ["text"])] = None
    audio: Annotated[object, only(None)] = None
    prediction: Annotated[object, only(None)] = None
    reasoning_effort: Annotated[object, only(None)] = None
    verbosity: Annotated[object, only(None)] = None
    web_search_options: Annotated[object, only(None)] = None

    @property
    def num_choices(self) -> int:
        return self.n or 1

    def to_client_request(self, request_id: str) -> ClientRequest:
        """Translate.

        Raises:
            InvalidRequest: fields contradict each other.
        """
        self.check_stream_options()
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs is only allowed with logprobs: true", "top_logprobs")
        constraint = constraint_of(
            self.response_format.constraint() if self.response_format is not None else None,
            self.structured_outputs,
        )
        prompt = ChatPrompt(
            messages=tuple(message.to_message(idx) for idx, message in enumerate(self.messages)),
            tools=self._tool_use(),
            template_options=self.chat_template_kwargs or {},
        )
        return ClientRequest(
            request_id=request_id,
            prompts=(prompt,),
            n=self.n,
            num_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            logprobs_field="top_logprobs",
            model=self.model,
            sampling=self.sampling_options(self._max_tokens(), constraint),
            speculative=self.speculative_options(),
        )

    def _tool_use(self) -> ToolUse | None:
        tools = [tool.function.to_tool(f"tools[{idx}].function") for idx, tool in enumerate(self.tools or ())]
        choice = self.tool_choice or ToolChoice()
        return make_tool_use(
            tools, choice.word, choice.forced, is_parallel=self.parallel_tool_calls is not False
        )

    def _max_tokens(self) -> int | None:
        if self.max_completion_tokens is None:
            return self.max_tokens
        if self.max_tokens not in (None, self.max_completion_tokens):
            raise InvalidRequest(
                "max_tokens and max_completion_tokens mean the same and differ: send one of them",
                "max_completion_tokens",
            )
        return self.max_completion_tokens


def _prompts(value: object) -> list[PromptValue]:
    """Reduce the four forms of ``prompt`` to a list of texts or of lists of token ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _is_token_ids(value):
            return [value]
        if all(isinstance(item, str) for item in value) or all(_is_token_ids(item) for item in value):
            return value
    raise PydanticCustomError(
        "prompt_type",
        "must be a string, a list of strings, a list of token ids, or a list of lists of token ids,"
        " and not empty",
    )


def _is_token_ids(value: object) -> TypeGuard[list[int]]:
    # bool is an int to Python, not to JSON.
    return isinstance(value, list) and all(type(item) is int for item in value)


_TOKEN_IDS_SCHEMA = {"type": "array", "items": {"type": "integer"}}


class CompletionRequest(GenerationFields):
    """Body of ``POST /v1/completions``."""

    prompt: Annotated[
        list[PromptValue],
        PlainValidator(_prompts),
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "items": {"type": "string"}, "minItems": 1},
                    {**_TOKEN_IDS_SCHEMA, "minItems": 1},
                    {"type": "array", "items": _TOKEN_IDS_SCHEMA, "minItems": 1},
                ]
            },
        ),
    ]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    structured_outputs: StructuredOutputsFields | None = None

    # Not supported; accepted where the value asks for nothing.
    suffix: Annotated[str | None, only(None, "")] = None

    @property
    def num_choices(self) -> int:
        return len(self.prompt) * (self.n or 1)

    def to_client_request(self, request_id: str) -> ClientRequest:
        """Translate.

        Raises:
            InvalidRequest: fields contradict each other.
        """
        self.check_stream_options()
        if self.stream and self.best_of is not None and self.best_of > (self.n or 1):
            raise InvalidRequest(
                "best_of above n cannot be streamed: which candidate is best shows at the end", "best_of"
            )
        return ClientRequest(
            request_id=request_id,
            prompts=tuple(
                TextPrompt(text=prompt) if isinstance(prompt, str) else TokenPrompt(token_ids=tuple(prompt))
                for prompt in self.prompt
            ),
            n=self.n,
            best_of=self.best_of,
            echo=bool(self.echo),
            num_logprobs=self.logprobs,
            model=self.model,
            sampling=self.sampling_options(self.max_tokens, constraint_of(None, self.structured_outputs)),
            speculative=self.speculative_options(),
        )
