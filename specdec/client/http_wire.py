"""OpenAI's endpoints as bytes and back; whoever carries them, a thread or an event loop."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict

import httpx

from specdec.client.errors import told
from specdec.client.options import Options, Prompt, is_chat
from specdec.client.results import Answer, Piece, Speculation, ToolCall, Usage
from specdec.errors import (
    DeadlineExceeded,
    InvalidRequest,
    InvariantViolation,
    RequestError,
    ServiceUnavailable,
    SpecDecError,
    TooManyRequests,
    Unauthenticated,
)

JsonObject = dict[str, Any]

CONNECT_TIMEOUT_S = 10.0

_ERRORS_BY_STATUS: dict[int, type[SpecDecError]] = {
    400: InvalidRequest,
    401: Unauthenticated,
    429: TooManyRequests,
    500: InvariantViolation,
    502: ServiceUnavailable,
    503: ServiceUnavailable,
    504: DeadlineExceeded,
}


class Settings(TypedDict):
    """Of an httpx client."""

    base_url: str
    headers: dict[str, str]
    verify: ssl.SSLContext | bool


def settings(base_url: str, api_key: str | None, ca_file: Path | str | None) -> Settings:
    """What both kinds of httpx clients are made with."""
    return {
        "base_url": base_url,
        "headers": {"Authorization": f"Bearer {api_key}"} if api_key else {},
        "verify": ssl.create_default_context(cafile=str(ca_file)) if ca_file else True,
    }


class Post(TypedDict):
    """Arguments of a request."""

    url: str
    json: JsonObject
    timeout: httpx.Timeout


def post(prompt: Prompt, options: Options, timeout_s: float, *, is_streamed: bool = False) -> Post:
    """The request for a prompt."""
    body: JsonObject = dict(options)
    if is_chat(prompt):
        path, body["messages"] = "/v1/chat/completions", list(prompt)
    else:
        path, body["prompt"] = "/v1/completions", prompt if isinstance(prompt, str) else list(prompt)
    if is_streamed:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return {"url": path, "json": body, "timeout": _timeout(timeout_s)}


class Get(TypedDict):
    """Arguments of a request without a body."""

    url: str
    timeout: httpx.Timeout


def get_models(timeout_s: float) -> Get:
    """The request for the served models."""
    return {"url": "/v1/models", "timeout": _timeout(timeout_s)}


@contextmanager
def network_errors() -> Iterator[None]:
    """Turn httpx's errors into ours."""
    try:
        yield
    except httpx.ConnectTimeout as error:
        raise ServiceUnavailable(f"cannot connect: {error}") from error
    except httpx.TimeoutException as error:
        raise DeadlineExceeded("the server did not answer in time") from error
    except httpx.TransportError as error:
        raise ServiceUnavailable(f"no connection: {error}") from error


def check_status(response: httpx.Response) -> None:
    """Accept 200; the body of any other answer must have been read.

    Raises:
        SpecDecError: as the answer tells.
    """
    if response.status_code == 200:
        return
    advice = response.headers.get("retry-after", "")
    retry_after_s = float(advice) if advice.isdecimal() else None
    try:
        fields = response.json()["error"]
        message, code, param = str(fields["message"]), fields["code"], fields["param"]
    except (ValueError, KeyError, TypeError):
        # Not specdec's own: a proxy between.
        message, code, param = f"HTTP status {response.status_code}", None, None
    fallback = RequestError if response.status_code < 500 else InvariantViolation
    kind = _ERRORS_BY_STATUS.get(response.status_code, fallback)
    raise told(code, kind, message, param, retry_after_s)


def answer_of(response: httpx.Response) -> Answer:
    """Read a whole answer.

    Raises:
        SpecDecError: it is an error.
    """
    check_status(response)
    body = response.json()
    (choice,) = body["choices"]
    message: JsonObject = choice.get("message", {})
    return Answer(
        id=body["id"],
        model=body["model"],
        text=(message["content"] if message else choice["text"]) or "",
        finish_reason=choice["finish_reason"],
        usage=_usage(body["usage"]),
        speculation=_speculation(body.get("metrics")),
        reasoning=message.get("reasoning_content") or "",
        tool_calls=tuple(map(_call, message.get("tool_calls") or ())),
    )


def models_of(response: httpx.Response) -> tuple[str, ...]:
    """Read the names of the served models; raises as `answer_of` does."""
    check_status(response)
    return tuple(model["id"] for model in response.json()["data"])


class StreamReader:
    """Takes the lines of server-sent events, and gives the pieces of one answer."""

    def __init__(self) -> None:
        self.is_done = False
        """Whether all has come."""
        self._finish_reason: str | None = None
        self._usage: Usage | None = None
        self._speculation: Speculation | None = None
        self._calls: dict[int, JsonObject] = {}

    def read(self, line: str) -> Piece | None:
        """Take one line; returns the piece with text that it completes, if any.

        Raises:
            SpecDecError: the stream tells of an error.
        """
        kind, _, data = line.partition(":")
        if kind != "data":
            return None
        if data.strip() == "[DONE]":
            self.is_done = True
            return None
        event: JsonObject = json.loads(data)
        if error := event.get("error"):
            status_kind = InvariantViolation if error["type"] == "server_error" else RequestError
            raise told(error["code"], status_kind, error["message"], error["param"])
        return self._take(event)

    def end(self) -> Piece:
        """The last piece, with all that the others lack.

        Raises:
            ServiceUnavailable: the stream broke off.
        """
        if not self.is_done:
            raise ServiceUnavailable("the stream was cut")
        return Piece(
            finish_reason=self._finish_reason,
            usage=self._usage,
            speculation=self._speculation,
            tool_calls=tuple(map(_call, self._calls.values())),
        )

    def _take(self, event: JsonObject) -> Piece | None:
        if usage := event.get("usage"):
            self._usage = _usage(usage)
        self._speculation = _speculation(event.get("metrics")) or self._speculation
        text = reasoning = ""
        for choice in event["choices"]:
            self._finish_reason = choice["finish_reason"] or self._finish_reason
            delta: JsonObject = choice.get("delta", {})
            text += (delta.get("content") if "delta" in choice else choice["text"]) or ""
            reasoning += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or ():
                self._take_call(call)
        return Piece(text=text, reasoning=reasoning) if text or reasoning else None

    def _take_call(self, delta: JsonObject) -> None:
        if delta["index"] in self._calls:
            self._calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
        else:
            self._calls[delta["index"]] = delta


def _timeout(timeout_s: float) -> httpx.Timeout:
    return httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_TIMEOUT_S))


def _call(fields: Mapping[str, Any]) -> ToolCall:
    function = fields["function"]
    return ToolCall(id=fields["id"], name=function["name"], arguments=function["arguments"])


def _usage(fields: Mapping[str, int]) -> Usage:
    return Usage(prompt_tokens=fields["prompt_tokens"], completion_tokens=fields["completion_tokens"])


def _speculation(metrics: Mapping[str, Any] | None) -> Speculation | None:
    if not metrics:
        return None
    fields = dict(metrics["speculative_decoding"])
    return Speculation(**{**fields, "acceptance_histogram": tuple(fields["acceptance_histogram"])})
