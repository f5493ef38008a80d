"""The four Serve deployments: thin shells around plain classes that tests build directly."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from specdec.cluster.handles import ServeDirectory
from specdec.cluster.router import ROUTER_PATH
from specdec.config import AppConfig
from specdec.coordinator.coordinator import Coordinator
from specdec.messages import (
    CoordinatorStatus,
    Heartbeat,
    ProposeReply,
    ProposeRequest,
    RoundUpdate,
    VerifyReply,
    VerifyRequest,
    WorkerStatus,
)
from specdec.types import GenerationRequest, SequenceId

logger = logging.getLogger(__name__)

# Serve's default of 5 concurrent calls would starve streams and heartbeats; our own limits apply instead.
_PINNED: dict[str, Any] = {
    "max_ongoing_requests": 1000,
    "request_router_config": RequestRouterConfig(request_router_class=ROUTER_PATH),
}


def _identity() -> tuple[str, str]:
    """This replica's unique id and its node's id."""
    replica_id = serve.get_replica_context().replica_id.unique_id
    return replica_id, ray.get_runtime_context().get_node_id()


@serve.deployment(name="DraftWorker", **_PINNED)
class DraftWorkerDeployment:
    """Draft model and its KV cache."""

    def __init__(self, config: AppConfig) -> None:
        from specdec.engine.drafting import DraftEngine
        from specdec.engine.loading import load_runner
        from specdec.engine.worker import DraftWorker
        from specdec.models import check_pair

        assert config.draft is not None
        check_pair(config.target.model, config.draft.model)
        engine = DraftEngine(load_runner(config.draft), config.speculation.draft_support)
        worker_id, node_id = _identity()
        self._worker = DraftWorker(engine, worker_id=worker_id, model=config.draft.model, node_id=node_id)

    async def propose(self, request: ProposeRequest) -> ProposeReply:
        return await self._worker.propose(request)

    async def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        await self._worker.release(sequence_ids)

    async def heartbeat(self, heartbeat: Heartbeat) -> WorkerStatus:
        return await self._worker.heartbeat(heartbeat)


@serve.deployment(name="TargetWorker", **_PINNED)
class TargetWorkerDeployment:
    """Target model and its KV cache."""

    def __init__(self, config: AppConfig) -> None:
        from specdec.engine.loading import load_runner
        from specdec.engine.verifying import TargetEngine
        from specdec.engine.worker import TargetWorker

        engine = TargetEngine(load_runner(config.target))
        worker_id, node_id = _identity()
        self._worker = TargetWorker(engine, worker_id=worker_id, model=config.target.model, node_id=node_id)

    async def verify(self, request: VerifyRequest) -> VerifyReply:
        return await self._worker.verify(request)

    async def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        await self._worker.release(sequence_ids)

    async def heartbeat(self, heartbeat: Heartbeat) -> WorkerStatus:
        return await self._worker.heartbeat(heartbeat)


@serve.deployment(name="Coordinator", **_PINNED)
class CoordinatorDeployment:
    """Sequences, lanes, rounds."""

    def __init__(
        self, config: AppConfig, target: DeploymentHandle[Any], draft: DeploymentHandle[Any] | None
    ) -> None:
        coordinator_id, _ = _identity()
        self._coordinator = Coordinator(config, ServeDirectory(target, draft), coordinator_id)
        self._is_started = False

    async def status(self) -> CoordinatorStatus:
        """The state as of now; the first call, on the replica's own event loop, starts the work."""
        await self._start()
        return self._coordinator.status()

    async def submit(self, gateway_id: str, request: GenerationRequest) -> None:
        await self._start()
        await self._coordinator.submit(gateway_id, request)

    async def cancel(self, sequence_ids: Sequence[SequenceId]) -> None:
        await self._coordinator.cancel(sequence_ids)

    async def updates(self, gateway_id: str) -> AsyncGenerator[RoundUpdate, None]:
        await self._start()
        async for update in self._coordinator.updates(gateway_id):
            yield update

    async def _start(self) -> None:
        if not self._is_started:
            self._is_started = True
            await self._coordinator.start()
