"""Every HTTP error in the OpenAI envelope: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from typing import cast

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from specdec.errors import InvalidRequest, RequestError, SpecDecError
from specdec.gateway.faults import log_fault
from specdec.gateway.retry import retry_after_s

logger = logging.getLogger(__name__)

MAX_MESSAGE_CHARS = 1000
MAX_PARAM_CHARS = 200
"""Messages and names of fields quote what clients sent; this bounds it."""


class RequestTooLarge(RequestError):
    """The request body is larger than the deployment allows."""

    http_status = 413
    code = "request_too_large"


class UnsupportedMediaType(RequestError):
    """The request body is not declared as JSON."""

    http_status = 415
    code = "unsupported_media_type"


def error_envelope(error: SpecDecError) -> dict[str, object]:
    """The JSON object that tells a client what went wrong; what is our bug is named as no more than that."""
    message = "internal error" if error.http_status == 500 else error.message
    return {
        "error": {
            "message": message[:MAX_MESSAGE_CHARS],
            "type": error.error_type,
            "param": error.param,
            "code": error.code,
        }
    }


def error_response(error: SpecDecError) -> Response:
    """The whole answer for a request that failed before its answer began."""
    headers = {}
    if (delay_s := retry_after_s(error)) is not None:
        headers["Retry-After"] = str(math.ceil(delay_s))
    if error.http_status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return _response(error.http_status, error_envelope(error), headers)


async def on_specdec_error(request: Request, error: Exception) -> Response:
    """Answer with the error's own status."""
    assert isinstance(error, SpecDecError)
    if error.http_status == 500:
        log_fault(logger, f"{request.method} failed", error)
    return error_response(error)


async def on_validation_error(request: Request, error: Exception) -> Response:
    """Answer 400 to a body that is no JSON or does not fit the model, naming the first field at fault."""
    assert isinstance(error, RequestValidationError)
    return error_response(_as_invalid_request(error))


async def on_http_error(request: Request, error: Exception) -> Response:
    """Answer the framework's own errors: unknown path, wrong method, unreadable body."""
    assert isinstance(error, HTTPException)
    message = {
        404: f"unknown path: {request.method} {request.url.path}",
        405: f"{request.method} is not allowed on {request.url.path}",
    }.get(error.status_code, error.detail)
    envelope = {"message": message[:MAX_MESSAGE_CHARS], "type": "invalid_request_error"}
    return _response(
        error.status_code, {"error": {**envelope, "param": None, "code": None}}, dict(error.headers or {})
    )


def _as_invalid_request(error: RequestValidationError) -> InvalidRequest:
    first = cast("dict[str, object]", error.errors()[0])
    # The location starts with "body", which is no field.
    param = _path(cast("Sequence[str | int]", first["loc"])[1:])
    match first["type"]:
        case "json_invalid":
            return InvalidRequest("the body is not valid JSON")
        case "extra_forbidden":
            return InvalidRequest(f"unknown field {param!r}", param)
        case "missing":
            return InvalidRequest(f"{param or 'a JSON body'} is required", param or None)
    message = str(first["msg"])
    return InvalidRequest(f"{param}: {message}" if param else f"body: {message}", param or None)


def _path(location: Sequence[str | int]) -> str:
    """Write a location as clients know it: ``messages[0].role``. Keys of a map are no fields: left out."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
        if path in ("logit_bias", "metadata"):
            break
    return path[:MAX_PARAM_CHARS]


def _response(status: int, body: dict[str, object], headers: dict[str, str] | None = None) -> Response:
    # Escaped to ASCII: a message may quote an unpaired surrogate, which UTF-8 cannot hold.
    return Response(
        json.dumps(body, ensure_ascii=True), status, headers=headers, media_type="application/json"
    )
