"""The standard gRPC health service, told live whether requests would be served."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

import grpc
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc as pb_grpc

WATCH_POLL_S = 0.25
"""A watching client learns of a change this much later at most."""


class HealthServicer(pb_grpc.HealthServicer):
    """``grpc.health.v1.Health`` for the services named; all of them are as ready as ``is_ready`` says.

    The library's own servicer stores statuses that somebody must keep up to date; asking is simpler and never
    stale.
    """

    def __init__(self, services: Collection[str], is_ready: Callable[[], bool]) -> None:
        self._services = services
        self._is_ready = is_ready
        self._is_closed = False

    def close(self) -> None:
        """Say NOT_SERVING from now on: the server is going away."""
        self._is_closed = True

    async def Check(
        self,
        request: pb.HealthCheckRequest,
        context: grpc.aio.ServicerContext[pb.HealthCheckRequest, pb.HealthCheckResponse],
    ) -> pb.HealthCheckResponse:
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return pb.HealthCheckResponse(status=self._status(request.service))

    async def List(
        self,
        request: pb.HealthListRequest,
        context: grpc.aio.ServicerContext[pb.HealthListRequest, pb.HealthListResponse],
    ) -> pb.HealthListResponse:
        statuses = {name: pb.HealthCheckResponse(status=self._status(name)) for name in self._services}
        return pb.HealthListResponse(statuses=statuses)

    async def Watch(
        self,
        request: pb.HealthCheckRequest,
        context: grpc.aio.ServicerContext[pb.HealthCheckRequest, pb.HealthCheckResponse],
    ) -> None:
        last = None
        while True:
            status = self._status(request.service)
            if status != last:
                await context.write(pb.HealthCheckResponse(status=status))
                last = status
            await asyncio.sleep(WATCH_POLL_S)

    def _status(self, service: str) -> pb.HealthCheckResponse.ServingStatus:
        if service not in self._services:
            return pb.HealthCheckResponse.SERVICE_UNKNOWN
        if self._is_ready() and not self._is_closed:
            return pb.HealthCheckResponse.SERVING
        return pb.HealthCheckResponse.NOT_SERVING
