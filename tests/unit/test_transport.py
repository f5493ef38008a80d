"""Calls over a real socket: values, errors, deadlines, streams, and what happens when one end goes away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import numpy as np
import pytest

from specdec.errors import ProtocolError, TooManyRequests
from specdec.messages import (
    Draft,
    Endpoint,
    ProposeReply,
)
from specdec.transport import CallFailed, CallServer, CallTimeout, Channel, ChannelLost, Method
from specdec.transport.codec import Decoder, encode
from specdec.transport.frames import LENGTH_BYTES, MAX_FRAME_BYTES
from specdec.types import (
    GenerationRequest,
    SamplingParams,
    SequenceId,
    StopCriteria,
    VerificationMode,
)
from tests.fakes import eventually

ECHO = Method("echo", tuple[int], int)
REFUSE = Method("refuse", tuple[()], type(None))
BREAK = Method("break", tuple[()], type(None))
SLEEP = Method("sleep", tuple[float], type(None))
COUNT = Method("count", tuple[int], int)
BREAK_LATE = Method("break_late", tuple[()], int)
MISSING = Method("missing", tuple[()], int)
HOST = "127.0.0.1"


class Callee:
    def __init__(self) -> None:
        self.cancelled: list[str] = []
        self.num_sent = 0

    async def echo(self, value: int) -> int:
        return value

    async def refuse(self) -> None:
        raise TooManyRequests("full", "n", retry_after_s=7.5)

    async def break_(self) -> None:
        raise RuntimeError("CUDA error")

    async def sleep(self, seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.cancelled.append("sleep")
            raise

    async def count(self, size: int):
        try:
            for number in range(10_000):
                self.num_sent = number
                yield number if size == 1 else number << 60
                await asyncio.sleep(0)
        finally:
            self.cancelled.append("count")

    async def break_late(self):
        yield 1
        raise RuntimeError("late")

    def server(self) -> CallServer:
        return CallServer(
            {ECHO: self.echo, REFUSE: self.refuse, BREAK: self.break_, SLEEP: self.sleep},
            {COUNT: self.count, BREAK_LATE: self.break_late},
        )


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Callee, CallServer, Channel]]:
    callee = Callee()
    server = callee.server()
    channel = Channel(await server.start(HOST), "callee")
    try:
        yield callee, server, channel
    finally:
        channel.close()
        await server.close()


async def test_many_calls_at_a_time_each_get_their_answer() -> None:
    async with connected() as (_, _, channel):
        calls = (channel.call(ECHO, number, timeout_s=10) for number in range(200))
        assert await asyncio.gather(*calls) == list(range(200))


async def test_what_a_method_raises_on_purpose_arrives_as_it_is() -> None:
    async with connected() as (_, _, channel):
        with pytest.raises(TooManyRequests) as caught:
            await channel.call(REFUSE, timeout_s=10)
        assert (caught.value.message, caught.value.param) == ("full", "n")
        assert caught.value.retry_after_s == 7.5


async def test_anything_else_is_a_failed_call_and_the_connection_goes_on() -> None:
    async with connected() as (_, _, channel):
        with pytest.raises(CallFailed, match="callee: RuntimeError: CUDA error"):
            await channel.call(BREAK, timeout_s=10)
        with pytest.raises(ProtocolError, match="no method missing"):
            await channel.call(MISSING, timeout_s=10)
        with pytest.raises(ProtocolError, match="malformed"):
            await channel.call(ECHO, "text", timeout_s=10)
        assert await channel.call(ECHO, 1, timeout_s=10) == 1


async def test_a_late_call_is_cancelled_where_it_runs_and_its_answer_disturbs_nobody() -> None:
    async with connected() as (callee, _, channel):
        with pytest.raises(CallTimeout, match=r"no answer to sleep in 0\.05 s"):
            await channel.call(SLEEP, 60.0, timeout_s=0.05)
        await eventually(lambda: callee.cancelled == ["sleep"])
        assert await channel.call(ECHO, 2, timeout_s=10) == 2


async def test_an_answer_that_lay_in_the_socket_while_the_caller_was_stopped_counts() -> None:
    """Its time is over when it goes on, but it is not the other process that was late."""
    async with connected() as (_, _, channel):
        assert await channel.call(ECHO, 1, timeout_s=10) == 1
        # The server of this test shares the loop: it answers within the last look, as a socket would.
        calls = [asyncio.create_task(channel.call(ECHO, number, timeout_s=0.05)) for number in range(3)]
        await asyncio.sleep(0)
        time.sleep(0.2)  # noqa: ASYNC251, since a stopped process is what it stands for
        assert await asyncio.gather(*calls) == [0, 1, 2]


async def test_a_caller_that_gives_up_cancels_its_call() -> None:
    async with connected() as (callee, _, channel):
        task = asyncio.create_task(channel.call(SLEEP, 60.0, timeout_s=60))
        await asyncio.sleep(0.05)
        task.cancel()
        await eventually(lambda: callee.cancelled == ["sleep"])


async def test_a_stream_ends_there_when_it_is_closed_here() -> None:
    async with connected() as (callee, _, channel):
        stream = channel.stream(COUNT, 1)
        assert [await anext(stream) for _ in range(5)] == [0, 1, 2, 3, 4]
        await stream.aclose()
        await eventually(lambda: callee.cancelled == ["count"])


async def test_an_error_ends_a_stream_behind_what_it_yielded() -> None:
    async with connected() as (_, _, channel):
        stream = channel.stream(BREAK_LATE)
        assert await anext(stream) == 1
        with pytest.raises(CallFailed, match="late"):
            await anext(stream)


async def test_whoever_waits_hears_of_a_lost_connection_at_once() -> None:
    async with connected() as (callee, server, channel):
        sleeping = asyncio.create_task(channel.call(SLEEP, 60.0, timeout_s=60))
        stream = channel.stream(COUNT, 1)
        await anext(stream)
        await server.close()
        with pytest.raises(ChannelLost, match="callee: the connection is lost"):
            await asyncio.wait_for(sleeping, 5)
        with pytest.raises(ChannelLost):
            async for _ in stream:
                pass
        with pytest.raises(ChannelLost, match="cannot be reached"):
            await channel.call(ECHO, 1, timeout_s=5)
        # Nothing runs on for a caller that cannot hear the answer.
        await eventually(lambda: sorted(callee.cancelled) == ["count", "sleep"])


async def test_a_broken_connection_is_made_anew_by_the_next_call() -> None:
    async with connected() as (_, server, channel):
        assert await channel.call(ECHO, 1, timeout_s=5) == 1
        for peer in list(server._peers):
            peer.connection.close()
        await asyncio.sleep(0.05)
        assert await channel.call(ECHO, 2, timeout_s=5) == 2


async def test_a_closed_channel_calls_nobody() -> None:
    async with connected() as (_, server, channel):
        channel.close()
        await server.close()
        with pytest.raises(ChannelLost, match="does not run any more"):
            await channel.call(ECHO, 1, timeout_s=5)


async def test_a_caller_without_the_token_is_not_served() -> None:
    async with connected() as (_, server, channel):
        endpoint = Endpoint(host=HOST, port=server._server.sockets[0].getsockname()[1], token="guess")
        stranger = Channel(endpoint, "callee")
        with pytest.raises(ChannelLost):
            await stranger.call(ECHO, 1, timeout_s=5)
        assert await channel.call(ECHO, 1, timeout_s=5) == 1


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff\xff\xff",
        (MAX_FRAME_BYTES + 1).to_bytes(LENGTH_BYTES, "little"),
        (3).to_bytes(LENGTH_BYTES, "little") + b"GET",
        (1).to_bytes(LENGTH_BYTES, "little") + b"\xc1",
    ],
)
async def test_a_connection_that_speaks_something_else_is_dropped(data: bytes) -> None:
    async with connected() as (_, server, channel):
        port = server._server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(data)
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
        assert await channel.call(ECHO, 1, timeout_s=5) == 1


async def test_a_reader_that_stops_reading_stops_the_stream() -> None:
    """Otherwise a gateway that hangs would fill the coordinator's memory."""
    async with connected() as (callee, server, channel):
        await channel.call(ECHO, 1, timeout_s=5)
        stream = channel.stream(COUNT, 1)
        await anext(stream)
        (peer,) = server._peers
        peer.connection.pause_writing()
        await asyncio.sleep(0.05)
        stopped_at = callee.num_sent
        await asyncio.sleep(0.05)
        assert callee.num_sent == stopped_at < 9_999
        peer.connection.resume_writing()
        await eventually(lambda: callee.num_sent > stopped_at)


