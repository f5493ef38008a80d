"""A gateway's side of a coordinator: how chunks reach a reader who may be slower, or want fewer messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from specdec.coordinator.client import CoordinatorClient
from specdec.errors import CoordinatorLost, GenerationFailed, TooManyRequests
from specdec.messages import RoundUpdate
from specdec.types import GenerationRequest, SamplingParams, SequenceId, StopCriteria, TokenChunk
from tests.fakes import eventually

REQUEST = GenerationRequest(
    sequence_id=SequenceId("one"),
    prompt_ids=(1,),
    sampling=SamplingParams(),
    stop=StopCriteria(max_tokens=100),
)


class Port:
    """A coordinator whose rounds are made by hand."""

    def __init__(self) -> None:
        self.rounds: asyncio.Queue[RoundUpdate | None] = asyncio.Queue()
        self.cancelled: list[SequenceId] = []
        self.submit_error: Exception | None = None
        self.is_submitted = asyncio.Event()

    async def submit(self, gateway_id: str, request: GenerationRequest) -> None:
        if self.submit_error is not None:
            raise self.submit_error
        self.is_submitted.set()

    async def cancel(self, sequence_ids) -> None:
        self.cancelled += sequence_ids

    async def poll(self, gateway_id: str) -> None:
        return None

    async def updates(self, gateway_id: str) -> AsyncGenerator[RoundUpdate, None]:
        while (update := await self.rounds.get()) is not None:
            yield update

    def commit(self, *token_ids: int, name: str = "one", **fields: object) -> None:
        chunk = TokenChunk(sequence_id=SequenceId(name), token_ids=token_ids, **fields)
        self.rounds.put_nowait(RoundUpdate(chunks=(chunk,)))

    def die(self) -> None:
        self.rounds.put_nowait(None)


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Port, CoordinatorClient]]:
    port = Port()
    client = CoordinatorClient(port, "gateway")
    try:
        yield port, client
    finally:
        await client.close()


def ids_of(batch: tuple[TokenChunk, ...]) -> list[int]:
    return [token_id for chunk in batch for token_id in chunk.token_ids]


class Clock:
    """A `not_before` that a test sets."""

    def __init__(self) -> None:
        self.wait_s = 0.0

    def __call__(self) -> float:
        return asyncio.get_running_loop().time() + self.wait_s


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_every_round_comes_by_itself_to_a_reader_who_is_there():
    async with connected() as (port, client), aclosing(client.batches(REQUEST)) as batches:
        for token_id in (5, 6, 7):
            reader = asyncio.ensure_future(anext(batches))
            await port.is_submitted.wait()
            port.commit(token_id)
            assert ids_of(await reader) == [token_id]


async def test_a_slow_reader_gets_all_rounds_at_once_in_order():
    async with connected() as (port, client), aclosing(client.batches(REQUEST)) as batches:
        port.commit(5)
        first = asyncio.ensure_future(anext(batches))
        await port.is_submitted.wait()
        port.commit(5)
        await first
        for token_id in range(6, 10):
            port.commit(token_id, num_drafted=2, num_accepted=1)
        port.commit(10, finish_reason="stop")
        await settled()
        batch = await anext(batches)
        assert ids_of(batch) == [6, 7, 8, 9, 10]
        assert [chunk.num_drafted for chunk in batch] == [2, 2, 2, 2, 0]  # still a chunk a round
        assert batch[-1].is_last
        assert await anext(batches, None) is None


async def test_nothing_comes_before_its_time_and_then_everything_does():
    not_before = Clock()
    loop = asyncio.get_running_loop()
    async with connected() as (port, client), aclosing(client.batches(REQUEST, not_before)) as batches:
        reader = asyncio.ensure_future(anext(batches))
        await port.is_submitted.wait()
        port.commit(5)
        assert ids_of(await reader) == [5]
        not_before.wait_s = 0.1
        started_s = loop.time()
        reader = asyncio.ensure_future(anext(batches))
        await settled()
        for token_id in (6, 7, 8):
            port.commit(token_id)
            await settled()
            assert not reader.done()
        assert ids_of(await reader) == [6, 7, 8]
        assert 0.09 < loop.time() - started_s < 1.0


async def test_what_comes_after_its_time_comes_at_once():
    not_before = Clock()
    async with connected() as (port, client), aclosing(client.batches(REQUEST, not_before)) as batches:
        reader = asyncio.ensure_future(anext(batches))
        await port.is_submitted.wait()
        not_before.wait_s = 0.01
        await asyncio.sleep(0.03)
        port.commit(5)
        async with asyncio.timeout(1.0):
            assert ids_of(await reader) == [5]


@pytest.mark.parametrize("end", ["finish", "error", "death"])
async def test_the_end_does_not_wait_for_its_time(end):
    not_before = Clock()
    not_before.wait_s = 60.0
    async with connected() as (port, client), aclosing(client.batches(REQUEST, not_before)) as batches:
        reader = asyncio.ensure_future(anext(batches))
        await port.is_submitted.wait()
        port.commit(5)
        if end == "finish":
            port.commit(6, finish_reason="length")
        elif end == "error":
            port.commit(error="the target was lost")
        else:
            port.die()
        async with asyncio.timeout(1.0):
            assert ids_of(await reader) == ([5, 6] if end == "finish" else [5])
            if end != "finish":
                with pytest.raises(GenerationFailed if end == "error" else CoordinatorLost):
                    await anext(batches)


async def test_a_reader_that_leaves_while_it_waits_cancels_the_sequence():
    async with connected() as (port, client):
        reader = asyncio.ensure_future(anext(client.batches(REQUEST)))
        await port.is_submitted.wait()
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        await eventually(lambda: port.cancelled == ["one"])
        assert client.num_requests == 0


async def test_a_refused_sequence_leaves_nothing_behind():
    async with connected() as (port, client):
        port.submit_error = TooManyRequests("full")
        with pytest.raises(TooManyRequests):
            await anext(client.batches(REQUEST))
        assert client.num_requests == 0


async def test_generate_gives_the_chunks_of_the_batches_one_by_one():
    async with connected() as (port, client), aclosing(client.generate(REQUEST)) as chunks:
        reader = asyncio.ensure_future(anext(chunks))
        await port.is_submitted.wait()
        for token_id in (5, 6):
            port.commit(token_id)
        port.commit(7, finish_reason="stop")
        assert (await reader).token_ids == (5,)
        assert [chunk.token_ids async for chunk in chunks] == [(6,), (7,)]
