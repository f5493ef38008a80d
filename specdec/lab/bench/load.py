"""The load itself: a fixed number of streams, each sending its next request when the last one is over."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from specdec.lab.bench.answer import Answer, Record
from specdec.lab.bench.http import Connection, Endpoint, connect, data_lines, error_message
from specdec.lab.bench.prompts import Body
from specdec.lab.errors import RequestFailed

Outcome = Record | RequestFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What every request of a measurement has in common."""

    endpoint: Endpoint
    model: str
    max_tokens: int = 128
    temperature: float = 0.0
    ignore_eos: bool = False
    api_key: str | None = None
    extra_body: Mapping[str, object] = field(default_factory=dict)
    """Further fields of the body, for what only one server knows."""
    request_timeout_s: float = 600.0
    """A request that takes longer is given up and counted as ``timeout``."""
    idle_timeout_s: float = 60.0
    """Likewise one whose stream brings nothing for this long."""

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def request(self, prompt: Body) -> tuple[str, dict[str, object]]:
        """Path and body of one request."""
        path = "/v1/chat/completions" if "messages" in prompt else "/v1/completions"
        optional = {"ignore_eos": True} if self.ignore_eos else {}
        return path, {
            "model": self.model,
            **prompt,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **optional,
            **self.extra_body,
        }


async def run_load(
    load: Load,
    prompts: Sequence[Body],
    concurrency: int,
    on_finished: Callable[[], object] = lambda: None,
) -> tuple[list[Outcome], float]:
    """Send each prompt once, ``concurrency`` at a time; the outcomes, and the seconds it took.

    ``on_finished`` is called after each request. Never raises for a request: its failure is its outcome.
    """
    waiting = iter(prompts)
    outcomes: list[Outcome] = []
    started_s = time.perf_counter()
    streams = (_send_all(load, waiting, outcomes, on_finished) for _ in range(min(concurrency, len(prompts))))
    await asyncio.gather(*streams)
    return outcomes, time.perf_counter() - started_s


async def _send_all(
    load: Load, waiting: Iterator[Body], outcomes: list[Outcome], on_finished: Callable[[], object]
) -> None:
    for prompt in waiting:  # shared between the streams: each takes the next one
        outcomes.append(await send(load, prompt))
        on_finished()


async def send(load: Load, prompt: Body) -> Outcome:
    """One streamed request."""
    try:
        async with connect(load.endpoint) as connection:
            return await _stream(load, prompt, connection)
    except RequestFailed as failure:
        return failure
    except (OSError, asyncio.IncompleteReadError) as error:
        return RequestFailed("broken_stream", f"the connection broke off: {error}")
    except (asyncio.LimitOverrunError, ValueError, TypeError, AttributeError) as error:
        return RequestFailed("broken_stream", f"not a stream of OpenAI's events: {error}")


async def _stream(load: Load, prompt: Body, connection: Connection) -> Record:
    """The clock starts when the connection stands, as for a client that keeps its connections."""
    path, body = load.request(prompt)
    answer = Answer(started_s=time.perf_counter())
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + load.request_timeout_s
    is_done = False
    try:
        async with asyncio.timeout_at(min(deadline_s, loop.time() + load.idle_timeout_s)) as limit:
            head = await connection.send("POST", path, load.headers, body)
            if head.status != 200:
                message = error_message(await connection.text(head))
                raise RequestFailed(f"http_{head.status}", f"HTTP {head.status}: {message}")
            async with aclosing(data_lines(connection.pieces(head))) as events:
                async for data in events:
                    if data == b"[DONE]":
                        is_done = True
                        break
                    answer.add(time.perf_counter(), json.loads(data))
                    limit.reschedule(min(deadline_s, loop.time() + load.idle_timeout_s))
    except TimeoutError as error:
        is_late = loop.time() >= deadline_s
        raise RequestFailed("timeout", _timeout_message(load, is_late=is_late)) from error
    return answer.finish(time.perf_counter(), is_done=is_done)


def _timeout_message(load: Load, *, is_late: bool) -> str:
    if is_late:
        return f"not over after {load.request_timeout_s:g} s (--request-timeout): given up"
    return f"nothing arrived for {load.idle_timeout_s:g} s (--idle-timeout): given up"
