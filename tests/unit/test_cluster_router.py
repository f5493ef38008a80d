"""The choice of a replica for a pinned call."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from specdec.cluster.registry import ReplicaGone
from specdec.cluster.router import PinnedRouter

REPLICAS = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in ("a", "b")]


class Router(PinnedRouter):
    """Without what needs a running Serve."""

    def __init__(self) -> None:
        self._deployment_id = SimpleNamespace(name="DraftWorker")


def call(session_id: str) -> SimpleNamespace:
    return SimpleNamespace(
        metadata=SimpleNamespace(session_id=session_id),
        routing_context=SimpleNamespace(should_backoff=False),
        future=asyncio.get_running_loop().create_future(),
    )


async def test_a_pinned_call_has_one_candidate():
    assert await Router().choose_replicas(REPLICAS, call("b")) == [[REPLICAS[1]]]


async def test_a_call_without_a_pin_goes_to_any():
    ((chosen,),) = await Router().choose_replicas(REPLICAS, call(""))
    assert chosen in REPLICAS


async def test_the_caller_is_told_that_its_replica_is_gone_and_serve_gets_something_to_drop():
    pending = call("c")
    # An exception here, or nothing chosen: a traceback in the log, or a search without end.
    ((chosen,),) = await Router().choose_replicas(REPLICAS, pending)
    assert chosen in REPLICAS
    with pytest.raises(ReplicaGone, match="DraftWorker replica c is not running"):
        await pending.future


async def test_a_call_that_is_over_stays_so():
    pending = call("c")
    pending.future.cancel()
    assert await Router().choose_replicas(REPLICAS, pending)
    assert pending.future.cancelled()
