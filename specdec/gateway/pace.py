"""When a stream may send again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Pace:
    """When the streams of one gateway may send again: each has an equal share of the messages per second."""

    def __init__(self, max_messages_per_s: float) -> None:
        self._max_messages_per_s = max_messages_per_s
        self._num_streams = 0

    @contextmanager
    def stream(self) -> Iterator[Callable[[], float]]:
        """Count one stream; gives its `not_before` (see `Backend.generate`).

        It lets the first text go at once. As long as rounds take longer than the share's interval, each is
        sent as it comes.
        """
        has_sent = False

        def not_before_s() -> float:
            nonlocal has_sent
            interval_s = self._num_streams / self._max_messages_per_s if has_sent else 0.0
            has_sent = True
            return asyncio.get_running_loop().time() + interval_s

        self._num_streams += 1
        try:
            yield not_before_s
        finally:
            self._num_streams -= 1
