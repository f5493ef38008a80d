"""A gateway over a scripted backend, HTTP and gRPC, on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from specdec.gateway.grpc_server import start_grpc_server
from specdec.gateway.http import build_http_app
from specdec.gateway.models import ServedModels
from tests.fakes import ScriptedBackend, only, serving, token_ids_of, toy_service

START_S = 20.0


@dataclass(frozen=True)
class Gateway:
    url: str
    grpc_address: str


@contextmanager
def gateway_in_thread() -> Iterator[Gateway]:
    """Serve until the block is left. Answers are short and made at once: the edges are what is tried."""
    started = threading.Event()
    gateways: list[Gateway] = []
    stops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def main() -> None:
        service = toy_service(ScriptedBackend(token_ids_of("red green blue")), request_timeout_s=20)
        server = await start_grpc_server(ServedModels(service), service.config.gateway, service.is_ready)
        stop = asyncio.Event()
        stops.append((asyncio.get_running_loop(), stop))
        try:
            async with serving(build_http_app(only(service))) as url:
                gateways.append(Gateway(url=url, grpc_address=f"127.0.0.1:{server.port}"))
                started.set()
                await stop.wait()
        finally:
            await server.stop()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert started.wait(START_S), "the gateway did not start"
    try:
        yield gateways[0]
    finally:
        loop, stop = stops[0]
        loop.call_soon_threadsafe(stop.set)
        thread.join(START_S)
