"""Draft, target and coordinator in one process: for `specdec generate`, for tests and for laboratories.

The same coordinator code as in a cluster; only the handles differ.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from specdec.config import AppConfig
from specdec.coordinator.client import CoordinatorClient
from specdec.coordinator.coordinator import Coordinator
from specdec.coordinator.handles import Fleet
from specdec.engine.drafting import DraftEngine
from specdec.engine.grammar import Grammars
from specdec.engine.runner import Runner
from specdec.engine.verifying import TargetEngine
from specdec.engine.worker import DraftWorker, ModelThread, TargetWorker
from specdec.errors import DraftUnavailable, TargetFailed, TargetUnavailable, WorkerError
from specdec.messages import Heartbeat, ProposeReply, ProposeRequest, VerifyReply, VerifyRequest, WorkerStatus
from specdec.types import SequenceId

Reply = TypeVar("Reply")


async def _within(
    call: Awaitable[Reply], timeout_s: float, late: type[WorkerError], failed: type[WorkerError]
) -> Reply:
    try:
        # Not wait_for: before Python 3.12 it loses a cancellation that comes together with the answer.
        async with asyncio.timeout(timeout_s):
            return await call
    except TimeoutError:
        raise late(f"no answer within {timeout_s:g} s") from None
    except Exception as error:
        raise failed(f"{type(error).__name__}: {error}") from error


class LocalDraftHandle:
    """See `DraftHandle`."""

    def __init__(self, worker: DraftWorker) -> None:
        self._worker = worker

    @property
    def status(self) -> WorkerStatus:
        return self._worker.status()

    async def propose(self, request: ProposeRequest, timeout_s: float) -> ProposeReply:
        return await _within(self._worker.propose(request), timeout_s, DraftUnavailable, DraftUnavailable)

    async def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        await self._worker.release(sequence_ids)


class LocalTargetHandle:
    """See `TargetHandle`."""

    def __init__(self, worker: TargetWorker) -> None:
        self._worker = worker

    @property
    def status(self) -> WorkerStatus:
        return self._worker.status()

    async def verify(self, request: VerifyRequest, timeout_s: float) -> VerifyReply:
        return await _within(self._worker.verify(request), timeout_s, TargetUnavailable, TargetFailed)

    async def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        await self._worker.release(sequence_ids)


class LocalDirectory:
    """A fixed set of workers in this process."""

    def __init__(self, targets: Sequence[TargetWorker], drafts: Sequence[DraftWorker]) -> None:
        self._targets = tuple(targets)
        self._drafts = tuple(drafts)

    async def poll(self, heartbeat: Heartbeat) -> Fleet:
        for worker in (*self._targets, *self._drafts):
            await worker.heartbeat(heartbeat)
        return Fleet(
            targets=tuple(LocalTargetHandle(worker) for worker in self._targets),
            drafts=tuple(LocalDraftHandle(worker) for worker in self._drafts),
        )


class LocalSystem:
    """A running coordinator with its workers; made by `run_local`."""

    def __init__(
        self,
        coordinator: Coordinator,
        client: CoordinatorClient,
        target: TargetWorker,
        draft: DraftWorker | None,
    ) -> None:
        self.coordinator = coordinator
        self.client = client
        self.target = target
        self.draft = draft


@asynccontextmanager
async def run_local(
    config: AppConfig,
    target_runner: Runner,
    draft_runner: Runner | None,
    thread: ModelThread | None = None,
    grammars: Grammars | None = None,
) -> AsyncGenerator[LocalSystem, None]:
    """Run the whole system in this process until the context ends.

    Args:
        config: the configuration; its models are only names here.
        target_runner: the target model.
        draft_runner: the draft model, if any.
        thread: where both run; None gives each its own.
        grammars: of both workers, for sequences that have one.
    """
    devices = ("shared", "shared") if thread else ("target", "draft")
    target_engine = TargetEngine(target_runner, grammars)
    target = TargetWorker(
        target_engine, worker_id="target-0", model="target", device=devices[0], thread=thread
    )
    drafts: list[DraftWorker] = []
    if draft_runner is not None:
        engine = DraftEngine(draft_runner, config.speculation.draft_support, grammars=grammars)
        drafts.append(
            DraftWorker(engine, worker_id="draft-0", model="draft", device=devices[1], thread=thread)
        )
    coordinator = Coordinator(config, LocalDirectory([target], drafts), "coordinator-0")
    await coordinator.start()
    client = CoordinatorClient(coordinator, "gateway-0")
    try:
        yield LocalSystem(coordinator, client, target, drafts[0] if drafts else None)
    finally:
        await client.close()
        await coordinator.close()
        for worker in (target, *drafts):
            worker.close()
