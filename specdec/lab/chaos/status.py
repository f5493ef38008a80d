"""What `/status` says about replicas: who lives, what they hold."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from specdec.lab.bench.http import Endpoint, connect
from specdec.lab.chaos.plan import ROLES, FleetSize, Role
from specdec.lab.errors import RequestFailed

STATUS_LIMIT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    role: Role
    replica_id: str
    pid: int
    num_sequences: int
    """Running and waiting ones of a coordinator; those held by a worker, of all coordinators."""
    kv_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinator:
    replica: Replica
    is_ready: bool
    workers: tuple[Replica, ...]

    def num_workers(self, role: Role) -> int:
        return sum(worker.role == role for worker in self.workers)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The coordinators that answered the gateway's last poll, and their workers."""

    coordinators: tuple[Coordinator, ...]

    def replicas(self, role: Role) -> list[Replica]:
        """Each once, in the order of their ids; as busy as the busiest of several reports says."""
        everyone = [coordinator.replica for coordinator in self.coordinators]
        everyone += [worker for coordinator in self.coordinators for worker in coordinator.workers]
        everyone.sort(key=lambda replica: (replica.num_sequences, replica.kv_tokens))
        unique = {replica.replica_id: replica for replica in everyone if replica.role == role}
        return [unique[replica_id] for replica_id in sorted(unique)]

    def is_complete(self, role: Role, fleet: FleetSize) -> bool:
        """Whether every coordinator there is has all the replicas of a role."""
        if role == "coordinator":
            is_ready = all(coordinator.is_ready for coordinator in self.coordinators)
            return is_ready and len(self.coordinators) == fleet.num_coordinators
        counts = [coordinator.num_workers(role) for coordinator in self.coordinators]
        return bool(counts) and all(count == fleet.of(role) for count in counts)

    def missing(self, fleet: FleetSize) -> list[str]:
        """Roles that are not complete, in words."""
        return [
            f"{len(self.replicas(role))} of {fleet.of(role)} {role}s"
            for role in ROLES
            if not self.is_complete(role, fleet)
        ]

    def held(self) -> list[str]:
        """Whatever somebody still holds, in words; empty when all is idle."""
        return [
            f"{replica.role} {replica.replica_id}: {replica.num_sequences} sequences, "
            f"{replica.kv_tokens} KV tokens"
            for role in ROLES
            for replica in self.replicas(role)
            if replica.num_sequences or replica.kv_tokens
        ]


async def read_snapshot(endpoint: Endpoint) -> Snapshot | None:
    """As the gateway has it now; None where it does not answer."""
    try:
        async with asyncio.timeout(STATUS_LIMIT_S), connect(endpoint) as connection:
            head = await connection.send("GET", "/status", {})
            body = await connection.text(head)
    except (TimeoutError, OSError, RequestFailed, asyncio.IncompleteReadError):
        return None
    return parse_snapshot(json.loads(body)) if head.status == 200 else None


def parse_snapshot(content: dict[str, Any]) -> Snapshot:
    """Read the JSON of `/status`."""
    return Snapshot(tuple(_coordinator(item) for item in content["coordinators"]))


def _coordinator(item: dict[str, Any]) -> Coordinator:
    replica = Replica(
        role="coordinator",
        replica_id=item["coordinator_id"],
        pid=item["pid"],
        num_sequences=item["num_running"] + item["num_waiting"],
    )
    workers = [_worker(worker, "draft") for worker in item["drafts"]]
    workers += [_worker(worker, "target") for worker in item["targets"]]
    return Coordinator(replica=replica, is_ready=item["is_ready"], workers=tuple(workers))


def _worker(item: dict[str, Any], role: Role) -> Replica:
    return Replica(
        role=role,
        replica_id=item["worker_id"],
        pid=item["pid"],
        num_sequences=item["num_sequences"],
        kv_tokens=item["kv_tokens_in_use"],
    )
