"""The OpenAI-compatible HTTP API as a FastAPI app.

The app is built at import time, before there is a service, and may be pickled: its handlers are plain
functions of this module, and it finds its service through a function given to `build_http_app`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, TypeVar

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from specdec import __version__
from specdec.errors import ServiceUnavailable, SpecDecError
from specdec.gateway import http_errors
from specdec.gateway.events import GenerationEvent, collect
from specdec.gateway.http_body import JsonBodyMiddleware
from specdec.gateway.http_stream import EventStreamResponse, sse_frames, unless_disconnected
from specdec.gateway.openai import ChatCompletionRequest, CompletionRequest
from specdec.gateway.openai_responses import (
    ChatFormat,
    CompletionFormat,
    JsonObject,
    ResponseFormat,
    model_card,
)
from specdec.gateway.requests import ClientRequest
from specdec.gateway.service import GenerationService

ServiceProvider = Callable[[], GenerationService | None]
"""Returns the process's service, or None while there is none yet."""

Format = TypeVar("Format", bound=ResponseFormat)

CLIENT_CLOSED_REQUEST = 499
"""Nobody reads this status but the log: the client has left."""


def build_http_app(get_service: ServiceProvider) -> FastAPI:
    """Build the app.

    Args:
        get_service: called for every request; where the app is pickled, a module-level function.
    """
    app = FastAPI(
        title="specdec",
        version=__version__,
        redirect_slashes=False,
        docs_url=None,  # the pages load scripts from elsewhere; /openapi.json stays
        redoc_url=None,
        exception_handlers={
            SpecDecError: http_errors.on_specdec_error,
            RequestValidationError: http_errors.on_validation_error,
            HTTPException: http_errors.on_http_error,
            Exception: http_errors.on_unexpected_error,
        },
    )
    app.state.get_service = get_service
    app.add_middleware(JsonBodyMiddleware)
    for method, path, handler in (
        ("POST", "/v1/chat/completions", create_chat_completion),
        ("POST", "/v1/completions", create_completion),
        ("GET", "/v1/models", list_models),
        ("GET", "/v1/models/{name:path}", retrieve_model),
        ("GET", "/health", health),
        ("GET", "/status", status),
        ("GET", "/version", version),
    ):
        guards = [] if path in OPEN_PATHS else [Depends(_check_key)]
        app.add_api_route(path, handler, methods=[method], response_model=None, dependencies=guards)
    return app


async def _current_service(request: Request) -> GenerationService:
    service: GenerationService | None = request.app.state.get_service()
    if service is None:
        raise ServiceUnavailable("the gateway is starting")
    return service


async def _ready_service(request: Request) -> GenerationService:
    service = await _current_service(request)
    if not service.is_ready():
        raise ServiceUnavailable("no worker is ready to serve the model")
    return service


Service = Annotated[GenerationService, Depends(_current_service)]
ReadyService = Annotated[GenerationService, Depends(_ready_service)]


async def _check_key(request: Request, service: Service) -> None:
    service.keys.check(request.headers.get("authorization"))


OPEN_PATHS = frozenset({"/health", "/version"})
"""Answered without a key: probes have none."""


async def create_chat_completion(body: ChatCompletionRequest, request: Request, service: Service) -> Response:
    """Answer a conversation, whole or as a stream of server-sent events."""
    response = _format(ChatFormat, "chatcmpl", body, service)
    return await _respond(
        request, service, body.to_client_request(response.request_id), response, body.stream
    )


async def create_completion(body: CompletionRequest, request: Request, service: Service) -> Response:
    """Continue a text, whole or as a stream of server-sent events."""
    response = _format(CompletionFormat, "cmpl", body, service)
    return await _respond(
        request, service, body.to_client_request(response.request_id), response, body.stream
    )


async def list_models(service: ReadyService) -> JsonObject:
    """List the served model; 503 until it can be used."""
    return {"object": "list", "data": [model_card(service.model_name, service.created)]}


async def retrieve_model(name: str, service: ReadyService) -> JsonObject:
    """Describe the served model; its name may contain slashes."""
    if not name:
        raise HTTPException(404)
    service.check_model(name)
    return model_card(service.model_name, service.created)


async def health(service: ReadyService) -> JsonObject:
    """Readiness: 200 when a request sent now would be served, else 503."""
    return {"status": "ready", "model": service.model_name}


async def status(service: Service) -> JsonObject:
    """For operators: coordinators and workers as of the last poll, with their load and acceptance."""
    return {"coordinators": [asdict(coordinator) for coordinator in service.coordinators()]}


async def version() -> JsonObject:
    """Version of the server."""
    return {"version": __version__}


def _format(
    kind: type[Format],
    prefix: str,
    body: ChatCompletionRequest | CompletionRequest,
    service: GenerationService,
) -> Format:
    return kind(
        request_id=f"{prefix}-{uuid.uuid4().hex}",
        model=service.model_name,
        created=int(time.time()),
        wants_metrics=body.wants_metrics,
        wants_usage_chunk=body.wants_usage_chunk,
    )


async def _respond(
    request: Request,
    service: GenerationService,
    client_request: ClientRequest,
    response: ResponseFormat,
    stream: bool | None,
) -> Response:
    events = service.generate(client_request)
    try:
        if not stream:
            completion = await unless_disconnected(request.receive, collect(events))
            return JSONResponse(response.whole(completion))

        async def first_event() -> GenerationEvent:
            return await anext(events)

        # What is wrong with a request shows up here, while a status can still tell it.
        first = await unless_disconnected(request.receive, first_event())
    except ClientDisconnect:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return EventStreamResponse(
        sse_frames(first, events, response), source=events, lifetime_s=service.timeout_s(client_request)
    )
