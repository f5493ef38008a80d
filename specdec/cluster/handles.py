"""Workers and coordinators in Serve replicas: who runs is Serve's to say, calls go straight to them."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, cast

import grpc
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from specdec.cluster.registry import ReplicaGone, known_replicas
from specdec.config import AppConfig, ModelConfig
from specdec.coordinator.handles import Fleet
from specdec.errors import (
    CoordinatorLost,
    DraftUnavailable,
    SpecDecError,
    TargetFailed,
    TargetUnavailable,
    WorkerError,
)
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
from specdec.transport import CallTimeout, Channel, ChannelLost, Method
from specdec.transport.methods import CANCEL, PROPOSE, RELEASE, SUBMIT, UPDATES, VERIFY
from specdec.types import GenerationRequest, SequenceId

logger = logging.getLogger(__name__)

CONTROL_TIMEOUT_S = 2.0
"""Heartbeats and releases: answered without the model, so this is generous."""
POLL_PATIENCE_S = 0.5
"""What a poll waits for answers that it asked for; one that comes later counts in the next poll."""
TRANSPORT_ERRORS = (RayError, RayServeException, grpc.RpcError)
"""What a call through Serve that could not be made or answered raises."""


def by_value(handle: DeploymentHandle[Any]) -> DeploymentHandle[Any]:
    """The same handle with arguments and results inside the call, not in Ray's object store.

    Serve then calls over its gRPC connection between replicas: half the CPU of a Ray task per call, and less
    than half per streamed item (docs/decisions/0010). Our messages are plain values of importable classes, so
    the C pickler does; cloudpickle asks Python about each object.
    """
    return handle.options(
        _by_reference=False, request_serialization="pickle", response_serialization="pickle"
    )


class PinnedReplica:
    """One replica of a deployment: control calls through the deployment's handle, the rest on a channel."""

    def __init__(self, handle: DeploymentHandle[Any], replica_id: str) -> None:
        self._handle = by_value(handle).options(session_id=replica_id)
        self.replica_id = replica_id
        self._channel: Channel | None = None
        self._connecting = asyncio.Lock()
        self._is_closed = False

    async def call(self, method: str, *args: object) -> Any:
        """Call a control method on the replica: one that answers without doing any work.

        Raises:
            WorkerError: it is gone, failed, or did not answer within `CONTROL_TIMEOUT_S`.
        """
        if self.replica_id not in known_replicas(self._handle.app_name, self._handle.deployment_name):
            raise ReplicaGone(f"{self._name} does not run any more")
        task = asyncio.ensure_future(_answer(self._handle, method, *args))
        try:
            await asyncio.wait({task}, timeout=CONTROL_TIMEOUT_S)
            if not task.done():
                raise WorkerError(f"{self._name}: no answer to {method} in {CONTROL_TIMEOUT_S:g} s")
            if task.cancelled():
                # A replica that is shut down answers with the cancellation of its method: it is not ours.
                raise WorkerError(f"{self._name}: {method} was cancelled there")
            return task.result()
        except WorkerError:
            raise
        except Exception as error:
            # By value, what a method raises arrives as it is; its traceback is in the replica's log.
            raise WorkerError(f"{self._name}: {method} failed: {_last_line(error)}") from error
        finally:
            task.cancel()

    async def channel(self) -> Channel:
        """The connection to the replica's own port; it is asked once where that is.

        Raises:
            WorkerError: the replica does not say.
        """
        async with self._connecting:
            if self._channel is None:
                self._channel = Channel(await self.call("endpoint"), self._name)
                if self._is_closed:
                    self._channel.close()
            return self._channel

    def close(self) -> None:
        """It does not run any more, or not for long: nobody waits for its answers."""
        self._is_closed = True
        if self._channel is not None:
            self._channel.close()

    @property
    def _name(self) -> str:
        return f"{self._handle.deployment_name} replica {self.replica_id}"


