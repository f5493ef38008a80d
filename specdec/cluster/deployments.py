"""Replica classes of the workers and the coordinator: thin shells around plain classes.

`specdec.cluster.app` makes Serve deployments of them.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypedDict

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from specdec.cluster.handles import ServeDirectory
from specdec.cluster.served import grammars_of, load_draft, load_target
from specdec.config import AppConfig, ModelConfig
from specdec.coordinator.coordinator import Coordinator
from specdec.errors import WorkerError
from specdec.messages import CoordinatorStatus, Endpoint, Heartbeat, WorkerStatus
from specdec.transport import CallServer, Method, Unary
from specdec.transport.methods import CANCEL, PROPOSE, RELEASE, SUBMIT, UPDATES, VERIFY

if TYPE_CHECKING:
    # The engine imports torch, which only worker processes should pay for.
    from specdec.engine.runner import Runner
    from specdec.engine.worker import DraftWorker, ModelThread, TargetWorker


logger = logging.getLogger(__name__)

MAX_FAILURES_IN_A_ROW = 10
"""A sequence that cannot be processed costs two; a broken device fails at everything."""
GC_THRESHOLDS = (20_000, 10, 10)
"""A round makes thousands of objects and drops them again, none of them in a cycle. With Python's 700 the
collector goes through the tokens of all sequences every few rounds: 1.5 ms a round of 256 of them."""
HANG_FACTOR = 2.0
"""A model call this many times longer than the target's deadline counts as hung."""


def set_up_process() -> tuple[str, str]:
    """Send our log to the replica's own file; returns the replica's unique id and its node's id."""
    gc.set_threshold(*GC_THRESHOLDS)
    serve_logger, our_logger = logging.getLogger("ray.serve"), logging.getLogger("specdec")
    our_logger.setLevel(logging.INFO)
    our_logger.handlers = list(serve_logger.handlers)
    our_logger.propagate = False
    return serve.get_replica_context().replica_id.unique_id, ray.get_runtime_context().get_node_id()


def prepare_threads(model: ModelConfig) -> None:
    """Tell libgomp how long a model's helper threads spin. It reads this once, when torch is first imported.

    By default they spin for milliseconds behind every step: on a machine that also serves, that is a core
    taken from whoever has to do with the step's result. Within a step they are needed again at once.
    """
    is_set = "GOMP_SPINCOUNT" in os.environ or "OMP_WAIT_POLICY" in os.environ
    if model.spin_count is None or is_set:
        return
    if "torch" in sys.modules:
        logger.warning("torch is loaded already: spin_count has no effect")
        return
    os.environ["GOMP_SPINCOUNT"] = str(model.spin_count)


def _on_assigned_device(model: ModelConfig) -> ModelConfig:
    """Resolve ``auto``: Ray leaves every GPU visible to an actor that it assigned none."""
    if model.device != "auto":
        return model
    gpu_ids = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    return model.model_copy(update={"device": "cuda:0" if gpu_ids else "cpu"})


def _device_name(config: AppConfig, model: ModelConfig, worker_id: str) -> str:
    """Equal for workers of a node that share a device; each sees the GPU that is its own as number 0."""
    if config.simulation is not None:
        return worker_id
    gpu_ids = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    return f"gpu {','.join(gpu_ids)}" if model.device.startswith("cuda") and gpu_ids else model.device


def _pin(model: ModelConfig, thread: ModelThread) -> None:
    """Bind a loaded model's threads to cores, if its configuration allows it."""
    from specdec.engine.threads import pin_threads

    if model.pin_threads and model.device == "cpu" and thread.run(pin_threads):
        logger.info("each of the model's threads has a core of its own")


class _Identity(TypedDict):
    """What a worker says of itself, and the thread its model lives on."""

    worker_id: str
    model: str
    node_id: str
    device: str
    thread: ModelThread


def _load(
    config: AppConfig, configured: ModelConfig, load: Callable[[AppConfig, ModelConfig], Runner]
) -> tuple[Runner, _Identity]:
    """Set a worker's process up and load its model. Before this, nothing may have imported torch."""
    worker_id, node_id = set_up_process()
    prepare_threads(configured)
    from specdec.engine.worker import ModelThread

    model, thread = _on_assigned_device(configured), ModelThread()
    runner = thread.run(lambda: load(config, model))
    _pin(model, thread)
    return runner, _Identity(
        worker_id=worker_id,
        model=model.model,
        node_id=node_id,
        device=_device_name(config, model, worker_id),
        thread=thread,
    )


