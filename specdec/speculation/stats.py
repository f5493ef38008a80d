"""Acceptance counters. Only counts are kept; every rate is derived from them (docs/metrics.md)."""

from __future__ import annotations

from specdec.types import SpeculationStats


class AcceptanceCounter:
    """Counts rounds of one sequence (or of many)."""

    def __init__(self) -> None:
        self._num_rounds = 0
        self._num_draft_tokens = 0
        self._histogram: list[int] = []

    def record(self, num_drafted: int, num_accepted: int) -> None:
        """Count one round that verified ``num_drafted`` tokens and accepted the first ``num_accepted``."""
        assert 0 <= num_accepted <= num_drafted
        self._num_rounds += 1
        if num_drafted == 0:
            return
        self._num_draft_tokens += num_drafted
        if len(self._histogram) <= num_drafted:
            self._histogram.extend([0] * (num_drafted + 1 - len(self._histogram)))
        self._histogram[num_accepted] += 1

    def snapshot(self) -> SpeculationStats:
        return SpeculationStats(
            num_rounds=self._num_rounds,
            num_spec_steps=sum(self._histogram),
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_draft_tokens=sum(a * count for a, count in enumerate(self._histogram)),
            acceptance_histogram=tuple(self._histogram),
        )
