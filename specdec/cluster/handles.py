"""Workers and coordinators behind Serve handles: pinned calls, deadlines, errors of our own tree."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any, cast

import grpc
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from specdec.cluster.registry import ReplicaGone, known_replicas
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
from specdec.types import GenerationRequest, SequenceId

logger = logging.getLogger(__name__)

CONTROL_TIMEOUT_S = 2.0
"""Heartbeats and releases: answered without the model, so this is generous."""
TRANSPORT_ERRORS = (RayError, RayServeException, grpc.RpcError)
"""What a call that could not be made or answered raises; gRPC's own for all but a replica out of reach."""
GONE_CHECK_S = 0.25
GONE_GRACE_S = 0.5
"""A replica that is shutting down may still answer a call it has; it is given this long."""


class CallFailed(WorkerError):
    """The replica lives, but a method raised something unforeseen."""


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
    """One replica of a deployment, reached through the deployment's handle."""

    def __init__(self, handle: DeploymentHandle[Any], replica_id: str) -> None:
        self._handle = by_value(handle).options(session_id=replica_id)
        self.replica_id = replica_id

    async def call(self, method: str, *args: object, timeout_s: float) -> Any:
        """Call a method on the replica.

        Raises:
            WorkerError: it is gone or did not answer in time.
            CallFailed: it lives, but the method raised something unforeseen.
            SpecDecError: what the method raised on purpose.
        """
        if not self._is_listed():
            raise ReplicaGone(f"{self._name} does not run any more")
        task = asyncio.ensure_future(_answer(self._handle, method, *args))
        try:
            await self._wait_for(task, method, timeout_s)
            if task.cancelled():
                # A replica that is shut down answers with the cancellation of its method: it is not ours.
                raise WorkerError(f"{self._name}: {method} was cancelled there")
            return task.result()
        except SpecDecError:
            raise
        except TRANSPORT_ERRORS as error:
            # UNKNOWN: it lives, but what the method raised cannot be pickled.
            is_answer = isinstance(error, grpc.RpcError) and error.code() is grpc.StatusCode.UNKNOWN
            kind = CallFailed if is_answer else WorkerError
            raise kind(f"{self._name}: {method} failed: {_last_line(error)}") from error
        except Exception as error:
            # By value, what a method raises arrives as it is; its traceback is in the replica's log.
            raise CallFailed(f"{self._name}: {method} failed: {_last_line(error)}") from error
        finally:
            task.cancel()

    async def stream(self, method: str, *args: object) -> AsyncGenerator[Any, None]:
        """Iterate over what a generator method yields; closing this cancels it on the replica."""
        response = _detached_call(self._handle.options(stream=True), method, *args)
        try:
            async for item in response:
                yield item
        finally:
            response.cancel()

    async def _wait_for(self, task: asyncio.Future[Any], method: str, timeout_s: float) -> None:
        """Until the answer, the deadline, or the news that the replica is gone.

        Serve lets a call to the last replica of a deployment wait for the next one when it dies in between.
        """
        deadline_s = time.monotonic() + timeout_s
        gone_at_s: float | None = None
        while not task.done():
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                raise WorkerError(f"{self._name}: no answer to {method} in {timeout_s:g} s")
            await asyncio.wait({task}, timeout=min(remaining_s, GONE_CHECK_S))
            if self._is_listed():
                gone_at_s = None
                continue
            gone_at_s = gone_at_s or time.monotonic()
            if time.monotonic() - gone_at_s > GONE_GRACE_S:
                raise ReplicaGone(f"{self._name} does not run any more")

    def _is_listed(self) -> bool:
        return self.replica_id in known_replicas(self._handle.app_name, self._handle.deployment_name)

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
    def __init__(self, replica: PinnedReplica, status: WorkerStatus) -> None:
        self._replica = replica
        self._status = status

    @property
    def status(self) -> WorkerStatus:
        return self._status

    async def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        """Ask once; a release that is lost is made good by the next heartbeats."""
        try:
            await self._replica.call("release", sequence_ids, timeout_s=CONTROL_TIMEOUT_S)
        except WorkerError as error:
            logger.info("release not confirmed: %s", error)


class ServeDraftHandle(_ServeWorkerHandle):
    """See `specdec.coordinator.handles.DraftHandle`."""

    async def propose(self, request: ProposeRequest, timeout_s: float) -> ProposeReply:
        try:
            return cast("ProposeReply", await self._replica.call("propose", request, timeout_s=timeout_s))
        except SpecDecError as error:
            raise DraftUnavailable(error.message) from error


