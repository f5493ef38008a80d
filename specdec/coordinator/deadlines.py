"""How long a call to a worker may take: the setting at most, less once calls of its size have been timed."""

from __future__ import annotations

FACTOR = 30.0
"""A call this many times slower than the slowest of its size lately hangs; noise, swapping and neighbours do
not make that much."""
FORGET = 0.98
"""What a slowest time still counts for after another call."""
LEAST_TARGET_S, LEAST_DRAFT_S = 10.0, 2.0
"""However fast calls are, so much is granted: a loaded machine may stop a process for seconds."""


class Deadlines:
    """Of one worker's calls, learnt from how long they took.

    Calls are told apart by their number of tokens, in powers of two: a long prompt may take what it takes. A
    size that has not been seen gets the most there is, since the first call of a size may have to compile.

    Args:
        least_s: seconds that are granted in any case.
        most_s: seconds that are never exceeded.
    """

    def __init__(self, least_s: float, most_s: float) -> None:
        self._least_s = min(least_s, most_s)
        self._most_s = most_s
        self._slowest_s: dict[int, float] = {}

    def of(self, num_tokens: int) -> float:
        """Seconds that a call of so many tokens may take."""
        slowest_s = self._slowest_s.get(num_tokens.bit_length())
        if slowest_s is None:
            return self._most_s
        return min(self._most_s, max(self._least_s, FACTOR * slowest_s))

    def on_answer(self, num_tokens: int, elapsed_s: float) -> None:
        """A call was answered in time."""
        size = num_tokens.bit_length()
        self._slowest_s[size] = max(elapsed_s, FORGET * self._slowest_s.get(size, 0.0))
