"""The client's gRPC side: `specdec.v1.GenerationService`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import grpc

from specdec.client.errors import told
from specdec.client.grpc_chat import CallReader, choice_of, message_of, tool_of
from specdec.client.options import Message, Options, Prompt, SpeculativeOptions, is_chat
from specdec.client.results import Answer, Piece, Speculation, ToolCall, Usage
from specdec.errors import (
    DeadlineExceeded,
    InvalidRequest,
    InvariantViolation,
    RequestError,
    ServiceUnavailable,
    SpecDecError,
    Unauthenticated,
    UnknownModel,
)
from specdec.gateway.proto import generation_pb2 as pb
from specdec.gateway.proto import generation_pb2_grpc as pb_grpc

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Of an answer; the library's own limit of 4 MiB is less than a long one with logprobs."""
_OPTIONS = (("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),)

_ERRORS: dict[grpc.StatusCode, type[SpecDecError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.NOT_FOUND: UnknownModel,
    grpc.StatusCode.RESOURCE_EXHAUSTED: RequestError,
    grpc.StatusCode.UNAVAILABLE: ServiceUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
}
_NOT_SAMPLING = ("model", "speculative", "tools", "tool_choice", "parallel_tool_calls")
_RENAMED = {"mode": "VERIFICATION_MODE", "pipeline": "PIPELINE"}


class GrpcTransport:
    """One channel.

    Args:
        address: ``HOST:PORT``.
        api_key: sent with every call.
        ca_file: PEM certificates to trust instead of the system's.
        is_secure: over TLS.
    """

    def __init__(
        self, address: str, api_key: str | None, ca_file: Path | str | None = None, *, is_secure: bool
    ) -> None:
        self._channel = (
            grpc.secure_channel(address, _credentials(ca_file), _OPTIONS)
            if is_secure
            else grpc.insecure_channel(address, _OPTIONS)
        )
        self._stub = pb_grpc.GenerationServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._metadata = _metadata(api_key)

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    def generate(self, prompt: Prompt, options: Options, timeout_s: float) -> Answer:
        """Wait for a whole answer."""
        with _grpc_errors():
            return _answer(
                self._stub.Generate(_request(prompt, options), timeout=timeout_s, metadata=self._metadata)
            )

    def models(self, timeout_s: float) -> tuple[str, ...]:
        """Names of the models that can be used now."""
        with _grpc_errors():
            return _ready_models(
                self._stub.ListModels(pb.ListModelsRequest(), timeout=timeout_s, metadata=self._metadata)
            )

    def stream(self, prompt: Prompt, options: Options, timeout_s: float) -> Generator[Piece]:
        """Yield the pieces with text, then the last."""
        request = _request(prompt, options)
        call = self._stub.GenerateStream(request, timeout=timeout_s, metadata=self._metadata)
        try:
            calls = CallReader()
            with _grpc_errors():
                for message in call:
                    yield from _pieces(message, calls)
        finally:
            call.cancel()


class AsyncGrpcTransport:
    """The same on an event loop."""

    def __init__(
        self, address: str, api_key: str | None, ca_file: Path | str | None = None, *, is_secure: bool
    ) -> None:
        self._channel = (
            grpc.aio.secure_channel(address, _credentials(ca_file), _OPTIONS)
            if is_secure
            else grpc.aio.insecure_channel(address, _OPTIONS)
        )
        self._stub = pb_grpc.GenerationServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._metadata = _metadata(api_key)

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()

    async def generate(self, prompt: Prompt, options: Options, timeout_s: float) -> Answer:
        """Wait for a whole answer."""
        request = _request(prompt, options)
        with _grpc_errors():
            return _answer(await self._stub.Generate(request, timeout=timeout_s, metadata=self._metadata))

    async def models(self, timeout_s: float) -> tuple[str, ...]:
        """Names of the models that can be used now."""
        request = pb.ListModelsRequest()
        with _grpc_errors():
            return _ready_models(
                await self._stub.ListModels(request, timeout=timeout_s, metadata=self._metadata)
            )

    async def stream(self, prompt: Prompt, options: Options, timeout_s: float) -> AsyncGenerator[Piece, None]:
        """Yield the pieces with text, then the last."""
        request = _request(prompt, options)
        call = self._stub.GenerateStream(request, timeout=timeout_s, metadata=self._metadata)
        try:
            calls = CallReader()
            with _grpc_errors():
                async for message in call:
                    for piece in _pieces(message, calls):
                        yield piece
        finally:
            call.cancel()


def _credentials(ca_file: Path | str | None) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(Path(ca_file).read_bytes() if ca_file else None)


def _metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


@contextmanager
def _grpc_errors() -> Iterator[None]:
    """Turn gRPC's errors into ours."""
    try:
        yield
    except grpc.RpcError as error:
        raise _error(error) from error


def _answer(response: pb.GenerateResponse) -> Answer:
    (choice,) = response.choices
    return Answer(
        id=response.id,
        model=response.model,
        text=choice.text,
        finish_reason=_finish_reason(choice.finish_reason),
        usage=_usage(response.usage),
        speculation=_speculation(response),
        reasoning=choice.reasoning_content,
        tool_calls=tuple(
            ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in choice.tool_calls
        ),
    )


def _ready_models(response: pb.ListModelsResponse) -> tuple[str, ...]:
    """Names; raises ServiceUnavailable where there is none, as over HTTP."""
    names = tuple(listed.model for listed in response.models if listed.is_ready)
    if not names:
        raise ServiceUnavailable("no worker is ready to serve a model")
    return names


def _pieces(message: pb.GenerateStreamResponse, calls: CallReader) -> Iterator[Piece]:
    calls.read(message)
    if message.text or message.reasoning_content:
        yield Piece(text=message.text, reasoning=message.reasoning_content)
    if message.finish_reason:
        yield Piece(
            finish_reason=_finish_reason(message.finish_reason),
            usage=_usage(message.usage),
            speculation=_speculation(message),
            tool_calls=calls.calls,
        )


def _request(prompt: Prompt, options: Options) -> pb.GenerateRequest:
    sampling = {name: value for name, value in options.items() if name not in _NOT_SAMPLING}
    choice = options.get("tool_choice")
    request = pb.GenerateRequest(
        model=options.get("model", ""),
        tools=map(tool_of, options.get("tools") or ()),
        tool_choice=None if choice is None else choice_of(choice),
        parallel_tool_calls=options.get("parallel_tool_calls"),
        sampling=pb.SamplingOptions(**cast("dict[str, Any]", sampling)),
        speculative=_speculative_options(options.get("speculative", {})),
    )
    if isinstance(prompt, str):
        request.text = prompt
    elif is_chat(prompt):
        messages = cast("Sequence[Message]", prompt)
        request.messages.messages.extend(map(message_of, messages))
    else:
        request.token_ids.ids.extend(cast("Sequence[int]", prompt))
    return request


def _speculative_options(options: SpeculativeOptions) -> pb.SpeculativeOptions:
    fields: dict[str, Any] = dict(options)
    for name, prefix in _RENAMED.items():
        if name in fields:
            fields[name] = f"{prefix}_{fields[name].upper()}"
    return pb.SpeculativeOptions(**fields)


def _error(error: grpc.RpcError) -> SpecDecError:
    call = cast("grpc.Call", error)
    named: Mapping[str, Any] = dict(call.trailing_metadata() or ())
    pushback = str(named.get("grpc-retry-pushback-ms", ""))
    return told(
        named.get("specdec-error-code"),
        _ERRORS.get(call.code(), InvariantViolation),
        call.details() or call.code().name,
        named.get("specdec-error-param"),
        int(pushback) / 1000 if pushback.isdecimal() else None,
    )


def _finish_reason(value: int) -> str:
    return pb.FinishReason.Name(cast("Any", value)).removeprefix("FINISH_REASON_").lower()


def _usage(usage: pb.Usage) -> Usage:
    return Usage(prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens)


def _speculation(message: pb.GenerateResponse | pb.GenerateStreamResponse) -> Speculation | None:
    if not message.HasField("speculative_metrics"):
        return None
    metrics = message.speculative_metrics
    return Speculation(
        num_spec_steps=metrics.num_spec_steps,
        num_draft_tokens=metrics.num_draft_tokens,
        num_accepted_draft_tokens=metrics.num_accepted_draft_tokens,
        mean_acceptance_length=metrics.mean_acceptance_length,
        draft_acceptance_rate=metrics.draft_acceptance_rate,
        acceptance_histogram=tuple(metrics.acceptance_histogram),
    )
