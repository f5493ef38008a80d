"""Checks of calls between real replicas, run by `main` in a process of their own.

Ray reads how to authenticate when it is imported, and Serve its settings: a test process has done both.
"""

from __future__ import annotations

import asyncio
import os
import time

import pytest
import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from specdec.cluster.handles import CONTROL_TIMEOUT_S, PinnedReplica, ReplicaSet
from specdec.cluster.registry import ReplicaGone
from specdec.cluster.router import ROUTER_PATH
from specdec.errors import WorkerError
from specdec.transport import CallServer, ChannelLost, Method

ECHO = Method("echo", tuple[int], int)
SLEEP = Method("sleep", tuple[float], type(None))
DIE = Method("die", tuple[()], type(None))
COUNT = Method("count", tuple[()], int)
OPTIONS = {"ray_actor_options": {"num_cpus": 0}, "max_ongoing_requests": 100}


class Callee:
    def __init__(self) -> None:
        self.cancelled: list[str] = []
        self._server = CallServer({ECHO: self.echo, SLEEP: self.sleep, DIE: self.die}, {COUNT: self.count})

    async def endpoint(self):
        return await self._server.start(ray.util.get_node_ip_address())

    async def echo(self, value):
        return value

    async def what_was_cancelled(self):
        return self.cancelled

    async def fail(self):
        raise RuntimeError("CUDA error")

    async def fail_oddly(self):
        class LocalError(Exception):
            pass

        raise LocalError("odd")

    async def be_cancelled(self):
        raise asyncio.CancelledError

    async def sleep(self, seconds):
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.cancelled.append("sleep")
            raise

    async def count(self):
        try:
            for number in range(10_000):
                yield number
                await asyncio.sleep(0.005)
        finally:
            self.cancelled.append("count")

    async def die(self):
        os._exit(1)


class Caller:
    """Runs each check inside a replica, as our callers do; a failed assertion comes back as it is."""

    def __init__(self, callee) -> None:
        self._replicas = ReplicaSet(callee)

    async def replica(self) -> PinnedReplica:
        async with asyncio.timeout(60):
            while True:
                for replica in await self._replicas.discover("echo", 0):
                    try:
                        await replica.call("echo", 0)
                    except WorkerError:
                        continue
                    return replica
                await asyncio.sleep(0.1)

    async def check_values(self):
        replica = await self.replica()
        calls = (replica.call("echo", number) for number in range(50))
        assert await asyncio.gather(*calls) == list(range(50))
        channel = await replica.channel()
        assert await channel.call(ECHO, 7, timeout_s=10) == 7
        assert await replica.channel() is channel

    async def check_errors(self):
        replica = await self.replica()
        with pytest.raises(WorkerError, match="RuntimeError: CUDA error"):
            await replica.call("fail")
        with pytest.raises(WorkerError, match="fail_oddly failed"):
            await replica.call("fail_oddly")
        with pytest.raises(WorkerError, match="cancelled there"):
            await replica.call("be_cancelled")

    async def check_deadline(self):
        replica = await self.replica()
        started_s = time.monotonic()
        with pytest.raises(WorkerError, match="no answer"):
            await replica.call("sleep", 60)
        assert time.monotonic() - started_s < CONTROL_TIMEOUT_S + 5
        await self._until_cancelled(replica, "sleep")

    async def check_stream(self):
        replica = await self.replica()
        stream = (await replica.channel()).stream(COUNT)
        assert [await anext(stream) for _ in range(5)] == [0, 1, 2, 3, 4]
        await stream.aclose()
        await self._until_cancelled(replica, "count")

    async def check_death(self):
        replica = await self.replica()
        channel = await replica.channel()
        sleeping = asyncio.ensure_future(channel.call(SLEEP, 60.0, timeout_s=60))
        stream = channel.stream(COUNT)
        await anext(stream)
        started_s = time.monotonic()
        with pytest.raises(ChannelLost):
            await channel.call(DIE, timeout_s=60)
        with pytest.raises(ChannelLost):
            await sleeping
        with pytest.raises(ChannelLost):
            await _exhaust(stream)
        assert time.monotonic() - started_s < 10
        with pytest.raises(WorkerError):
            await replica.call("echo", 1)
        await asyncio.sleep(1.5)
        with pytest.raises(ReplicaGone):
            await replica.call("echo", 1)
        assert (await self.replica()).replica_id != replica.replica_id
        with pytest.raises(ChannelLost, match="does not run any more"):
            await channel.call(ECHO, 1, timeout_s=5)

    async def _until_cancelled(self, replica: PinnedReplica, name: str) -> None:
        async with asyncio.timeout(10):
            while name not in await replica.call("what_was_cancelled"):  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def _exhaust(stream) -> None:
    async for _ in stream:
        pass


def main() -> None:
    ray.init(address="local", namespace="serve", num_cpus=8, log_to_driver=False, logging_level="ERROR")
    pinned = RequestRouterConfig(request_router_class=ROUTER_PATH)
    callee = serve.deployment(Callee, name="Callee", request_router_config=pinned, **OPTIONS).bind()
    app = serve.deployment(Caller, name="Caller", **OPTIONS).bind(callee)
    handle = serve.run(app, name="calls", route_prefix=None)
    asyncio.run(_run(handle))
    ray.shutdown()


async def _run(handle) -> None:
    for name in [name for name in vars(Caller) if name.startswith("check_")]:
        try:
            await getattr(handle, name).remote()
        except Exception as error:
            print(f"{name} failed: {error}", flush=True)
        else:
            print(f"{name} passed", flush=True)
