"""ASGI middleware in front of the HTTP app: only JSON bodies within the size limit get through."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec.config import GatewayConfig
from specdec.errors import RequestError
from specdec.gateway.http_errors import RequestTooLarge, UnsupportedMediaType, error_response

DRAIN_FACTOR = 4
"""A body over the limit is read and dropped up to this many times the limit: a client that is still sending
when the connection closes sees a reset and never reads the answer."""


class JsonBodyMiddleware:
    """Reads each POST body whole, within a limit, and hands it on as one message."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 413 or 415, or pass the request on."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        limit = _max_body_bytes(scope)
        body = await _read_body(receive, limit)
        if body is None:
            return  # The client left while sending.
        error = _fault(scope, body, limit)
        if error is not None:
            await error_response(error)(scope, receive, send)
        else:
            await self._app(scope, _Replay(body, receive), send)


def _fault(scope: Scope, body: bytes, limit: int) -> RequestError | None:
    if len(body) > limit:
        return RequestTooLarge(f"the request body is larger than {limit} bytes")
    if body and not _is_json(Headers(scope=scope).get("content-type", "")):
        return UnsupportedMediaType("Content-Type must be application/json")
    return None


class _Replay:
    """A ``receive`` that gives a body read before, then whatever the connection gives."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


async def _read_body(receive: Receive, limit: int) -> bytes | None:
    """Return the body, or more than ``limit`` bytes of one that is too large; None when the client left."""
    body = bytearray()
    num_dropped = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part: bytes = message.get("body", b"")
        if len(body) <= limit:
            body += part
        else:
            num_dropped += len(part)
        if not message.get("more_body", False) or num_dropped > DRAIN_FACTOR * limit:
            return bytes(body)


def _is_json(content_type: str) -> bool:
    return content_type.partition(";")[0].strip().lower() == "application/json"


def _max_body_bytes(scope: Scope) -> int:
    models = scope["app"].state.get_models()
    config: GatewayConfig = models.config if models is not None else GatewayConfig()
    return config.max_body_bytes
