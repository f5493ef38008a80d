"""ASGI middleware every HTTP request passes, whichever route it asks for: its key, HEAD, our own bugs."""

from __future__ import annotations

import logging

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec.errors import InvariantViolation, ServiceUnavailable, SpecDecError
from specdec.gateway.faults import log_fault
from specdec.gateway.http_errors import error_response
from specdec.gateway.models import ServedModels

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/version", "/openapi.json"})
"""Answered without a key: probes have none, and the schema tells nothing of a deployment."""


class KeyMiddleware:
    """Asks for the API key before the body is read, on every path but `OPEN_PATHS`, known or not.

    ``OPTIONS`` passes: browsers ask without a key, and no route answers it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401, or 503 while nothing is served that knows the keys; or pass the request on."""
        if scope["type"] == "http" and not _is_open(scope):
            try:
                client = _models(scope).keys.check(Headers(scope=scope).get("authorization"))
            except SpecDecError as error:
                await error_response(error)(scope, receive, send)
                return
            scope.setdefault("state", {})["client"] = client
        await self._app(scope, receive, send)


class HeadMiddleware:
    """Answers HEAD as GET, without the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_without_body(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self._app({**scope, "method": "GET"}, receive, send_without_body)


class LastResortMiddleware:
    """Makes a plain 500 of what nobody caught, before the framework writes its trace; counts all answers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status: int | None = None

        async def send_noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_noting)
        except Exception as error:
            log_fault(logger, f"{scope['method']} failed", error)
            if status is not None:
                raise  # Only the connection's end can tell it now.
            await error_response(InvariantViolation("internal error"))(scope, receive, send_noting)
        finally:
            if status is not None and (models := _models_or_none(scope)) is not None:
                models.metrics.count_http_answer(status)


def _is_open(scope: Scope) -> bool:
    return scope["method"] == "OPTIONS" or _route_path(scope) in OPEN_PATHS


def _route_path(scope: Scope) -> str:
    """The path as routes know it: without the prefix under which Serve put the application."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _models_or_none(scope: Scope) -> ServedModels | None:
    models: ServedModels | None = scope["app"].state.get_models()
    return models


def _models(scope: Scope) -> ServedModels:
    models = _models_or_none(scope)
    if models is None:
        raise ServiceUnavailable("the gateway is starting")
    return models
