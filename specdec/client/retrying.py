"""When to try again: only what the server refused, or what never reached it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from specdec.errors import ServiceUnavailable, SpecDecError, TooManyRequests

FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 8.0
JITTER = 0.25
"""Pauses are up to this fraction longer, so that clients that were refused together come back apart."""


class Tries:
    """The tries of one request.

    Args:
        max_retries: after the first.
        timeout_s: for all of them.
        clock: monotonic seconds.
    """

    def __init__(
        self, max_retries: int, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._left = max_retries
        self._clock = clock
        self._deadline_s = clock() + timeout_s
        self._own_pause_s = FIRST_PAUSE_S

    @property
    def remaining_s(self) -> float:
        """Of the time for all tries."""
        return self._deadline_s - self._clock()

    def pause_s(self, error: SpecDecError) -> float:
        """How long to wait before the next try: what the server advised, else twice as long each time.

        Raises:
            SpecDecError: ``error``, where no other try is worth it: it is not of the kind that passes, there
                were enough, or the pause would outlast the time.
        """
        if not isinstance(error, TooManyRequests | ServiceUnavailable) or self._left == 0:
            raise error
        self._left -= 1
        pause_s = self._own_pause_s if error.retry_after_s is None else error.retry_after_s
        self._own_pause_s = min(2 * self._own_pause_s, MAX_PAUSE_S)
        pause_s *= 1 + JITTER * random.random()
        if pause_s >= self.remaining_s:
            raise error
        return pause_s
