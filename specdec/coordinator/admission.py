"""Who may wait for a place in a lane, and who is next: the queue of a coordinator."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from specdec.errors import TooManyRequests
from specdec.types import SequenceId

MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 60.0
WINDOW_S = 30.0
"""How far back starts are counted."""
MIN_MEASURED_S = 1.0
"""Of a busy time shorter than this nothing can be said."""
FEW_STARTS = 4
"""With fewer, the busy time before is the better guide, if there was one."""


class FairQueue:
    """Waiting sequences, by client.

    Next is the client that has the fewest sequences running; of several, the one whose last turn is longest
    ago. Of a client, what came first. Before all of them go sequences that had a place and lost it.

    A client may wait with no more sequences than there are places left free: alone it gets half of the queue,
    beside another a third. So nobody can fill it, and a client that has nothing waiting finds a place. Those
    without a name are not told apart: together they may fill it.

    Args:
        max_waiting: places.
        clock: monotonic seconds.
    """

    def __init__(self, max_waiting: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_waiting = max_waiting
        self._returned: dict[SequenceId, None] = {}
        self._clients: dict[str, dict[SequenceId, None]] = {}
        """In the order of their last turns, the longest ago first; none is empty."""
        self._client_of: dict[SequenceId, str] = {}
        self._rate = _StartRate(clock)

    def __len__(self) -> int:
        return len(self._returned) + len(self._client_of)

    @property
    def num_clients(self) -> int:
        """Clients that wait; with fewer than two, who has how many running makes no difference."""
        return len(self._clients)

    def check_room(self, client: str) -> None:
        """Accept one more sequence of a client.

        Raises:
            TooManyRequests: the queue is full, or the client has its share; with the time that the sequences
                which wait will take to start.
        """
        num_free, num_own = self._max_waiting - len(self), len(self._clients.get(client, ()))
        if num_free <= 0:
            message = f"{len(self)} requests are waiting already; retry later"
        elif client and num_own >= num_free:
            message = f"{num_own} requests of this client are waiting already; retry later"
        else:
            return
        raise TooManyRequests(message, retry_after_s=self._rate.seconds_for(len(self)))

    def append(self, sequence_id: SequenceId, client: str) -> None:
        """Behind the client's others, room or not."""
        self._rate.on_busy()
        self._clients.setdefault(client, {})[sequence_id] = None
        self._client_of[sequence_id] = client

    def put_first(self, sequence_ids: Iterable[SequenceId]) -> None:
        """Sequences that had a place and lost it: before all others, behind earlier ones of their kind."""
        for sequence_id in sequence_ids:
            self._rate.on_busy()
            self._returned[sequence_id] = None

    def head(self, num_running: Mapping[str, int]) -> SequenceId | None:
        """Whose turn it is; None when nobody waits.

        Args:
            num_running: sequences of each client that have a place; absent: none.
        """
        if self._returned:
            return next(iter(self._returned))
        if not self._clients:
            return None
        client = min(self._clients, key=lambda name: num_running.get(name, 0))
        return next(iter(self._clients[client]))

    def start(self, sequence_id: SequenceId) -> None:
        """It got a place: its client's turn is over."""
        self._rate.on_start()
        client = self._client_of.get(sequence_id)
        self.remove(sequence_id)
        if client in self._clients:
            self._clients[client] = self._clients.pop(client)

    def remove(self, sequence_id: SequenceId) -> None:
        """It waits no longer."""
        if sequence_id in self._returned:
            del self._returned[sequence_id]
        else:
            client = self._client_of.pop(sequence_id)
            del self._clients[client][sequence_id]
            if not self._clients[client]:
                del self._clients[client]
        if not len(self):
            self._rate.on_idle()


class _StartRate:
    """How many sequences a second get a place, measured while others wait for one."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._busy_since_s: float | None = None
        self._starts_s: deque[float] = deque()
        self._previous_per_s: float | None = None
        """Of the busy time before."""

    def on_busy(self) -> None:
        if self._busy_since_s is None:
            self._busy_since_s = self._clock()
            self._starts_s.clear()

    def on_start(self) -> None:
        self._starts_s.append(self._clock())

    def on_idle(self) -> None:
        self._previous_per_s = self._per_s()
        self._busy_since_s = None

    def seconds_for(self, num_sequences: int) -> float:
        """How long so many sequences take to start, within the bounds of what clients are told."""
        per_s = self._per_s()
        if per_s is None:
            return MIN_RETRY_AFTER_S
        return min(max(num_sequences / per_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)

    def _per_s(self) -> float | None:
        if self._busy_since_s is None:
            return self._previous_per_s
        now_s = self._clock()
        while self._starts_s and self._starts_s[0] < now_s - WINDOW_S:
            self._starts_s.popleft()
        measured_s = min(now_s - self._busy_since_s, WINDOW_S)
        has_guide = self._previous_per_s is not None and measured_s < WINDOW_S
        if measured_s < MIN_MEASURED_S or (has_guide and len(self._starts_s) < FEW_STARTS):
            return self._previous_per_s
        # As if one more were about to start: of a busy time without any, its length is what is known.
        return (len(self._starts_s) + 1) / measured_s
