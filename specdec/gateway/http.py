"""The OpenAI-compatible HTTP API as a FastAPI app.

The app is built at import time, before anything is served, and may be pickled: its handlers are plain
functions of this module, and it finds what is served through a function given to `build_http_app`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from specdec import __version__
from specdec.errors import ServiceUnavailable, SpecDecError
from specdec.gateway import http_errors, metrics
from specdec.gateway import http_schema as schema
from specdec.gateway.choices import best_choices
from specdec.gateway.events import Completion, GenerationEvent, collect
from specdec.gateway.http_body import JsonBodyMiddleware
from specdec.gateway.http_door import OPEN_PATHS, HeadMiddleware, KeyMiddleware, LastResortMiddleware
from specdec.gateway.http_service import Models, ModelsProvider
from specdec.gateway.http_stream import (
    ChunkFrames,
    EventStreamResponse,
    Frames,
    sse_frames,
    unless_disconnected,
)
from specdec.gateway.http_tokenizer import detokenize, tokenize, tokenizer_info
from specdec.gateway.models import ServedModels
from specdec.gateway.openai import ChatCompletionRequest, CompletionRequest
from specdec.gateway.openai_responses import (
    ChatFormat,
    CompletionFormat,
    JsonObject,
    ResponseFormat,
    model_card,
)
from specdec.gateway.requests import ClientRequest
from specdec.gateway.responses_answer import ResponsesFormat, ResponsesFrames
from specdec.gateway.responses_api import ResponsesRequest
from specdec.gateway.service import GenerationService

Format = TypeVar("Format", bound=ResponseFormat)

CLIENT_CLOSED_REQUEST = 499
"""Nobody reads this status but the log: the client has left."""


def build_http_app(get_models: ModelsProvider, cors_origins: Sequence[str] = ()) -> FastAPI:
    """Build the app.

    Args:
        get_models: called for every request; where the app is pickled, a module-level function.
        cors_origins: web pages that may call it from a browser, like ``https://example.com``; ``*`` is all.
    """
    app = FastAPI(
        title="specdec",
        version=__version__,
        redirect_slashes=False,
        docs_url=None,  # the pages load scripts from elsewhere; /openapi.json stays
        redoc_url=None,
        middleware=_middleware(cors_origins),
        exception_handlers={
            SpecDecError: http_errors.on_specdec_error,
            RequestValidationError: http_errors.on_validation_error,
            HTTPException: http_errors.on_http_error,
        },
    )
    app.state.get_models = get_models
    for method, path, handler, responses in (
        (
            "POST",
            "/v1/chat/completions",
            create_chat_completion,
            schema.answers(schema.CHAT_COMPLETION, *schema.GENERATION_ERRORS, can_stream=True),
        ),
        (
            "POST",
            "/v1/completions",
            create_completion,
            schema.answers(schema.COMPLETION, *schema.GENERATION_ERRORS, can_stream=True),
        ),
        (
            "POST",
            "/v1/responses",
            create_response,
            schema.answers(schema.RESPONSE, *schema.GENERATION_ERRORS, can_stream=True),
        ),
        ("GET", "/v1/models", list_models, schema.answers(schema.MODEL_LIST, 503)),
        ("GET", "/v1/models/{name:path}", retrieve_model, schema.answers(schema.MODEL, 404, 503)),
        ("POST", "/tokenize", tokenize, schema.answers(schema.TOKENS, *schema.TOKENIZER_ERRORS)),
        ("POST", "/detokenize", detokenize, schema.answers(schema.TEXT, *schema.TOKENIZER_ERRORS)),
        ("GET", "/tokenizer_info", tokenizer_info, schema.answers(schema.TOKENIZER_INFO, 404, 503)),
        ("GET", "/health", health, schema.answers(schema.HEALTH, 503)),
        ("GET", "/status", status, schema.answers(schema.STATUS, 503)),
        ("GET", "/metrics", expose_metrics, schema.answers(schema.METRICS, 503, media_type="text/plain")),
        ("GET", "/version", version, schema.answers(schema.VERSION)),
    ):
        app.add_api_route(path, handler, methods=[method], response_model=None, responses=responses)
    schema.publish(app, OPEN_PATHS)
    return app


def _middleware(cors_origins: Sequence[str]) -> list[Middleware]:
    """Outermost first. A preflight is answered before a key is asked for, a key before the body is read."""
    cors = Middleware(
        CORSMiddleware,
        allow_origins=list(cors_origins),
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["Retry-After"],
    )
    return [
        *([cors] if cors_origins else []),
        Middleware(LastResortMiddleware),
        Middleware(KeyMiddleware),
        Middleware(HeadMiddleware),
        Middleware(JsonBodyMiddleware),
    ]


async def create_chat_completion(body: ChatCompletionRequest, request: Request, models: Models) -> Response:
    """Answer a conversation, whole or as a stream of server-sent events."""
    service = models.service(body.model)
    response = _format(ChatFormat, "chatcmpl", body, service)
    asked = _Asked(request, models, service, body.to_client_request(response.request_id))
    return await _respond(asked, response.whole, ChunkFrames(response) if body.stream else None)


async def create_completion(body: CompletionRequest, request: Request, models: Models) -> Response:
    """Continue a text, whole or as a stream of server-sent events."""
    service = models.service(body.model)
    response = _format(CompletionFormat, "cmpl", body, service)
    asked = _Asked(request, models, service, body.to_client_request(response.request_id))
    return await _respond(asked, response.whole, ChunkFrames(response) if body.stream else None)


async def create_response(body: ResponsesRequest, request: Request, models: Models) -> Response:
    """Answer a conversation as OpenAI's newer API does, without storing anything."""
    service = models.service(body.model)
    response = ResponsesFormat(
        request_id=f"resp_{uuid.uuid4().hex}",
        model=service.model_name,
        created=int(time.time()),
        body=body,
    )
    asked = _Asked(request, models, service, body.to_client_request(response.request_id))
    return await _respond(asked, response.whole, ResponsesFrames(response) if body.stream else None)


