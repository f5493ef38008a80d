"""Polls of a deployment's replicas: a stand-in for Serve's handle, no Ray."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from dataclasses import dataclass, field

import pytest

from specdec.cluster import handles, registry
from specdec.cluster.handles import POLL_PATIENCE_S, ReplicaSet
from specdec.messages import Endpoint

numbers = itertools.count()


@dataclass
class Deployment:
    """Replicas that answer, hang or fail."""

    app_name: str = field(default_factory=lambda: f"app-{next(numbers)}")
    hung: set[str] = field(default_factory=set)
    failing: set[str] = field(default_factory=set)
    calls: Counter[str] = field(default_factory=Counter)
    released: asyncio.Event = field(default_factory=asyncio.Event)

    def run(self, *replica_ids: str) -> None:
        registry.publish(self.app_name, "Workers", replica_ids)


class Handle:
    """What `ReplicaSet` uses of a handle."""

    deployment_name = "Workers"

    def __init__(self, deployment: Deployment, replica_id: str | None = None) -> None:
        self.app_name = deployment.app_name
        self._deployment, self._replica_id = deployment, replica_id

    def options(self, session_id: str | None = None, **_: object) -> Handle:
        return Handle(self._deployment, session_id or self._replica_id)

    @property
    def heartbeat(self) -> Handle:
        return self

    @property
    def endpoint(self) -> Where:
        return Where()

    def remote(self, *_: object) -> asyncio.Task[str]:
        return asyncio.ensure_future(self._answer())

    async def _answer(self) -> str:
        if self._replica_id is None:  # on any, and there is none
            self._deployment.calls["any"] += 1
            await self._deployment.released.wait()
            return "any"
        self._deployment.calls[self._replica_id] += 1
        if self._replica_id in self._deployment.failing:
            raise RuntimeError("broken")
        if self._replica_id in self._deployment.hung:
            await self._deployment.released.wait()
        return self._replica_id


class Where:
    def remote(self) -> asyncio.Future[Endpoint]:
        async def answer() -> Endpoint:
            return Endpoint(host="127.0.0.1", port=1, token="")

        return asyncio.ensure_future(answer())


async def poll(replicas: ReplicaSet) -> tuple[set[str], float]:
    started_s = time.monotonic()
    answers = await replicas.ask_all("heartbeat")
    return {answer for _, answer in answers}, time.monotonic() - started_s


async def test_a_hung_replica_delays_one_poll_and_then_none():
    deployment = Deployment(hung={"b"})
    deployment.run("a", "b", "c")
    replicas = ReplicaSet(Handle(deployment))
    seen, first_s = await poll(replicas)
    assert seen == {"a", "c"}
    assert POLL_PATIENCE_S * 0.9 < first_s < POLL_PATIENCE_S + 0.3
    for _ in range(3):
        seen, later_s = await poll(replicas)
        assert seen == {"a", "c"}
        assert later_s < POLL_PATIENCE_S / 2
    assert deployment.calls == {"a": 4, "b": 1, "c": 4}


async def test_an_answer_that_came_late_counts_in_the_next_poll():
    deployment = Deployment(hung={"b"})
    deployment.run("a", "b")
    replicas = ReplicaSet(Handle(deployment))
    assert (await poll(replicas))[0] == {"a"}
    deployment.hung.clear()
    deployment.released.set()
    await asyncio.sleep(0.01)
    assert (await poll(replicas))[0] == {"a", "b"}
    assert deployment.calls["b"] == 1
    assert (await poll(replicas))[0] == {"a", "b"}
    assert deployment.calls["b"] == 2


async def test_a_call_that_was_never_answered_is_made_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(handles, "CONTROL_TIMEOUT_S", 0.05)
    monkeypatch.setattr(handles, "POLL_PATIENCE_S", 0.01)
    deployment = Deployment(hung={"b"}, failing={"c"})
    deployment.run("a", "b", "c")
    replicas = ReplicaSet(Handle(deployment))
    for _ in range(4):
        assert (await poll(replicas))[0] == {"a"}
        await asyncio.sleep(0.05)
    assert deployment.calls["b"] >= 2
    assert deployment.calls["c"] == 4


async def test_a_replica_that_left_is_not_waited_for():
    deployment = Deployment(hung={"b"})
    deployment.run("a", "b")
    replicas = ReplicaSet(Handle(deployment))
    await poll(replicas)
    deployment.run("a")
    seen, seconds = await poll(replicas)
    assert seen == {"a"}
    assert seconds < POLL_PATIENCE_S / 2


async def test_while_there_is_no_replica_one_poll_waits_and_then_none():
    deployment = Deployment()
    replicas = ReplicaSet(Handle(deployment))
    seen, first_s = await poll(replicas)
    assert seen == set()
    assert first_s > POLL_PATIENCE_S * 0.9
    for _ in range(3):
        seen, seconds = await poll(replicas)
        assert seen == set()
        assert seconds < POLL_PATIENCE_S / 2
    assert deployment.calls == {"any": 1}
    deployment.run("a")
    assert (await poll(replicas))[0] == {"a"}
