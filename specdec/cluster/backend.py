"""The gateway's backend over Ray Serve: pick a coordinator, keep one stream to each."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any

from ray.serve.handle import DeploymentHandle

from specdec.cluster.handles import ReplicaSet, ServeCoordinatorPort, coordinator_statuses
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
        self._statuses: dict[str, CoordinatorStatus] = {}
        self._poller: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look for coordinators; needs a running event loop."""
        self._poller = asyncio.get_running_loop().create_task(self._poll_forever())

    async def close(self) -> None:
        if self._poller:
            self._poller.cancel()
            with suppress(asyncio.CancelledError):
                await self._poller
        await asyncio.gather(*(client.close() for client in self._clients.values()))

    def is_ready(self) -> bool:
        return any(status.is_ready for status in self._statuses.values())

    def statuses(self) -> tuple[CoordinatorStatus, ...]:
        return tuple(self._statuses.values())

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

    async def _poll_forever(self) -> None:
        while True:
            try:
                await self._poll_once()
            except Exception:
                logger.exception("coordinator poll failed; trying again")
            await asyncio.sleep(self._poll_interval_s)

    async def _poll_once(self) -> None:
        answers = await coordinator_statuses(self._replicas)
        self._statuses = {replica_id: status for replica_id, (_, status) in answers.items()}
        for replica_id, (replica, _) in answers.items():
            client = self._clients.get(replica_id)
            if client is None or not client.is_connected:
                self._clients[replica_id] = CoordinatorClient(ServeCoordinatorPort(replica), self._gateway_id)
        alive = {replica.replica_id for replica in self._replicas.current()}
        for replica_id in [known for known in self._clients if known not in alive]:
            await self._clients.pop(replica_id).close()
