"""The published OpenAPI document: FastAPI's, with the answers and errors there really are."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from specdec.gateway.validation import (
    MIN_P,
    PENALTY,
    REPETITION_PENALTY,
    TEMPERATURE,
    TOP_P,
    Range,
)

Schema = dict[str, Any]

ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "additionalProperties": False,
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "additionalProperties": False,
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "The field at fault."},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}

_ERROR_DESCRIPTIONS = {
    400: "A field is unknown, malformed, out of range or not supported.",
    401: "API keys are set and none of them was sent.",
    404: "The name of a model that is not served, or an unknown path.",
    413: "The body is larger than the deployment allows.",
    415: "The body is not declared as JSON.",
    429: "The queue is full; retry after a pause.",
    500: "A bug.",
    503: "Nothing can serve it now; retry after a pause.",
    504: "Not finished by its deadline.",
}
_RETRY_AFTER: Schema = {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds."}}
BODY_ERRORS = (400, 413, 415)
"""What any route with a body may answer."""
TOKENIZER_ERRORS = (*BODY_ERRORS, 404, 503, 504)
GENERATION_ERRORS = (*BODY_ERRORS, 404, 429, 503, 504)

_RANGES = {
    "temperature": TEMPERATURE,
    "top_p": TOP_P,
    "min_p": MIN_P,
    "presence_penalty": PENALTY,
    "frequency_penalty": PENALTY,
    "repetition_penalty": REPETITION_PENALTY,
}
"""Those that no deployment changes."""

_INTEGER: Schema = {"type": "integer"}
_STRING: Schema = {"type": "string"}
_OPTIONAL_STRING: Schema = {"type": ["string", "null"]}


def _object(properties: Schema, optional: Collection[str] = ()) -> Schema:
    """An object with these fields; clients must expect more."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "required": required, "properties": properties}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _completion(object_name: str, choice: Schema) -> Schema:
    finish = {"finish_reason": {"enum": ["stop", "length", "tool_calls", "content_filter"]}}
    return _object(
        {
            "id": _STRING,
            "object": {"const": object_name},
            "created": _INTEGER,
            "model": _STRING,
            "choices": _list(_object({"index": _INTEGER, **choice, **finish})),
            "usage": _object(dict.fromkeys(_USAGE, _INTEGER)),
        }
    )


_USAGE = ("prompt_tokens", "completion_tokens", "total_tokens")

CHAT_COMPLETION = _completion(
    "chat.completion", {"message": _object({"role": _STRING, "content": _OPTIONAL_STRING})}
)
COMPLETION = _completion("text_completion", {"text": _STRING})
RESPONSE = _object(
    {
        "id": _STRING,
        "object": {"const": "response"},
        "created_at": _INTEGER,
        "status": {"enum": ["completed", "incomplete"]},
        "model": _STRING,
        "output": _list({"type": "object"}),
        "usage": {"type": "object"},
    }
)
MODEL = _object({"id": _STRING, "object": {"const": "model"}, "created": _INTEGER, "owned_by": _STRING})
MODEL_LIST = _object({"object": {"const": "list"}, "data": _list(MODEL)})
HEALTH = _object({"status": {"const": "ready"}, "model": _STRING, "ready_models": _list(_STRING)})
STATUS = _object(
    {
        "coordinators": _list({"type": "object"}),
        "absent": _list(_object({"application": _STRING, "reason": _STRING, "name": _OPTIONAL_STRING})),
    }
)
METRICS = _STRING
VERSION = _object({"version": _STRING})
TOKENS = _object({"tokens": _list(_INTEGER), "count": _INTEGER, "max_model_len": _INTEGER})
TEXT = _object({"prompt": _STRING})
TOKENIZER_INFO = _object(
    {
        **dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), _OPTIONAL_STRING),
        "chat_template": _OPTIONAL_STRING,
        "tokenizer_class": _STRING,
        "vocab_size": _INTEGER,
        "model": _STRING,
        "max_model_len": _INTEGER,
    }
)


def answers(
    schema: Schema, *errors: int, can_stream: bool = False, media_type: str = "application/json"
) -> dict[int | str, Schema]:
    """The ``responses`` of a route: 200 with this schema, and these errors besides 500.

    Args:
        schema: of the whole answer.
        errors: status codes.
        can_stream: whether the answer may be server-sent events instead.
        media_type: of the whole answer.
    """
    content: Schema = {media_type: {"schema": schema}}
    if can_stream:
        content["text/event-stream"] = {}
    documented: dict[int | str, Schema] = {200: {"description": "The answer.", "content": content}}
    return documented | {status: _error(status) for status in sorted({*errors, 500})}


def _error(status: int) -> Schema:
    return {
        "description": _ERROR_DESCRIPTIONS[status],
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
        **({"headers": _RETRY_AFTER} if status in (429, 503) else {}),
    }


def publish(app: FastAPI, open_paths: Collection[str]) -> None:
    """Make ``/openapi.json`` give the document.

    Args:
        app: with all its routes.
        open_paths: those that ask for no key.
    """

    def openapi() -> Schema:
        if not app.openapi_schema:
            app.openapi_schema = _document(app, open_paths)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # how FastAPI wants it


def _document(app: FastAPI, open_paths: Collection[str]) -> Schema:
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    # FastAPI's own 422 is never sent: a body that does not fit is a 400.
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas["Error"] = ERROR
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for schema in schemas.values():
        for name, field in schema.get("properties", {}).items():
            _add_range(field, _RANGES.get(name))
    for path, operations in document["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            content = operation["responses"]["200"]["content"]
            if not content["application/json"]["schema"]:  # FastAPI's own, where the answer is no JSON
                del content["application/json"]
            is_open = path in open_paths
            operation["security"] = [] if is_open else [{}, {"key": []}]
            if not is_open:
                operation["responses"]["401"] = _error(401)
    return document


def _add_range(field: Schema, allowed: Range | None) -> None:
    """Write the range into a field's numeric form; the field is changed in place."""
    if allowed is None:
        return
    for form in field.get("anyOf", [field]):
        if form.get("type") in ("number", "integer"):
            form["exclusiveMinimum" if allowed.is_low_open else "minimum"] = allowed.low
            form["maximum"] = allowed.high
