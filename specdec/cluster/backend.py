"""The gateway's backend over Ray Serve: pick a coordinator, keep one stream to each."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from ray.serve.handle import DeploymentHandle

from specdec.cluster.handles import ReplicaSet, ServeCoordinatorPort
from specdec.config import CoordinatorConfig
from specdec.coordinator.client import CoordinatorClient
from specdec.errors import CoordinatorLost, GenerationFailed, ServiceUnavailable
from specdec.messages import CoordinatorStatus
from specdec.types import GenerationRequest, SequenceId, TokenChunk

logger = logging.getLogger(__name__)


class ServeBackend:
    """See `specdec.gateway.backend.Backend`."""

    def __init__(self, coordinators: DeploymentHandle[Any], config: CoordinatorConfig) -> None:
        self._replicas = ReplicaSet(coordinators)
        self._config = config
        self._gateway_id = f"gateway-{uuid.uuid4().hex[:12]}"
        self._clients: dict[str, CoordinatorClient] = {}
        self._follower: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look for coordinators; needs a running event loop."""
        self._follower = asyncio.get_running_loop().create_task(self._follow_forever())

    async def close(self) -> None:
        """Look for coordinators no longer, and leave those that were found."""
        if self._follower is not None:
            self._follower.cancel()
            await asyncio.gather(self._follower, return_exceptions=True)
        for client in self._clients.values():
            await client.close()

    def is_ready(self) -> bool:
        return any(status.is_ready for status in self.statuses())

    def statuses(self) -> tuple[CoordinatorStatus, ...]:
        return tuple(client.status for client in self._clients.values() if client.status is not None)

    async def generate(
        self, request: GenerationRequest, not_before: Callable[[], float]
    ) -> AsyncGenerator[tuple[TokenChunk, ...], None]:
        """See `Backend.generate`.

        When a coordinator is lost, generation goes on at another one behind the tokens already committed.
        """
        output_ids = list(request.output_ids)
        for move in range(self._config.max_moves + 1):
            client = await self._choose()
            # A new id: workers may still hold the sequence for the lost coordinator.
            sequence_id = SequenceId(f"{request.sequence_id}.{move}") if move else request.sequence_id
            part = replace(request, sequence_id=sequence_id, output_ids=tuple(output_ids), is_moved=move > 0)
            try:
                async with aclosing(client.batches(part, not_before)) as batches:
                    async for batch in batches:
                        for chunk in batch:
                            output_ids.extend(chunk.token_ids)
                        yield batch
                return
            except CoordinatorLost as error:
                logger.warning("%s: %s", sequence_id, error)
        raise GenerationFailed("the coordinator was lost too often; please retry")

    async def _choose(self) -> CoordinatorClient:
        """The coordinator that answers and has the fewest of our requests, once there is one.

        Raises:
            ServiceUnavailable: there is none within ``idle_wait_s``.
        """
        deadline_s = time.monotonic() + self._config.idle_wait_s
        while time.monotonic() < deadline_s:
            clients = [client for client in self._clients.values() if client.is_available]
            if clients:
                return min(clients, key=lambda client: client.num_requests)
            await asyncio.sleep(0.1)
        raise ServiceUnavailable("no coordinator is available; please retry")

    async def _follow_forever(self) -> None:
        while True:
            try:
                await self._follow_replicas()
            except Exception:
                logger.exception("looking for coordinators failed; trying again")
            await asyncio.sleep(self._config.poll_interval_s)

    async def _follow_replicas(self) -> None:
        """One client per running coordinator; a lost stream means a new client."""
        replicas = {r.replica_id: r for r in await self._replicas.discover("poll", self._gateway_id)}
        for replica_id, client in list(self._clients.items()):
            # One that is drained cannot be called any more: its requests move, like those of a dead one.
            if replica_id not in replicas or not client.is_connected:
                del self._clients[replica_id]
                await client.close()
        for replica_id in replicas.keys() - self._clients.keys():
            port = ServeCoordinatorPort(replicas[replica_id])
            self._clients[replica_id] = CoordinatorClient(
                port, self._gateway_id, self._config.poll_interval_s
            )
