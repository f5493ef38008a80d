"""Server-sent events, and work that ends when the client leaves."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specdec.errors import InvariantViolation, SpecDecError
from specdec.gateway.events import Finished, GenerationEvent, TextDelta
from specdec.gateway.faults import log_fault
from specdec.gateway.http_errors import error_envelope
from specdec.gateway.openai_responses import JsonObject, ResponseFormat

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

DONE_FRAME = b"data: [DONE]\n\n"

_to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def frame(payload: JsonObject) -> bytes:
    """One event: a ``data:`` line with one JSON object, nothing else, ended by an empty line."""
    return b"data: " + _to_json(payload).encode() + b"\n\n"


class Frames(Protocol):
    """Events of one answer to what is sent."""

    def opening(self) -> bytes:
        """What precedes the first event."""
        ...

    def of(self, event: GenerationEvent) -> bytes:
        """The event's frames in one piece; empty where nothing shows of it."""
        ...

    def error(self, error: SpecDecError) -> bytes:
        """The frame that ends an answer that failed."""
        ...


class ChunkFrames:
    """Events to chunks. Those with text alone differ in nothing else, so the rest is rendered once each."""

    def __init__(self, response: ResponseFormat) -> None:
        self._response = response
        self._templates: dict[int, tuple[bytes, bytes]] = {}
        """By choice: what stands before and behind the text."""

    def opening(self) -> bytes:
        """What precedes the first event."""
        return b"".join(map(frame, self._response.opening()))

    def of(self, event: GenerationEvent) -> bytes:
        """The event's frames, often one, in one piece."""
        if isinstance(event, TextDelta) and event.parts is None and not event.tokens:
            # Tokens without text (an incomplete character, a possible stop string) show nothing yet.
            return self._text_frame(event.index, event.text) if event.text else b""
        frames = b"".join(map(frame, self._response.chunks(event)))
        is_last = isinstance(event, Finished) and event.totals is not None
        return frames + DONE_FRAME if is_last else frames

    def _text_frame(self, index: int, text: str) -> bytes:
        if index not in self._templates:
            # The text is the last string of a chunk: whatever the model's name is, this cuts around the text.
            template = frame(self._response.text_chunk(index, "\0"))
            before, _, behind = template.rpartition(_to_json("\0").encode())
            self._templates[index] = (before, behind)
        before, behind = self._templates[index]
        return before + _to_json(text).encode() + behind

    def error(self, error: SpecDecError) -> bytes:
        """One frame with ``error``, and no ``[DONE]``."""
        return frame(error_envelope(error))


async def sse_frames(
    first: GenerationEvent, events: AsyncGenerator[GenerationEvent, None], frames: Frames, request_id: str
) -> AsyncGenerator[bytes, None]:
    """Yield the frames of one answer, one or several at a time; its first event has been waited for already.

    An error from here on can only be told inside the stream.
    """
    try:
        if head := frames.opening() + frames.of(first):
            yield head
        async for event in events:
            if body := frames.of(event):
                yield body
    except SpecDecError as error:
        yield frames.error(error)
    except Exception as error:
        log_fault(logger, f"request {request_id} failed while streaming", error)
        yield frames.error(InvariantViolation("internal error"))


class EventStreamResponse(Response):
    """Sends frames; closes their source when the answer ends, however it ends.

    The framework's own streaming response leaves a generator it did not exhaust to the garbage collector.
    Here the source is closed, and with it the sequence on every worker, before the request is over.
    """

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        source: AsyncGenerator[GenerationEvent, None],
        lifetime_s: float,
    ) -> None:
        super().__init__(media_type="text/event-stream")
        # Proxies must pass frames on as they come.
        self.headers.update({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._frames = frames
        self._source = source
        self._lifetime_s = lifetime_s
        """A client that does not read holds the stream no longer than this."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the frames until they end, the client leaves, or the time is up."""
        async with aclosing(self._source), aclosing(self._frames):
            try:
                async with asyncio.timeout(self._lifetime_s):
                    await unless_disconnected(receive, self._send_all(send))
            except (ClientDisconnect, TimeoutError, OSError) as error:
                logger.debug("stream ended early: %r", error)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for body in self._frames:
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Await ``work``; cancel it as soon as the client leaves, and whenever this is cancelled.

    ``work`` has ended, its cleanup included, when this returns or raises.

    Raises:
        ClientDisconnect: the client left first.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
