"""Faults as they happened: whom they met, and when all was well again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from specdec.lab.bench.http import Endpoint
from specdec.lab.chaos import faults
from specdec.lab.chaos.faults import Fault
from specdec.lab.chaos.plan import SCALED_ROLES, FleetSize, Role
from specdec.lab.chaos.status import Replica, Snapshot, read_snapshot

WATCH_S = 0.25
VICTIM_LIMIT_S = 15.0
"""A fault that finds nobody of its role for this long is left out."""


@dataclass(slots=True)
class Hit:
    """One fault that was inflicted. Times are of the monotonic clock."""

    fault: Fault
    victim: Replica | None
    """None of a scaling."""
    at_s: float
    num_open: int
    """Requests in flight."""
    resumed_at_s: float | None = None
    """A hang is over: the process went on, or had been replaced by then."""
    was_replaced: bool = False
    """By Serve, before its hang was over."""
    recovered_at_s: float | None = None
    """The role was complete again, in the eyes of every coordinator."""

    @property
    def recovery_s(self) -> float | None:
        return None if self.recovered_at_s is None else self.recovered_at_s - self.at_s

    @property
    def is_process_left(self) -> bool:
        """Whether a victim that should be gone still exists."""
        if self.victim is None or self.fault.action == "hang":
            return False
        return faults.is_replica(self.victim.pid, self.fault.role)

    def has_recovered(self, snapshot: Snapshot, fleet: FleetSize) -> bool:
        """Whether the role is complete, without the victim unless that went on."""
        if self.fault.action == "hang" and self.resumed_at_s is None:
            return False
        pids = [replica.pid for replica in snapshot.replicas(self.fault.role)]
        is_back = self.fault.action == "hang" or self.victim is None or self.victim.pid not in pids
        return is_back and snapshot.is_complete(self.fault.role, fleet)


class Injector:
    """Carries out a schedule, and watches the deployment recover.

    Args:
        endpoint: of the server.
        fleet: what a healthy deployment has, before any scaling.
        resize: has a role served by another number of replicas from now on.
        count_open: how many requests are in flight.
        on_hit: told of every fault.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        fleet: FleetSize,
        resize: Callable[[Role, int], Awaitable[None]],
        count_open: Callable[[], int],
        on_hit: Callable[[Hit], object] = lambda _: None,
    ) -> None:
        self.hits: list[Hit] = []
        self.num_left_out = 0
        self.fleet = fleet
        """As scaled last."""
        self._endpoint = endpoint
        self._planned = fleet
        self._resize = resize
        self._count_open = count_open
        self._on_hit = on_hit
        self._resuming: set[asyncio.Task[None]] = set()

    async def inflict_all(self, schedule: Sequence[Fault], started_s: float) -> None:
        """Each in its time; ``started_s`` is of the monotonic clock."""
        for fault in schedule:
            await asyncio.sleep(max(0.0, started_s + fault.at_s - time.monotonic()))
            await (self._rescale(fault) if fault.is_scaling else self._inflict(fault))

    async def restore(self) -> None:
        """As many replicas again as were planned."""
        for role in SCALED_ROLES:
            number = self._planned.of(role)
            if self.fleet.of(role) != number:
                self.fleet = self.fleet.with_number(role, number)
                await self._resize(role, number)

    async def watch_forever(self) -> None:
        """Note when faults have been made good."""
        while True:
            self.observe(await read_snapshot(self._endpoint))
            await asyncio.sleep(WATCH_S)

    def observe(self, snapshot: Snapshot | None) -> None:
        """Close the faults that a snapshot shows to be made good."""
        if snapshot is None:
            return
        for hit in self.hits:
            if hit.recovered_at_s is None and hit.has_recovered(snapshot, self.fleet):
                hit.recovered_at_s = time.monotonic()

    def resume_all(self) -> None:
        """Leave no process stopped behind."""
        for task in self._resuming:
            task.cancel()
        for hit in self.hits:
            if hit.victim is not None and hit.fault.action != "kill":
                faults.resume(hit.victim.pid, hit.fault.role)

    async def _rescale(self, fault: Fault) -> None:
        """One replica more or less than now, and than planned at most."""
        await self._wait_for_scalings(fault.role)
        number = self.fleet.of(fault.role) + (1 if fault.action == "scale-up" else -1)
        if number < 1 or abs(number - self._planned.of(fault.role)) > 1:
            self.num_left_out += 1
            return
        hit = Hit(fault, None, time.monotonic(), self._count_open())
        self.fleet = self.fleet.with_number(fault.role, number)
        self.hits.append(hit)
        self._on_hit(hit)
        await self._resize(fault.role, number)

    async def _wait_for_scalings(self, role: Role) -> None:
        """Until those of a role that went before have been made good, but not for ever."""
        deadline_s = time.monotonic() + VICTIM_LIMIT_S
        while time.monotonic() < deadline_s:
            scalings = [hit for hit in self.hits if hit.fault.is_scaling and hit.fault.role == role]
            if all(hit.recovered_at_s is not None for hit in scalings):
                return
            await asyncio.sleep(WATCH_S)

    async def _inflict(self, fault: Fault) -> None:
        victim = await self._find_victim(fault)
        if victim is None or not faults.inflict(fault, victim.pid):
            self.num_left_out += 1
            return
        hit = Hit(fault, victim, time.monotonic(), self._count_open())
        self.hits.append(hit)
        self._on_hit(hit)
        if fault.hang_s is not None:
            task = asyncio.get_running_loop().create_task(self._resume_later(hit, victim, fault.hang_s))
            self._resuming.add(task)
            task.add_done_callback(self._resuming.discard)

    async def _resume_later(self, hit: Hit, victim: Replica, hang_s: float) -> None:
        await asyncio.sleep(hang_s)
        hit.was_replaced = not faults.resume(victim.pid, victim.role)
        hit.resumed_at_s = time.monotonic()

    async def _find_victim(self, fault: Fault) -> Replica | None:
        """One that lives and is not stopped; busy ones before idle ones."""
        deadline_s = time.monotonic() + VICTIM_LIMIT_S
        while time.monotonic() < deadline_s:
            snapshot = await read_snapshot(self._endpoint)
            found = self._candidates(snapshot, fault) if snapshot else []
            if found:
                busy = [replica for replica in found if replica.num_sequences] or found
                return busy[int(fault.pick * len(busy))]
            await asyncio.sleep(WATCH_S)
        return None

    def _candidates(self, snapshot: Snapshot, fault: Fault) -> list[Replica]:
        stopped = {
            hit.victim.pid
            for hit in self.hits
            if hit.victim is not None
            and (hit.fault.action == "freeze" or (hit.fault.action == "hang" and hit.resumed_at_s is None))
        }
        return [
            replica
            for replica in snapshot.replicas(fault.role)
            if replica.pid not in stopped and faults.is_replica(replica.pid, fault.role)
        ]
