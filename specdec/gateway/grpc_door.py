"""Every gRPC call passes here first, whichever service it is for: its key, and whether it is a message."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message

from specdec.errors import Unauthenticated
from specdec.gateway.grpc_errors import trailing_metadata
from specdec.gateway.keys import ApiKeys

OPEN_SERVICES = frozenset({"grpc.health.v1.Health"})
"""Answered without a key: probes have none."""

client_name: ContextVar[str] = ContextVar("client_name", default="")
"""Of the call being served; empty where no keys are set. See `ApiKeys.check`."""

Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]]


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Ends calls without a valid key with UNAUTHENTICATED, reflection and unknown methods among them."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler:
        """Pass the call on, or hand out a handler that refuses it without reading what it asks for."""
        if _service_of(handler_call_details.method) not in OPEN_SERVICES:
            try:
                client_name.set(self._keys.check(_authorization(handler_call_details)))
            except Unauthenticated as error:
                return _refusal(error)
        return await continuation(handler_call_details)


def _service_of(method: str) -> str:
    """The service of ``/package.Service/Method``."""
    return method.removeprefix("/").rpartition("/")[0]


def _authorization(details: grpc.HandlerCallDetails) -> str | None:
    values = [value for key, value in details.invocation_metadata or () if key == "authorization"]
    return str(values[0]) if values else None


def _refusal(error: Unauthenticated) -> grpc.RpcMethodHandler:
    async def refuse(_requests: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        details = error.message
        await context.abort(grpc.StatusCode[error.grpc_code], details, trailing_metadata(error, details))

    # A stream both ways need not wait for a request, and fits a call of any kind.
    return grpc.stream_stream_rpc_method_handler(refuse)


class DecodeInterceptor(grpc.aio.ServerInterceptor):
    """Refuses bytes that are no message with INVALID_ARGUMENT; the library would say UNKNOWN and log a trace.

    Calls whose requests are a stream are left alone: only reflection has them. Handlers must be coroutine
    functions.
    """

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler:
        """Pass the call on, with a handler that is told of bad bytes instead of the library."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        decode, serve = handler.request_deserializer, handler.unary_unary or handler.unary_stream

        def decode_or_none(content: bytes) -> Message | None:
            try:
                decoded: Message = decode(content)
            except DecodeError:
                return None
            return decoded

        async def guarded(request: Message | None, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            if request is None:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the request is no valid message")
            return await serve(request, context)

        make = (
            grpc.unary_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        return make(guarded, decode_or_none, handler.response_serializer)
