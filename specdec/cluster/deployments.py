"""Replica classes of the workers and the coordinator: thin shells around plain classes.

`specdec.cluster.app` makes Serve deployments of them.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from specdec.cluster.handles import ServeDirectory
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


def _identity() -> tuple[str, str]:
    """This replica's unique id and its node's id."""
    replica_id = serve.get_replica_context().replica_id.unique_id
    return replica_id, ray.get_runtime_context().get_node_id()


class DraftWorkerReplica:
    """Draft model and its KV cache."""

    def __init__(self, config: AppConfig) -> None:
        from specdec.engine.drafting import DraftEngine
        from specdec.engine.loading import load_runner
        from specdec.engine.worker import DraftWorker
        from specdec.models import check_pair

        assert config.draft is not None
        pair = check_pair(config.target.model, config.draft.model)
        runner = load_runner(config.draft, vocab_size=pair.vocab_size, max_context=pair.draft_context)
        engine = DraftEngine(runner, config.speculation.draft_support)
        worker_id, node_id = _identity()
        self._worker = DraftWorker(engine, worker_id=worker_id, model=config.draft.model, node_id=node_id)

    async def propose(self, request: ProposeRequest) -> ProposeReply:
        return await self._worker.propose(request)

    async def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        await self._worker.release(sequence_ids)

    async def heartbeat(self, heartbeat: Heartbeat) -> WorkerStatus:
        return await self._worker.heartbeat(heartbeat)


class TargetWorkerReplica:
    """Target model and its KV cache."""

    def __init__(self, config: AppConfig) -> None:
        from specdec.engine.loading import load_runner
        from specdec.engine.verifying import TargetEngine
        from specdec.engine.worker import TargetWorker
        from specdec.models import model_info

        info = model_info(config.target.model)
        runner = load_runner(config.target, vocab_size=info.vocab_size, max_context=info.max_context)
        engine = TargetEngine(runner)
        worker_id, node_id = _identity()
        self._worker = TargetWorker(engine, worker_id=worker_id, model=config.target.model, node_id=node_id)

    async def verify(self, request: VerifyRequest) -> VerifyReply:
        return await self._worker.verify(request)

    async def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        await self._worker.release(sequence_ids)

    async def heartbeat(self, heartbeat: Heartbeat) -> WorkerStatus:
        return await self._worker.heartbeat(heartbeat)


class CoordinatorReplica:
    """Sequences, lanes, rounds."""

    def __init__(
        self, config: AppConfig, target: DeploymentHandle[Any], draft: DeploymentHandle[Any] | None
    ) -> None:
        coordinator_id, _ = _identity()
        self._coordinator = Coordinator(config, ServeDirectory(target, draft), coordinator_id)

    async def check_health(self) -> None:
        """Serve calls this once before the replica takes requests: the place to start what needs its loop."""
        if not self._coordinator.is_started:
            await self._coordinator.start()

    async def poll(self, gateway_id: str) -> CoordinatorStatus:
        return await self._coordinator.poll(gateway_id)

    async def submit(self, gateway_id: str, request: GenerationRequest) -> None:
        await self._coordinator.submit(gateway_id, request)

    async def cancel(self, sequence_ids: Sequence[SequenceId]) -> None:
        await self._coordinator.cancel(sequence_ids)

    async def updates(self, gateway_id: str) -> AsyncGenerator[RoundUpdate, None]:
        async for update in self._coordinator.updates(gateway_id):
            yield update