def test_a_request_comes_out_as_it_went_in() -> None:
    request = GenerationRequest(
        sequence_id=SequenceId("s"),
        prompt_ids=(1,),
        sampling=SamplingParams(
            logit_bias=((5, -1.5),), seed=2**64 - 1, mode=VerificationMode.COUPLED, top_p=0.1
        ),
        stop=StopCriteria(max_tokens=3, stop_token_ids=frozenset({9})),
        max_draft_tokens=0,
    )
    assert Decoder(GenerationRequest)(encode(request)) == request


def test_a_drafts_law_comes_out_as_it_went_in() -> None:
    rng = np.random.default_rng(0)
    ids, probs = rng.integers(0, 49_152, (3, 64), np.int32), rng.random((3, 64), np.float32)
    draft = Draft(
        sequence_id=SequenceId("s"), epoch=1, token_ids=(1, 2, 3), support_ids=ids, support_probs=probs
    )
    (out,) = Decoder(ProposeReply)(encode(ProposeReply(drafts=(draft,)))).drafts
    assert out.support_ids.dtype == np.int32
    assert out.support_probs.dtype == np.float32
    np.testing.assert_array_equal(out.support_ids, ids)
    np.testing.assert_array_equal(out.support_probs, probs)


@pytest.mark.parametrize("shape", [(3, 63), (-1,), "x"])
def test_an_array_that_does_not_fit_its_shape_is_malformed(shape: object) -> None:
    reply = {"drafts": [{"sequence_id": "s", "epoch": 1, "token_ids": [1], "support_ids": [shape, bytes(9)]}]}
    with pytest.raises(ProtocolError, match="malformed"):
        Decoder(ProposeReply)(msgspec.msgpack.encode(reply))
