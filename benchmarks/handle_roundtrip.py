"""One call between two processes over Ray Serve handles, as a round makes two of them."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from benchmarks.common import save
from specdec.cluster.handles import ReplicaSet
from specdec.cluster.router import ROUTER_PATH
from specdec.messages import Draft, Feed, VerifyItem, VerifyRequest
from specdec.types import SequenceId

REPEATS = 400


class Echo:
    async def ping(self, request: VerifyRequest) -> int:
        return len(request.items)


def verify_request(num_sequences: int, gamma: int = 5) -> VerifyRequest:
    items = []
    for idx in range(num_sequences):
        sequence_id = SequenceId(f"sequence-{idx:032d}")
        draft = Draft(
            sequence_id=sequence_id,
            epoch=0,
            token_ids=tuple(range(gamma)),
            support_ids=np.zeros((gamma, 64), np.int32),
            support_probs=np.zeros((gamma, 64), np.float32),
        )
        feed = Feed(sequence_id=sequence_id, epoch=0, keep=100, token_ids=(1, *draft.token_ids))
        items.append(VerifyItem(feed=feed, num_rows=gamma + 1, draft=draft))
    return VerifyRequest(owner="benchmark", items=tuple(items))


async def p50_ms(call: Callable[[], Awaitable[Any]]) -> float:
    times = []
    for _ in range(REPEATS):
        started_s = time.perf_counter()
        await call()
        times.append((time.perf_counter() - started_s) * 1e3)
    return round(statistics.median(times), 2)


class Caller:
    """Runs inside a replica, as the coordinator does."""

    def __init__(self, default: Any, pinned: Any) -> None:
        self._default, self._pinned = default, pinned

    async def measure(self) -> dict[str, float]:
        replicas = ReplicaSet(self._pinned)
        small, large = verify_request(1), verify_request(16)
        while not replicas.current():
            await replicas.ask_all("ping", small)
        (replica,) = replicas.current()
        by_value = self._default.options(_by_reference=False)
        figures = {}
        for _ in range(2):  # the first pass warms up
            for name, request in (("1_sequence", small), ("16_sequences", large)):
                figures[f"default_router_{name}_ms"] = await p50_ms(
                    lambda r=request: self._default.ping.remote(r)
                )
                figures[f"pinned_router_{name}_ms"] = await p50_ms(
                    lambda r=request: replica.call("ping", r, timeout_s=10)
                )
                figures[f"by_value_{name}_ms"] = await p50_ms(lambda r=request: by_value.ping.remote(r))
        return figures


def main() -> None:
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    options = {"ray_actor_options": {"num_cpus": 0}, "max_ongoing_requests": 100}
    router = RequestRouterConfig(request_router_class=ROUTER_PATH)
    default = serve.deployment(Echo, name="Default", **options).bind()
    pinned = serve.deployment(Echo, name="Pinned", request_router_config=router, **options).bind()
    caller = serve.deployment(Caller, name="Caller", **options).bind(default, pinned)
    handle = serve.run(caller, name="benchmark", route_prefix=None)
    figures = asyncio.run(_ask(handle))
    print(figures)
    save("handle_roundtrip", figures)
    ray.shutdown()


async def _ask(handle: Any) -> dict[str, float]:
    figures: dict[str, float] = await handle.measure.remote()
    return figures


if __name__ == "__main__":
    main()