class ServeTargetHandle(_ServeWorkerHandle):
    """See `specdec.coordinator.handles.TargetHandle`."""

    async def verify(self, request: VerifyRequest, timeout_s: float) -> VerifyReply:
        try:
            return cast("VerifyReply", await self._replica.call("verify", request, timeout_s=timeout_s))
        except CallFailed as error:
            raise TargetFailed(error.message) from error
        except WorkerError as error:
            raise TargetUnavailable(error.message) from error
        except SpecDecError as error:
            raise TargetFailed(error.message) from error


class ReplicaSet:
    """The replicas of one deployment, as Serve's controller last told this process."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._replicas: dict[str, PinnedReplica] = {}

    def current(self) -> tuple[PinnedReplica, ...]:
        """Running replicas; one object per replica life."""
        ids = known_replicas(self._handle.app_name, self._handle.deployment_name)
        self._replicas = {
            replica_id: self._replicas.get(replica_id) or PinnedReplica(self._handle, replica_id)
            for replica_id in ids
        }
        return tuple(self._replicas.values())

    async def ask_all(self, method: str, *args: object) -> list[tuple[PinnedReplica, Any]]:
        """Call every replica at once; those that do not answer in time are left out."""
        replicas = await self.discover(method, *args)
        answers = await asyncio.gather(
            *(replica.call(method, *args, timeout_s=CONTROL_TIMEOUT_S) for replica in replicas),
            return_exceptions=True,
        )
        pairs = zip(replicas, answers, strict=True)
        return [(replica, answer) for replica, answer in pairs if not isinstance(answer, BaseException)]

    async def discover(self, method: str, *args: object) -> tuple[PinnedReplica, ...]:
        """Running replicas; while none is known, ``method`` is called on any.

        Serve starts a handle's router at its first call, and only then do we learn of replicas.
        """
        if not self.current():
            try:
                await asyncio.wait_for(_detached_call(self._handle, method, *args), CONTROL_TIMEOUT_S)
            except (TimeoutError, *TRANSPORT_ERRORS) as error:
                logger.debug("no %s replica yet: %s", self._handle.deployment_name, _last_line(error))
        return self.current()


class ServeDirectory:
    """See `specdec.coordinator.handles.WorkerDirectory`."""

    def __init__(self, target: DeploymentHandle[Any], draft: DeploymentHandle[Any] | None) -> None:
        self._targets = ReplicaSet(target)
        self._drafts = ReplicaSet(draft) if draft is not None else None

    async def poll(self, heartbeat: Heartbeat) -> Fleet:
        targets, drafts = await asyncio.gather(
            self._targets.ask_all("heartbeat", heartbeat), self._poll_drafts(heartbeat)
        )
        return Fleet(
            targets=tuple(ServeTargetHandle(replica, status) for replica, status in targets),
            drafts=tuple(ServeDraftHandle(replica, status) for replica, status in drafts),
        )

    async def _poll_drafts(self, heartbeat: Heartbeat) -> list[tuple[PinnedReplica, WorkerStatus]]:
        return await self._drafts.ask_all("heartbeat", heartbeat) if self._drafts else []


class ServeCoordinatorPort:
    """See `specdec.coordinator.client.CoordinatorPort`."""

    def __init__(self, replica: PinnedReplica) -> None:
        self._replica = replica

    async def submit(self, gateway_id: str, request: GenerationRequest) -> None:
        """See `Coordinator.submit`.

        Raises:
            CoordinatorLost: the coordinator did not answer.
        """
        await self._call("submit", gateway_id, request)

    async def cancel(self, sequence_ids: Sequence[SequenceId]) -> None:
        await self._call("cancel", sequence_ids)

    async def poll(self, gateway_id: str) -> CoordinatorStatus:
        return cast("CoordinatorStatus", await self._call("poll", gateway_id))

    def updates(self, gateway_id: str) -> AsyncGenerator[RoundUpdate, None]:
        return self._replica.stream("updates", gateway_id)

    async def _call(self, method: str, *args: object) -> object:
        try:
            return await self._replica.call(method, *args, timeout_s=CONTROL_TIMEOUT_S)
        except WorkerError as error:
            raise CoordinatorLost(f"the coordinator is not available: {error}") from error
