"""One call between two Serve replicas, as a round makes two of them, by every way there is.

    python -m benchmarks.transport

The callee answers on a thread of its own, as a worker does. See docs/decisions/0013-transport.md.
"""

from __future__ import annotations

import asyncio
import pickle
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import ray
from ray import serve

from benchmarks.common import save
from specdec.cluster.handles import by_value
from specdec.messages import Draft, Endpoint, Feed, Verdict, VerifyItem, VerifyReply, VerifyRequest
from specdec.transport import CallServer, Channel
from specdec.transport.codec import Decoder, encode
from specdec.transport.methods import VERIFY
from specdec.types import SequenceId

REPEATS = 400
OPTIONS: dict[str, Any] = {"ray_actor_options": {"num_cpus": 0}, "max_ongoing_requests": 100}


def answer(request: VerifyRequest) -> VerifyReply:
    verdicts = tuple(
        Verdict(sequence_id=item.feed.sequence_id, epoch=0, token_ids=item.feed.token_ids)
        for item in request.items
    )
    return VerifyReply(verdicts=verdicts)


def answer_encoded(data: bytes) -> bytes:
    return encode(answer(Decoder(VerifyRequest)(data)))


class Callee:
    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)

    async def verify(self, request: VerifyRequest) -> VerifyReply:
        return await asyncio.get_running_loop().run_in_executor(self._thread, answer, request)

    async def endpoint(self) -> Endpoint:
        return await CallServer({VERIFY: self.verify}).start(ray.util.get_node_ip_address())

    async def grpc_port(self) -> int:
        self._server = grpc.aio.server()
        methods = {
            "Unary": grpc.unary_unary_rpc_method_handler(self._unary),
            "Stream": grpc.stream_stream_rpc_method_handler(self._stream),
        }
        handler = grpc.method_handlers_generic_handler("benchmark", methods)
        self._server.add_generic_rpc_handlers((handler,))
        port: int = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return port

    async def _unary(self, data: bytes, context: Any) -> bytes:
        return await asyncio.get_running_loop().run_in_executor(self._thread, answer_encoded, data)

    async def _stream(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for data in requests:
            yield await self._unary(data, context)


def verify_request(num_sequences: int, gamma: int, with_law: bool) -> VerifyRequest:
    items = []
    for idx in range(num_sequences):
        sequence_id = SequenceId(f"chatcmpl-{idx:032d}-0")
        draft = Draft(
            sequence_id=sequence_id,
            epoch=0,
            token_ids=tuple(range(gamma)),
            support_ids=np.zeros((gamma, 64), np.int32) if with_law else None,
            support_probs=np.zeros((gamma, 64), np.float32) if with_law else None,
        )
        feed = Feed(sequence_id=sequence_id, epoch=0, serial=1, keep=100, token_ids=(1, *draft.token_ids))
        items.append(VerifyItem(feed=feed, num_rows=gamma + 1, draft=draft))
    return VerifyRequest(owner="benchmark", items=tuple(items))


REQUESTS = {
    "1 greedy": verify_request(1, 2, False),
    "32 greedy": verify_request(32, 2, False),
    "32 with laws": verify_request(32, 2, True),
}


class Caller:
    """Runs inside a replica, as the coordinator does."""

    def __init__(self, callee: Any) -> None:
        self._callee = callee

    async def measure(self) -> dict[str, dict[str, float]]:
        ways = await self._ways()
        figures: dict[str, dict[str, float]] = {}
        for _ in range(2):  # the first pass warms up
            for name, request in REQUESTS.items():
                figures[name] = {
                    way: await p50_ms(lambda c=call, r=request: c(r)) for way, call in ways.items()
                }
        return figures

    async def _ways(self) -> dict[str, Callable[[VerifyRequest], Awaitable[Any]]]:
        valued = by_value(self._callee)
        channel = Channel(await self._callee.endpoint.remote(), "callee")
        connection = grpc.aio.insecure_channel(f"127.0.0.1:{await self._callee.grpc_port.remote()}")
        unary, stream = (
            connection.unary_unary("/benchmark/Unary"),
            connection.stream_stream("/benchmark/Stream")(),
        )

        async def by_stream(request: VerifyRequest) -> VerifyReply:
            await stream.write(encode(request))
            return Decoder(VerifyReply)(await stream.read())

        async def by_unary(request: VerifyRequest) -> VerifyReply:
            return Decoder(VerifyReply)(await unary(encode(request), timeout=10))

        return {
            "serve handle, ms": self._callee.verify.remote,
            "serve handle by value, ms": valued.verify.remote,
            "grpc unary, ms": by_unary,
            "grpc stream, ms": by_stream,
            "specdec.transport, ms": lambda request: channel.call(VERIFY, request, timeout_s=10),
        }


async def p50_ms(call: Callable[[], Awaitable[Any]]) -> float:
    times = []
    for _ in range(REPEATS):
        started_s = time.perf_counter()
        await call()
        times.append((time.perf_counter() - started_s) * 1e3)
    return round(statistics.median(times), 2)


def codec_us(request: VerifyRequest) -> dict[str, float]:
    """Writing and reading one message."""
    decode = Decoder(VerifyRequest)

    def us(call: Callable[[], object]) -> float:
        started_s = time.perf_counter()
        for _ in range(REPEATS):
            call()
        return round((time.perf_counter() - started_s) / REPEATS * 1e6, 1)

    pickled, encoded = pickle.dumps(request), encode(request)
    return {
        "pickle, us": us(lambda: pickle.loads(pickle.dumps(request))),
        "msgspec, us": us(lambda: decode(encode(request))),
        "pickle, bytes": len(pickled),
        "msgspec, bytes": len(encoded),
    }


def main() -> None:
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    callee = serve.deployment(Callee, name="Callee", **OPTIONS).bind()
    handle = serve.run(serve.deployment(Caller, name="Caller", **OPTIONS).bind(callee), route_prefix=None)
    figures: dict[str, Any] = {"calls": asyncio.run(_ask(handle))}
    figures["codecs"] = {name: codec_us(request) for name, request in REQUESTS.items()}
    print(figures)
    save("transport", figures)
    ray.shutdown()


async def _ask(handle: Any) -> dict[str, dict[str, float]]:
    figures: dict[str, dict[str, float]] = await handle.measure.remote()
    return figures


if __name__ == "__main__":
    # Importable by replicas: classes of a program's main module would be pickled with all they name.
    from benchmarks.transport import main as importable_main

    importable_main()