def _detached_call(handle: DeploymentHandle[Any], method: str, *args: object) -> Any:
    """Call outside the context of whatever request is being served here.

    Serve gives all calls made within one request the same internal id and tells them apart by nothing else:
    of two at a time to one deployment, with a router that is not first-in-first-out, one is never routed.
    Rounds serve many requests and belong to none, so they do not want to be cancelled with one either.
    """
    return contextvars.Context().run(getattr(handle, method).remote, *args)


async def _answer(handle: DeploymentHandle[Any], method: str, *args: object) -> Any:
    response = _detached_call(handle, method, *args)
    try:
        return await response
    except asyncio.CancelledError:
        response.cancel()
        raise


def _last_line(error: BaseException) -> str:
    text = str(error.details()) if isinstance(error, grpc.RpcError) else str(error)
    lines = text.strip().splitlines()
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"


class _ServeWorkerHandle:
    def __init__(self, channel: Channel, status: WorkerStatus) -> None:
        self._channel = channel
        self._status = status

    @property
    def status(self) -> WorkerStatus:
        return self._status

    async def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        """Ask once; a release that is lost is made good by the next heartbeats."""
        try:
            await self._channel.call(RELEASE, sequence_ids, timeout_s=CONTROL_TIMEOUT_S)
        except SpecDecError as error:
            logger.info("release not confirmed: %s", error)


class ServeDraftHandle(_ServeWorkerHandle):
    """See `specdec.coordinator.handles.DraftHandle`."""

    async def propose(self, request: ProposeRequest, timeout_s: float) -> ProposeReply:
        try:
            return await self._channel.call(PROPOSE, request, timeout_s=timeout_s)
        except SpecDecError as error:
            raise DraftUnavailable(error.message) from error


class ServeTargetHandle(_ServeWorkerHandle):
    """See `specdec.coordinator.handles.TargetHandle`."""

    async def verify(self, request: VerifyRequest, timeout_s: float) -> VerifyReply:
        try:
            return await self._channel.call(VERIFY, request, timeout_s=timeout_s)
        except (ChannelLost, CallTimeout) as error:
            raise TargetUnavailable(error.message) from error
        except SpecDecError as error:
            raise TargetFailed(error.message) from error


