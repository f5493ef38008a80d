"""How a coordinator reaches workers: a seam with two implementations, Ray Serve and in process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from specdec.messages import Heartbeat, ProposeReply, ProposeRequest, VerifyReply, VerifyRequest, WorkerStatus
from specdec.types import SequenceId


class WorkerHandle(Protocol):
    """One life of one worker."""

    @property
    def status(self) -> WorkerStatus:
        """As of the poll that made this handle."""
        ...

    async def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        """Ask the worker to free sequences; failures are ignored, heartbeats are the safety net."""
        ...


class DraftHandle(WorkerHandle, Protocol):
    async def propose(self, request: ProposeRequest, timeout_s: float) -> ProposeReply:
        """One propose call.

        Raises:
            DraftUnavailable: the worker died, failed, or did not answer within ``timeout_s``.
        """
        ...


class TargetHandle(WorkerHandle, Protocol):
    async def verify(self, request: VerifyRequest, timeout_s: float) -> VerifyReply:
        """One verify call.

        Raises:
            TargetUnavailable: the worker died or did not answer within ``timeout_s``.
            TargetFailed: it lives, but the call failed in it.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fleet:
    """The workers that answered a poll."""

    targets: tuple[TargetHandle, ...]
    drafts: tuple[DraftHandle, ...]


class WorkerDirectory(Protocol):
    async def poll(self, heartbeat: Heartbeat) -> Fleet:
        """Tell every worker which sequences live and return those that answered, within a bounded time."""
        ...
