"""A worker process without Ray: an engine behind one model thread, so the event loop stays responsive."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from specdec.engine.drafting import DraftEngine
from specdec.engine.threads import get_num_threads, set_num_threads
from specdec.engine.verifying import TargetEngine
from specdec.messages import Heartbeat, ProposeReply, ProposeRequest, VerifyReply, VerifyRequest, WorkerStatus
from specdec.types import SequenceId, WorkerId

logger = logging.getLogger(__name__)

Request = TypeVar("Request")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    kv_tokens_in_use: int
    num_sequences: int


class ModelThread(ThreadPoolExecutor):
    """The one thread that touches a model: no locks are needed, and calls run in the order they came.

    Load the model on it too. libgomp keeps a team of threads per calling thread, and once a process has more
    of them than cores its barriers no longer spin: SmolLM2's step then takes 31 ms instead of 21 ms (two
    cores, bfloat16). In one process, draft and target share a thread for the same reason.
    """

    def __init__(self) -> None:
        # The number of threads is a setting of each calling thread, too.
        super().__init__(1, "model", initializer=set_num_threads, initargs=(get_num_threads(),))

    def run(self, function: Callable[[], Result]) -> Result:
        """Call it there and wait."""
        return self.submit(function).result()


class _Worker:
    """What draft and target workers share: the model thread, release, heartbeat."""

    role: str

    def __init__(
        self,
        engine: DraftEngine | TargetEngine,
        *,
        worker_id: str,
        model: str,
        node_id: str = "local",
        device: str = "cpu",
        thread: ModelThread | None = None,
    ) -> None:
        self._engine = engine
        self._worker_id = WorkerId(worker_id)
        self._model = model
        self._node_id = node_id
        self._device = device
        self._num_calls = 0
        self._thread = thread or ModelThread()
        self._load = self._measure()
        self._started_s: float | None = None
        self.num_failures_in_a_row = 0
        """Model calls that raised since the last that did not; releases and heartbeats do not count."""

    async def _on_model_thread(self, function: Callable[..., Result], *args: object) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._run, function, *args)

    def _run(self, function: Callable[..., Result], *args: object) -> Result:
        self._started_s = time.monotonic()
        try:
            return function(*args)
        finally:
            self._started_s = None
            self._load = self._measure()

    async def _call_model(self, function: Callable[[Request], Result], request: Request) -> Result:
        self._num_calls += 1
        try:
            result = await self._on_model_thread(function, request)
        except Exception:
            self.num_failures_in_a_row += 1
            raise
        self.num_failures_in_a_row = 0
        return result

    def _measure(self) -> _Load:
        """Taken on the model thread, so that no one counts what is being changed."""
        return _Load(
            kv_tokens_in_use=self._engine.runner.kv_tokens_in_use, num_sequences=len(self._engine.sessions)
        )

    async def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        """Free the KV cache of sequences; behind whatever the model thread is doing."""
        await self._on_model_thread(self._engine.sessions.release, sequence_ids)

    async def heartbeat(self, heartbeat: Heartbeat) -> WorkerStatus:
        """Answer at once, even while the model is busy; free orphans when the model thread gets to it."""
        self._thread.submit(self._run, self._engine.sessions.reconcile, heartbeat)
        return self.status()

    def busy_s(self) -> float:
        """Seconds the model thread has been at its present piece of work; 0 when idle."""
        started_s = self._started_s
        return 0.0 if started_s is None else time.monotonic() - started_s

    def status(self) -> WorkerStatus:
        """As of the end of the model thread's last piece of work."""
        runner = self._engine.runner
        return WorkerStatus(
            worker_id=self._worker_id,
            role=self.role,
            pid=os.getpid(),
            node_id=self._node_id,
            model=self._model,
            device=self._device,
            vocab_size=runner.vocab_size,
            max_context=runner.max_context,
            kv_capacity_tokens=runner.kv_capacity_tokens,
            kv_tokens_in_use=self._load.kv_tokens_in_use,
            num_sequences=self._load.num_sequences,
            num_calls=self._num_calls,
        )

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


class DraftWorker(_Worker):
    role = "draft"
    _engine: DraftEngine
    _num_waiting = 0
    """Propose calls that have come and are not answered."""

    async def propose(self, request: ProposeRequest) -> ProposeReply:
        """See `DraftEngine.propose`. Afterwards the worker looks ahead, until the next call comes."""
        self._num_waiting += 1
        try:
            reply = await self._call_model(self._engine.propose, request)
        finally:
            self._num_waiting -= 1
        if any(item.fan_out for item in request.items):
            self._thread.submit(self._run, self._look_ahead)
        return reply

    def _look_ahead(self) -> None:
        try:
            self._engine.look_ahead(self._is_wanted)
        except Exception:
            logger.exception("looking ahead failed; drafts are made when they are asked for")

    def _is_wanted(self) -> bool:
        return self._num_waiting > 0


class TargetWorker(_Worker):
    role = "target"
    _engine: TargetEngine

    async def verify(self, request: VerifyRequest) -> VerifyReply:
        """See `TargetEngine.verify`."""
        return await self._call_model(self._engine.verify, request)