class ReplicaSet:
    """The replicas of one deployment, as Serve's controller last told this process."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._replicas: dict[str, PinnedReplica] = {}
        self._asked: dict[str, asyncio.Task[tuple[Channel, Any]]] = {}
        """Calls whose answer no poll has taken yet."""
        self._search: asyncio.Task[None] | None = None

    def current(self) -> tuple[PinnedReplica, ...]:
        """Running replicas; one object per replica life. Those that left the list are closed."""
        ids = known_replicas(self._handle.app_name, self._handle.deployment_name)
        for replica_id in self._replicas.keys() - set(ids):
            self._replicas[replica_id].close()
        self._replicas = {
            replica_id: self._replicas.get(replica_id) or PinnedReplica(self._handle, replica_id)
            for replica_id in ids
        }
        return tuple(self._replicas.values())

    async def ask_all(self, method: str, *args: object) -> list[tuple[Channel, Any]]:
        """Call every replica at once; those that do not answer in time are left out.

        One that still owes an earlier answer is neither called again nor waited for: a replica that hangs
        does not delay what is known of the others.
        """
        replicas = {replica.replica_id: replica for replica in await self.discover(method, *args)}
        for replica_id in self._asked.keys() - replicas.keys():
            self._asked.pop(replica_id).cancel()
        loop = asyncio.get_running_loop()
        begun = {
            replica_id: loop.create_task(_ask(replica, method, *args))
            for replica_id, replica in replicas.items()
            if replica_id not in self._asked
        }
        self._asked |= begun
        if begun:
            await asyncio.wait(begun.values(), timeout=POLL_PATIENCE_S)
        ended = [replica_id for replica_id, task in self._asked.items() if task.done()]
        tasks = [self._asked.pop(replica_id) for replica_id in ended]
        return [task.result() for task in tasks if not task.cancelled() and task.exception() is None]

    async def discover(self, method: str, *args: object) -> tuple[PinnedReplica, ...]:
        """Running replicas; while none is known, ``method`` is called on any.

        Serve starts a handle's router at its first call, and only then do we learn of replicas.
        """
        if not self.current() and (self._search is None or self._search.done()):
            self._search = asyncio.get_running_loop().create_task(self._call_any(method, *args))
            await asyncio.wait({self._search}, timeout=POLL_PATIENCE_S)
        return self.current()

    async def _call_any(self, method: str, *args: object) -> None:
        try:
            async with asyncio.timeout(CONTROL_TIMEOUT_S):
                await _detached_call(self._handle, method, *args)
        except (TimeoutError, *TRANSPORT_ERRORS) as error:
            logger.debug("no %s replica yet: %s", self._handle.deployment_name, _last_line(error))


async def _ask(replica: PinnedReplica, method: str, *args: object) -> tuple[Channel, Any]:
    answer = await replica.call(method, *args)
    return await replica.channel(), answer


class ServeDirectory:
    """See `specdec.coordinator.handles.WorkerDirectory`.

    Args:
        config: whose models the workers must hold. While an application is redeployed with others, workers of
            the new kind are passed over.
        target: of the application.
        draft: likewise; None serves the target alone.
    """

    def __init__(
        self, config: AppConfig, target: DeploymentHandle[Any], draft: DeploymentHandle[Any] | None
    ) -> None:
        self._config = config
        self._targets = ReplicaSet(target)
        self._drafts = ReplicaSet(draft) if draft is not None else None

    async def poll(self, heartbeat: Heartbeat) -> Fleet:
        targets, drafts = await asyncio.gather(
            _workers(self._targets, heartbeat, self._config.target),
            _workers(self._drafts, heartbeat, self._config.draft),
        )
        return Fleet(
            targets=tuple(ServeTargetHandle(channel, status) for channel, status in targets),
            drafts=tuple(ServeDraftHandle(channel, status) for channel, status in drafts),
        )


async def _workers(
    replicas: ReplicaSet | None, heartbeat: Heartbeat, model: ModelConfig | None
) -> list[tuple[Channel, WorkerStatus]]:
    """Those that answer and hold this model."""
    if replicas is None or model is None:
        return []
    answers = await replicas.ask_all("heartbeat", heartbeat)
    return [(channel, status) for channel, status in answers if status.model == model.model]


class ServeCoordinatorPort:
    """See `specdec.coordinator.client.CoordinatorPort`."""

    def __init__(self, replica: PinnedReplica) -> None:
        self._replica = replica

    async def submit(self, gateway_id: str, request: GenerationRequest) -> None:
        """See `Coordinator.submit`.

        Raises:
            CoordinatorLost: the coordinator did not answer.
        """
        await self._call(SUBMIT, gateway_id, request)

    async def cancel(self, sequence_ids: Sequence[SequenceId]) -> None:
        await self._call(CANCEL, sequence_ids)

    async def poll(self, gateway_id: str) -> CoordinatorStatus:
        return cast("CoordinatorStatus", await self._replica.call("poll", gateway_id))

    async def updates(self, gateway_id: str) -> AsyncGenerator[RoundUpdate, None]:
        channel = await self._replica.channel()
        async with aclosing(channel.stream(UPDATES, gateway_id)) as updates:
            async for update in updates:
                yield update

    async def _call(self, method: Method[None], *args: object) -> None:
        try:
            channel = await self._replica.channel()
            await channel.call(method, *args, timeout_s=CONTROL_TIMEOUT_S)
        except WorkerError as error:
            raise CoordinatorLost(f"the coordinator is not available: {error}") from error
