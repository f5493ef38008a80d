"""Which fault comes when, from a seed; and doing it to a process."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from specdec.lab.chaos.plan import ROLES, SCALED_ROLES, SCALINGS, Action, Plan, Role

SHORTEST_HANG_S = 0.3
LONGEST_HANG_S = 10.0
"""From less than any deadline to more than a coordinator's patience with a silent gateway."""
FIRST_FAULT_S = 2.0
"""Streams are on their way by then."""
_CLASSES = {"draft": "DraftWorker", "target": "TargetWorker", "coordinator": "Coordinator"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something to be done to one replica. Times in seconds."""

    at_s: float
    """Since the load began."""
    role: Role
    action: Action
    pick: float
    """Which of the replicas, as a fraction of them; of a scale-down that is Serve's to say."""
    hang_s: float | None = None
    """Of a hang: until the process goes on."""

    @property
    def kind(self) -> str:
        return f"{self.action} {self.role}"

    @property
    def is_scaling(self) -> bool:
        return self.action in SCALINGS


def make_schedule(plan: Plan) -> tuple[Fault, ...]:
    """Every kind once in a random order, then again in another one, until the time is over."""
    rng = random.Random(f"faults {plan.seed}")
    faults: list[Fault] = []
    at_s = FIRST_FAULT_S
    for role, action in _kinds(plan.actions, rng):
        if at_s >= plan.duration_s:
            break
        ratio = LONGEST_HANG_S / SHORTEST_HANG_S
        hang_s = SHORTEST_HANG_S * ratio ** rng.random() if action == "hang" else None
        faults.append(Fault(at_s=at_s, role=role, action=action, pick=rng.random(), hang_s=hang_s))
        at_s += plan.interval_s * rng.uniform(0.3, 1.7)
    return tuple(faults)


def _kinds(actions: Sequence[Action], rng: random.Random) -> Iterator[tuple[Role, Action]]:
    while actions:
        deck = [
            (role, action)
            for role in ROLES
            for action in actions
            if role in SCALED_ROLES or action not in SCALINGS
        ]
        rng.shuffle(deck)
        yield from deck


def is_replica(pid: int, role: Role) -> bool:
    """Whether the process is a living replica of this role: a number may be somebody else's by now."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return False
    return f"ServeReplica:specdec:{_CLASSES[role]}" in command


def inflict(fault: Fault, pid: int) -> bool:
    """Kill or stop a replica; False where it is gone already."""
    return send(pid, fault.role, signal.SIGKILL if fault.action == "kill" else signal.SIGSTOP)


def resume(pid: int, role: Role) -> bool:
    """Let a stopped replica go on; False where it was replaced meanwhile."""
    return send(pid, role, signal.SIGCONT)


def send(pid: int, role: Role, number: signal.Signals) -> bool:
    """A signal to a replica and to nobody else; False where there is no such replica."""
    if not is_replica(pid, role):
        return False
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
