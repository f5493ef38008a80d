"""What a run is to be: how long, how many streams, which faults, and of how many replicas."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

Role = Literal["draft", "target", "coordinator"]
Action = Literal["kill", "hang", "freeze", "scale-up", "scale-down"]
"""``hang``: stopped, and continued after a while. ``freeze``: stopped for good, so it has to be replaced.
``scale-up`` and ``scale-down``: one replica more or less, asked for as an operator does."""
Pair = Literal["simulated", "smollm2"]

ROLES: tuple[Role, ...] = ("draft", "target", "coordinator")
SCALED_ROLES: tuple[Role, ...] = ("draft", "target")
SCALINGS: tuple[Action, ...] = ("scale-up", "scale-down")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSize:
    """Replicas of a healthy deployment."""

    num_coordinators: int = 2
    num_drafts: int = 2
    num_targets: int = 2

    def of(self, role: Role) -> int:
        """Replicas of one role."""
        sizes = {"draft": self.num_drafts, "target": self.num_targets, "coordinator": self.num_coordinators}
        return sizes[role]

    def with_number(self, role: Role, number: int) -> FleetSize:
        """The same with another number of replicas of one role."""
        return replace(self, **{f"num_{role}s": number})


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run."""

    duration_s: float
    """Of the load under faults; starting, references and recovery come on top."""
    seed: int = 0
    num_streams: int = 16
    """Requests in flight at any moment."""
    actions: tuple[Action, ...] = ("kill", "hang", "freeze")
    interval_s: float = 6.0
    """Between two faults, on average."""
    num_questions: int = 24
    """Different texts."""
    pair: Pair = "simulated"
    """``smollm2``: the embedded pair in float32, whose texts do not depend on what is computed together."""
    fleet: FleetSize = field(default_factory=FleetSize)
