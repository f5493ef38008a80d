"""The OpenAI-compatible request bodies: what fields there are, and their translation to a `ClientRequest`.

Every optional field accepts null. A field that would change the output and is not supported is accepted only
with the value that changes nothing; any unknown field is an error. Ranges are not checked here but where HTTP
and gRPC meet, in `specdec.gateway.validation`.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeGuard

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from specdec.errors import InvalidRequest
from specdec.gateway.requests import (
    ChatMessage,
    ChatPrompt,
    ClientRequest,
    Prompt,
    SamplingOptions,
    SpeculativeOptions,
    TextPrompt,
    TokenPrompt,
    ToolCall,
)
from specdec.types import Pipeline, VerificationMode


def _only(*accepted: object) -> AfterValidator:
    """Accept these values of a field that is not supported otherwise."""

    def check(value: object) -> object:
        if value not in accepted:
            raise PydanticCustomError(
                "unsupported",
                "this value is not supported yet: leave the field out or send {accepted}",
                {"accepted": " or ".join("null" if item is None else repr(item) for item in accepted)},
            )
        return value

    return AfterValidator(check)


def _strings(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _text_parts(value: object) -> object:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if value is None or isinstance(value, list):
        return value
    raise PydanticCustomError("content_type", "must be a string or a list of text parts")


def _prompt(value: object) -> str | list[int]:
    """Reduce the four forms of ``prompt`` to one text or one list of token ids."""
    match value:
        case [str() | list() as first, *others]:
            if others:
                raise PydanticCustomError(
                    "several_prompts", "several prompts in a request are not supported yet"
                )
            value = first
    if isinstance(value, str) or _is_token_ids(value):
        return value
    raise PydanticCustomError(
        "prompt_type", "must be a string, a list of token ids, or a list with exactly one of these"
    )


def _is_token_ids(value: object) -> TypeGuard[list[int]]:
    # bool is an int to Python, not to JSON.
    return isinstance(value, list) and all(type(item) is int for item in value)


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(_Fields):
    include_usage: bool | None = None
    include_obfuscation: Annotated[bool | None, _only(None, False)] = None


class SpeculativeFields(_Fields):
    """specdec's own: how this request is decoded. Nothing here changes the law of the output."""

    num_speculative_tokens: int | None = None
    mode: Literal["rejection", "coupled"] | None = None
    pipeline: Pipeline | None = None
    metrics: bool | None = None
    """Return this request's acceptance counters."""


class _GenerationFields(_Fields):
    """What chat and text completions have in common."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: Annotated[list[str] | None, BeforeValidator(_strings)] = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    n: Annotated[int | None, _only(None, 1)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculative: SpeculativeFields | None = None
    user: str | None = None

    # Change nothing in the output.
    store: bool | None = None
    metadata: dict[str, object] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def wants_metrics(self) -> bool:
        return self.speculative is not None and bool(self.speculative.metrics)

    @property
    def wants_usage_chunk(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def _client_request(self, request_id: str, prompt: Prompt, max_tokens: int | None) -> ClientRequest:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed with stream: true", "stream_options")
        return ClientRequest(
            request_id=request_id,
            prompt=prompt,
            model=self.model,
            sampling=self._sampling_options(max_tokens),
            speculative=_speculative_options(self.speculative),
        )

    def _sampling_options(self, max_tokens: int | None) -> SamplingOptions:
        return SamplingOptions(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=_logit_bias(self.logit_bias or {}),
            seed=self.seed,
            max_tokens=max_tokens,
            stop=tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
        )


class TextPart(_Fields):
    type: Literal["text"]
    text: str


class FunctionFields(_Fields):
    name: str
    arguments: str


class ToolCallFields(_Fields):
    id: str
    type: Literal["function"] = "function"
    function: FunctionFields
    index: int | None = None


class ChatMessageFields(_Fields):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[TextPart] | None, BeforeValidator(_text_parts)] = None
    name: str | None = None
    tool_calls: list[ToolCallFields] | None = None
    tool_call_id: str | None = None

    # Clients send an assistant's earlier answer back as they received it.
    refusal: Annotated[str | None, _only(None)] = None
    annotations: Annotated[list[object] | None, _only(None, [])] = None
    audio: Annotated[object, _only(None)] = None
    function_call: Annotated[object, _only(None)] = None

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
        )


class ChatCompletionRequest(_GenerationFields):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[ChatMessageFields]
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None

    # Not supported yet; accepted where the value asks for nothing.
    logprobs: Annotated[bool | None, _only(None, False)] = None
    top_logprobs: Annotated[int | None, _only(None, 0)] = None
    response_format: Annotated[object, _only(None, {"type": "text"})] = None
    tools: Annotated[list[object] | None, _only(None, [])] = None
    tool_choice: Annotated[object, _only(None, "none", "auto")] = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[object] | None, _only(None, [])] = None
    function_call: Annotated[object, _only(None, "none", "auto")] = None
    modalities: Annotated[list[object] | None, _only(None, ["text"])] = None
    audio: Annotated[object, _only(None)] = None
    prediction: Annotated[object, _only(None)] = None
    reasoning_effort: Annotated[object, _only(None)] = None
    verbosity: Annotated[object, _only(None)] = None
    web_search_options: Annotated[object, _only(None)] = None

    def to_client_request(self, request_id: str) -> ClientRequest:
        """Translate.

        Raises:
            InvalidRequest: fields contradict each other.
        """
        messages = tuple(message.to_message(idx) for idx, message in enumerate(self.messages))
        return self._client_request(request_id, ChatPrompt(messages=messages), self._max_tokens())

    def _max_tokens(self) -> int | None:
        if self.max_completion_tokens is None:
            return self.max_tokens
        if self.max_tokens not in (None, self.max_completion_tokens):
            raise InvalidRequest(
                "max_tokens and max_completion_tokens mean the same and differ: send one of them",
                "max_completion_tokens",
            )
        return self.max_completion_tokens


class CompletionRequest(_GenerationFields):
    """Body of ``POST /v1/completions``."""

    prompt: Annotated[
        str | list[int],
        PlainValidator(_prompt),
        WithJsonSchema(
            {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]},
        ),
    ]

    # Not supported yet; accepted where the value asks for nothing.
    logprobs: Annotated[int | None, _only(None)] = None
    echo: Annotated[bool | None, _only(None, False)] = None
    best_of: Annotated[int | None, _only(None, 1)] = None
    suffix: Annotated[str | None, _only(None, "")] = None

    def to_client_request(self, request_id: str) -> ClientRequest:
        """Translate.

        Raises:
            InvalidRequest: fields contradict each other.
        """
        prompt = (
            TextPrompt(text=self.prompt)
            if isinstance(self.prompt, str)
            else TokenPrompt(token_ids=tuple(self.prompt))
        )
        return self._client_request(request_id, prompt, self.max_tokens)


def _speculative_options(fields: SpeculativeFields | None) -> SpeculativeOptions:
    if fields is None:
        return SpeculativeOptions()
    return SpeculativeOptions(
        num_speculative_tokens=fields.num_speculative_tokens,
        mode=None if fields.mode is None else VerificationMode(fields.mode),
        pipeline=fields.pipeline,
    )


def _logit_bias(entries: dict[str, float]) -> tuple[tuple[int, float], ...]:
    """JSON object keys are strings; these hold token ids."""
    for key in entries:
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise InvalidRequest(f"logit_bias keys must be token ids, got {key[:40]!r}", "logit_bias")
    return tuple((int(key), bias) for key, bias in entries.items())
