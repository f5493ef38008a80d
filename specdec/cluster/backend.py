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
from specdec.config import AppConfig
from specdec.coordinator.client import CoordinatorClient
from specdec.errors import CoordinatorLost, GenerationFailed, ServiceUnavailable
from specdec.messages import CoordinatorStatus
from specdec.types import GenerationRequest, SequenceId, TokenChunk

logger = logging.getLogger(__name__)


class ServeBackend:
    """See `specdec.gateway.backend.Backend`.

    Args:
        coordinators: of one application.
        config: of the pair that is served. While the application is redeployed with another target, its new
            coordinators are passed over: token ids mean another text to them.
    """

    def __init__(self, coordinators: DeploymentHandle[Any], config: AppConfig) -> None:
        self._replicas = ReplicaSet(coordinators)
        self._config = config.coordinator
        self._target_model = config.target.model
        self._num_running = 0
        self._idle = asyncio.Event()
        self._gone: str | None = None
        """Why no coordinator will come any more, if that is so."""
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

    async def retire(self, gone: str | None = None) -> None:
        """Return, closed, when the requests under way have ended; new ones go to another backend.

        Args:
            gone: why no coordinator will come any more: a request that loses its own then ends at once.
                None: it waits for another one as ever.
        """
        self._gone = gone
        if self._num_running:
            await self._idle.wait()  # each request has a deadline of its own
        await self.close()

    def is_ready(self) -> bool:
        return any(status.is_ready for status in self.statuses())

    def statuses(self) -> tuple[CoordinatorStatus, ...]:
        return tuple(
            client.status
            for client in self._clients.values()
            if client.status is not None and client.status.target_model == self._target_model
        )

    async def generate(
        self, request: GenerationRequest, not_before: Callable[[], float]
    ) -> AsyncGenerator[tuple[TokenChunk, ...], None]:
        """See `Backend.generate`.

        When a coordinator is lost, generation goes on at another one behind the tokens already committed.
        """
        output_ids = list(request.output_ids)
        self._num_running += 1
        self._idle.clear()
        try:
            for move in range(self._config.max_moves + 1):
                client = await self._choose()
                # A new id: workers may still hold the sequence for the lost coordinator.
                sequence_id = SequenceId(f"{request.sequence_id}.{move}") if move else request.sequence_id
                part = replace(
                    request, sequence_id=sequence_id, output_ids=tuple(output_ids), is_moved=move > 0
                )
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
        finally:
            self._num_running -= 1
            if not self._num_running:
                self._idle.set()

    async def _choose(self) -> CoordinatorClient:
        """The coordinator that answers and has the fewest of our requests, once there is one.

        Raises:
            ServiceUnavailable: there is none within ``idle_wait_s``, or none will come any more.
        """
        deadline_s = time.monotonic() + self._config.idle_wait_s
        while time.monotonic() < deadline_s:
            clients = [client for client in self._clients.values() if self._is_available(client)]
            if clients:
                return min(clients, key=lambda client: client.num_requests)
            if self._gone is not None:
                raise ServiceUnavailable(self._gone)
            await asyncio.sleep(0.1)
        raise ServiceUnavailable("no coordinator is available; please retry")

    def _is_available(self, client: CoordinatorClient) -> bool:
        status = client.status
        return client.is_available and status is not None and status.target_model == self._target_model

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
