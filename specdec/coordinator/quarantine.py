"""Workers that failed are left alone for a while, longer each time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specdec.types import WorkerId

_MAX_PAUSE_S = 60.0
_FORGIVEN_AFTER_S = 120.0
"""A worker that has served this long since its last pause starts again with the first."""


@dataclass(slots=True)
class _Entry:
    until_s: float
    pause_s: float


class Quarantine:
    """A worker that keeps failing is retried after 1, 2, 4, ... times ``first_pause_s``, at most a minute."""

    def __init__(self, first_pause_s: float, clock: Callable[[], float]) -> None:
        self._first_pause_s = first_pause_s
        self._clock = clock
        self._entries: dict[WorkerId, _Entry] = {}

    def add(self, worker_id: WorkerId) -> None:
        previous = self._entries.get(worker_id)
        if previous and self._clock() > previous.until_s + _FORGIVEN_AFTER_S:
            previous = None
        pause_s = min(previous.pause_s * 2 if previous else self._first_pause_s, _MAX_PAUSE_S)
        self._entries[worker_id] = _Entry(self._clock() + pause_s, pause_s)

    def holds(self, worker_id: WorkerId) -> bool:
        entry = self._entries.get(worker_id)
        return entry is not None and self._clock() < entry.until_s
