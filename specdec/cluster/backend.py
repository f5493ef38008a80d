"""The gateway's backend over Ray Serve: pick a coordinator, keep one stream to each."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from ray.serve.handle import DeploymentHandle

from specdec.cluster.handles import ReplicaSet, ServeCoordinatorPort
from specdec.coordinator.client import CoordinatorClient
from specdec.errors import ServiceUnavailable
from specdec.messages import CoordinatorStatus
from specdec.types import GenerationRequest, TokenChunk

logger = logging.getLogger(__name__)


class ServeBackend:
    """See `specdec.gateway.backend.Backend`."""

    def __init__(self, coordinators: DeploymentHandle[Any], poll_interval_s: float) -> None:
        self._replicas = ReplicaSet(coordinators)
        self._poll_interval_s = poll_interval_s
        self._gateway_id = f"gateway-{uuid.uuid4().hex[:12]}"
        self._clients: dict[str, CoordinatorClient] = {}
        self._follower: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look for coordinators; needs a running event loop."""
        self._follower = asyncio.get_running_loop().create_task(self._follow_forever())

    def is_ready(self) -> bool:
        return any(status.is_ready for status in self.statuses())

    def statuses(self) -> tuple[CoordinatorStatus, ...]:
        return tuple(client.status for client in self._clients.values() if client.status is not None)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        """See `Backend.generate`."""
        async with aclosing(self._choose().generate(request)) as chunks:
            async for chunk in chunks:
                yield chunk

    def _choose(self) -> CoordinatorClient:
        """The connected coordinator with the fewest of our requests."""
        clients = [client for client in self._clients.values() if client.is_connected]
        if not clients:
            raise ServiceUnavailable("no coordinator is ready yet; please retry")
        return min(clients, key=lambda client: client.num_requests)

    async def _follow_forever(self) -> None:
        while True:
            try:
                await self._follow_replicas()
            except Exception:
                logger.exception("looking for coordinators failed; trying again")
            await asyncio.sleep(self._poll_interval_s)

    async def _follow_replicas(self) -> None:
        """One client per running coordinator; a lost stream means a new client."""
        replicas = {r.replica_id: r for r in await self._replicas.discover("poll", self._gateway_id)}
        for replica_id, client in list(self._clients.items()):
            if replica_id not in replicas or not client.is_connected:
                del self._clients[replica_id]
                await client.close()
        for replica_id in replicas.keys() - self._clients.keys():
            port = ServeCoordinatorPort(replicas[replica_id])
            self._clients[replica_id] = CoordinatorClient(port, self._gateway_id, self._poll_interval_s)
