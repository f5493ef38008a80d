"""Asking over HTTP and gRPC, and noting when something arrived."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import grpc

from specdec.gateway.proto import generation_pb2_grpc as pb_grpc
from specdec.lab.bench.http import Connection, Endpoint, Head, connect, data_lines, error_message
from specdec.lab.chaos.requests import Request, grpc_request, http_call
from specdec.lab.errors import RequestFailed

REQUEST_LIMIT_S = 180.0
"""A request that takes longer is given up and counted as ``timeout``."""
PAUSE_S = 0.2
"""Shorter silences of a stream are its ordinary rhythm."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Nothing arrived between these times of the monotonic clock."""

    from_s: float
    to_s: float

    @property
    def duration_s(self) -> float:
        return self.to_s - self.from_s


@dataclass(slots=True)
class Answer:
    """What has arrived of one answer; times are of the monotonic clock."""

    started_s: float
    last_s: float
    longest_s: float = 0.0
    """Longest silence of a stream, the wait for its first event included."""
    pauses: list[Pause] = field(default_factory=list)
    """Silences above `PAUSE_S`, of streams alone."""
    num_events: int = 0
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] | None = None
    """None over HTTP, which does not tell."""
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    has_left: bool = False
    """The client went away before the end."""

    @classmethod
    def begin(cls) -> Answer:
        now_s = time.monotonic()
        return cls(now_s, now_s)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def on_event(self) -> None:
        """Something arrived in a stream."""
        now_s = time.monotonic()
        pause = Pause(self.last_s, now_s)
        self.longest_s = max(self.longest_s, pause.duration_s)
        if pause.duration_s > PAUSE_S:
            self.pauses.append(pause)
        self.last_s = now_s
        self.num_events += 1


class Client:
    """Both protocols of one server. To be made and closed in a running event loop."""

    def __init__(self, endpoint: Endpoint, grpc_address: str) -> None:
        self._endpoint = endpoint
        self._channel = grpc.aio.insecure_channel(grpc_address)
        self._stub = pb_grpc.GenerationServiceStub(self._channel)  # type: ignore[no-untyped-call]

    async def close(self) -> None:
        await self._channel.close()

    async def ask(self, request: Request) -> Answer:
        """Everything until the end, or until the client leaves.

        Raises:
            RequestFailed: an error status or event, a stream that broke off, or no end in time.
        """
        answer = Answer.begin()
        exchange = self._http if request.protocol == "http" else self._grpc
        try:
            async with asyncio.timeout(request.leaves_after_s or REQUEST_LIMIT_S):
                await exchange(request, answer)
        except TimeoutError as error:
            if request.leaves_after_s is None:
                raise RequestFailed("timeout", f"not over after {REQUEST_LIMIT_S:g} s") from error
            answer.has_left = True
        except grpc.RpcError as error:
            name = error.code().name
            raise RequestFailed(f"grpc_{name.lower()}", f"{name}: {error.details()}") from error
        except (OSError, asyncio.IncompleteReadError) as error:
            raise RequestFailed("broken_stream", f"the connection broke off: {error}") from error
        return answer

    async def _grpc(self, request: Request, answer: Answer) -> None:
        answer.token_ids = []
        message = grpc_request(request)
        if not request.is_streamed:
            whole = await self._stub.Generate(message)
            _take_grpc(answer, whole.choices[0], whole.speculative_metrics)
            return
        call = self._stub.GenerateStream(message)
        try:
            async for chunk in call:
                answer.on_event()
                _take_grpc(answer, chunk, chunk.speculative_metrics)
        finally:
            call.cancel()

    async def _http(self, request: Request, answer: Answer) -> None:
        path, body = http_call(request)
        async with connect(self._endpoint) as connection:
            head = await connection.send("POST", path, {}, body)
            if head.status != 200:
                message = error_message(await connection.text(head))
                raise RequestFailed(f"http_{head.status}", f"HTTP {head.status}: {message}")
            if request.is_streamed:
                await _read_events(connection, head, answer)
            else:
                _take_http(answer, json.loads(await connection.text(head)))


async def _read_events(connection: Connection, head: Head, answer: Answer) -> None:
    async with aclosing(data_lines(connection.pieces(head))) as events:
        async for data in events:
            answer.on_event()
            if data == b"[DONE]":
                return
            _take_http(answer, json.loads(data))
    raise RequestFailed("broken_stream", f"the stream broke off after {answer.num_events} events")


def _take_http(answer: Answer, content: dict[str, Any]) -> None:
    """A whole answer, or an event of a stream."""
    if error := content.get("error"):
        raise RequestFailed("error_event", f"error event: {error.get('message', error)}")
    for choice in content.get("choices") or ():
        message = choice.get("message") or choice.get("delta") or choice
        answer.texts.append(message.get("content") or message.get("text") or "")
    counters = (content.get("metrics") or {}).get("speculative_decoding") or {}
    answer.num_draft_tokens += counters.get("num_draft_tokens", 0)
    answer.num_accepted_draft_tokens += counters.get("num_accepted_draft_tokens", 0)


def _take_grpc(answer: Answer, part: Any, metrics: Any) -> None:
    """A whole choice, or a message of a stream."""
    answer.texts.append(part.text)
    if answer.token_ids is not None:
        answer.token_ids.extend(part.token_ids)
    answer.num_draft_tokens += metrics.num_draft_tokens
    answer.num_accepted_draft_tokens += metrics.num_accepted_draft_tokens