async def list_models(models: Models) -> JsonObject:
    """List the models that can be used now; 503 while none can."""
    services = models.ready_services()
    if not services:
        raise ServiceUnavailable("no worker is ready to serve a model")
    return {"object": "list", "data": [model_card(item.model_name, item.created) for item in services]}


async def retrieve_model(name: str, models: Models) -> JsonObject:
    """Describe a served model; its name may contain slashes. 503 until it can be used."""
    if not name:
        raise HTTPException(404)
    service = models.ready_service(name)
    return model_card(service.model_name, service.created)


async def health(models: Models) -> JsonObject:
    """Readiness: 200 when a request that names no model would be served, else 503; and which models would."""
    first = models.ready_service(None)
    ready = [service.model_name for service in models.ready_services()]
    return {"status": "ready", "model": first.model_name, "ready_models": ready}


async def status(models: Models) -> JsonObject:
    """For operators: coordinators and workers as of the last poll, with their load and acceptance."""
    return {
        "coordinators": [asdict(coordinator) for coordinator in models.coordinators()],
        "absent": [{"application": key, **asdict(pair)} for key, pair in models.absent().items()],
    }


async def expose_metrics(models: Models) -> Response:
    """For Prometheus: what this gateway served, and what the coordinators count."""
    return Response(models.metrics.exposition(), media_type=metrics.CONTENT_TYPE)


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
        num_choices=body.num_choices,
    )


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request for a completion."""

    http: Request
    """As it came."""
    models: ServedModels
    service: GenerationService
    """Of the model it is for."""
    client_request: ClientRequest
    """Translated."""


async def _respond(
    asked: _Asked, whole: Callable[[Completion], JsonObject], frames: Frames | None
) -> Response:
    """Generate and answer.

    Args:
        asked: what for.
        whole: makes the answer of a request that does not stream.
        frames: makes that of one that does.
    """
    http, service = asked.http, asked.service
    client_request = replace(asked.client_request, client=http.state.client)
    events = asked.models.metrics.measured("http", service.model_name, service.generate(client_request))
    try:
        if frames is None:
            completion = await unless_disconnected(http.receive, collect(events))
            return JSONResponse(whole(best_choices(client_request, completion)))

        async def first_event() -> GenerationEvent:
            return await anext(events)

        # What is wrong with a request shows up here, while a status can still tell it.
        first = await unless_disconnected(http.receive, first_event())
    except ClientDisconnect:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return EventStreamResponse(
        sse_frames(first, events, frames, client_request.request_id),
        source=events,
        lifetime_s=service.timeout_s(client_request),
    )