class Door:
    """A replica's own port, opened when it is first asked for: before that there is no event loop."""

    def __init__(self, server: CallServer) -> None:
        self._server = server
        self._endpoint: Endpoint | None = None
        self._opening = asyncio.Lock()

    async def endpoint(self) -> Endpoint:
        """Where it is: at the address by which Ray knows this machine."""
        async with self._opening:
            if self._endpoint is None:
                gc.freeze()  # what is loaded by now stays
                self._endpoint = await self._server.start(ray.util.get_node_ip_address())
            return self._endpoint


class _WorkerReplica:
    """What draft and target replicas share."""

    _worker: DraftWorker | TargetWorker
    _hang_limit_s: float
    _door: Door

    async def endpoint(self) -> Endpoint:
        return await self._door.endpoint()

    async def heartbeat(self, heartbeat: Heartbeat) -> WorkerStatus:
        return await self._worker.heartbeat(heartbeat)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """For `specdec.cluster.autoscaling_policy`."""
        status = self._worker.status()
        return {
            "num_sequences": status.num_sequences,
            "kv_tokens_in_use": status.kv_tokens_in_use,
            "kv_capacity_tokens": status.kv_capacity_tokens,
        }

    async def check_health(self) -> None:
        """Let Serve replace a worker that answers, but whose model hangs or fails at everything.

        Raises:
            WorkerError: one call has taken longer than any deadline, or many in a row have failed.
        """
        busy_s = self._worker.busy_s()
        if busy_s > self._hang_limit_s:
            raise WorkerError(f"the model has been busy with one call for {busy_s:.0f} s")
        if self._worker.num_failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
            raise WorkerError(f"the last {self._worker.num_failures_in_a_row} calls failed in the model")


class DraftWorkerReplica(_WorkerReplica):
    """Draft model and its KV cache."""

    _worker: DraftWorker

    def __init__(self, config: AppConfig) -> None:
        assert config.draft is not None
        runner, identity = _load(config, config.draft, load_draft)
        from specdec.engine.drafting import DraftEngine
        from specdec.engine.worker import DraftWorker

        engine = DraftEngine(runner, config.speculation.draft_support, grammars=grammars_of(config))
        self._worker = DraftWorker(engine, **identity)
        self._hang_limit_s = HANG_FACTOR * config.coordinator.target_timeout_s
        self._door = Door(CallServer({PROPOSE: self._worker.propose, RELEASE: self._worker.release}))


class TargetWorkerReplica(_WorkerReplica):
    """Target model and its KV cache."""

    _worker: TargetWorker

    def __init__(self, config: AppConfig) -> None:
        runner, identity = _load(config, config.target, load_target)
        from specdec.engine.verifying import TargetEngine
        from specdec.engine.worker import TargetWorker

        engine = TargetEngine(runner, grammars_of(config))
        self._worker = TargetWorker(engine, **identity)
        self._hang_limit_s = HANG_FACTOR * config.coordinator.target_timeout_s
        self._door = Door(CallServer({VERIFY: self._worker.verify, RELEASE: self._worker.release}))


class CoordinatorReplica:
    """Sequences, lanes, rounds."""

    def __init__(
        self, config: AppConfig, target: DeploymentHandle[Any], draft: DeploymentHandle[Any] | None
    ) -> None:
        coordinator_id, _ = set_up_process()
        self._config = config
        directory = ServeDirectory(config, target, draft)
        coordinator = self._coordinator = Coordinator(config, directory, coordinator_id)
        unary: dict[Method[None], Unary] = {SUBMIT: coordinator.submit, CANCEL: coordinator.cancel}
        self._door = Door(CallServer(unary, {UPDATES: coordinator.updates}))

    async def check_health(self) -> None:
        """Serve calls this once before the replica takes requests: the place to start what needs its loop."""
        if not self._coordinator.is_started:
            await self._coordinator.start()

    async def endpoint(self) -> Endpoint:
        return await self._door.endpoint()

    async def app_config(self) -> AppConfig:
        """What a gateway of another application must know to serve this pair."""
        return self._config

    async def poll(self, gateway_id: str) -> CoordinatorStatus:
        return await self._coordinator.poll(gateway_id)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """For `specdec.cluster.autoscaling_policy`."""
        return self._coordinator.load()
