"""The gateway's backend while an application is redeployed or removed: stand-ins for coordinators, no Ray."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest

from specdec.cluster.backend import ServeBackend
from specdec.config import parse_config
from specdec.coordinator.client import at_once
from specdec.errors import CoordinatorLost, ServiceUnavailable
from specdec.types import GenerationRequest, SamplingParams, SequenceId, StopCriteria, TokenChunk
from tests.fakes import ScriptedBackend, eventually

CONFIG = parse_config({"target": {"model": "t"}, "coordinator": {"idle_wait_s": 5.0}})
REQUEST = GenerationRequest(
    sequence_id=SequenceId("s"),
    prompt_ids=(1,),
    sampling=SamplingParams(temperature=0.0),
    stop=StopCriteria(max_tokens=4, stop_token_ids=frozenset()),
)


class Client:
    """A coordinator that gives one token and then waits to be lost."""

    is_available = True
    num_requests = 0

    def __init__(self, target_model: str) -> None:
        self.status = replace(ScriptedBackend().statuses()[0], target_model=target_model)
        self.lost = asyncio.Event()
        self.is_closed = False

    async def batches(
        self, request: GenerationRequest, not_before: object
    ) -> AsyncGenerator[tuple[TokenChunk, ...], None]:
        yield (TokenChunk(sequence_id=request.sequence_id, token_ids=(len(request.output_ids),)),)
        await self.lost.wait()
        raise CoordinatorLost("lost")

    async def close(self) -> None:
        self.is_closed = True


def backend_with(**clients: Client) -> ServeBackend:
    backend = ServeBackend(None, CONFIG)
    backend._clients = dict(clients)
    return backend


async def test_a_coordinator_of_another_target_is_passed_over():
    other, own = Client("u"), Client("t")
    backend = backend_with(other=other, own=own)
    assert [status.target_model for status in backend.statuses()] == ["t"]
    stream = backend.generate(REQUEST, at_once)
    await anext(stream)
    own.is_available = False
    own.lost.set()
    moved = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0.3)
    assert not moved.done()  # the other one is there, but its tokens mean another text
    backend._clients["new"] = Client("t")
    ((chunk,),) = (await moved,)
    assert chunk.token_ids == (1,)  # behind the token that was there
    await stream.aclose()


async def test_a_retired_backend_closes_with_its_last_stream():
    client = Client("t")
    backend = backend_with(a=client)
    stream = backend.generate(REQUEST, at_once)
    await anext(stream)
    retired = asyncio.ensure_future(backend.retire())
    await asyncio.sleep(0)
    assert not client.is_closed
    await stream.aclose()
    await asyncio.wait_for(retired, 1.0)
    assert client.is_closed


async def test_where_none_will_come_any_more_a_stream_that_loses_its_coordinator_ends_at_once():
    client = Client("t")
    backend = backend_with(a=client)
    stream = backend.generate(REQUEST, at_once)
    await anext(stream)
    retired = asyncio.ensure_future(backend.retire("it is gone"))
    await eventually(lambda: backend._gone is not None)
    client.is_available = False
    client.lost.set()
    started_s = time.monotonic()
    with pytest.raises(ServiceUnavailable, match="it is gone"):
        await anext(stream)
    assert time.monotonic() - started_s < 1.0
    await asyncio.wait_for(retired, 1.0)
    assert client.is_closed
