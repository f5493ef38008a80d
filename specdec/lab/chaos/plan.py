"""What a run is to be: how long, how many streams, which faults, and of how many replicas."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Role = Literal["draft", "target", "coordinator"]
Action = Literal["kill", "hang", "freeze"]
"""``hang``: stopped, and continued after a while. ``freeze``: stopped for good, so it has to be replaced."""

ROLES: tuple[Role, ...] = ("draft", "target", "coordinator")


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
    fleet: FleetSize = field(default_factory=FleetSize)
