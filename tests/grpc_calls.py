"""A gRPC server of a test's own, and what becomes of calls to it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from specdec.gateway.grpc_server import start_grpc_server
from specdec.gateway.models import ServedModels
from specdec.gateway.service import GenerationService


@asynccontextmanager
async def channel_to(service: GenerationService) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a server with this one service, which stops when the context ends."""
    server = await start_grpc_server(ServedModels(service), service.config.gateway, service.is_ready)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            yield channel
    finally:
        await server.stop()


async def end_of(call) -> None:
    """Await a unary call, or read a stream to its end."""
    if isinstance(call, grpc.aio.UnaryStreamCall):
        async for _ in call:
            pass
    else:
        await call


async def failure_of(call) -> grpc.aio.AioRpcError:
    """What a call fails with, which tells nothing of our insides."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await end_of(call)
    error = caught.value
    assert len(error.details()) < 4096
    assert "Traceback" not in error.details()
    return error
