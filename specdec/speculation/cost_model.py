"""What propose and verify calls take, learnt from those that were made.

Times are kept per size of call and smoothed; sizes that were not seen lately are read off their neighbours.
Beyond the largest known size a call is taken to cost no more than that one, below the smallest to cost less
in proportion: hopes that are wrong cost a round each, and are known then. So what promises most is tried
where nothing is known, and no bad moment of the machine is remembered for ever.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass

SMOOTHING, AHEAD_SMOOTHING = 0.2, 0.02
"""Weight of a new measurement. Drafts made ahead are there at once or not at all: only many of them tell."""
OUTLIER = 4.0
"""A call this many times slower than its size usually takes says something of the machine, not of the
size,"""
MAX_OUTLIERS, USUAL_AGAIN = 2, 50
"""unless it happens more often than this without so many usual calls in between."""
MOST_AT_ONCE = 1.5
"""A slow call that is no outlier counts as no slower than this many times what its size takes: if calls have
become slower, the next ones say so, too."""
HOPE_AFTER, CHEAPEST_HOPE = 8000, 0.6
"""Drafts of other lengths are hoped to become cheaper, as if to cost nothing after so many propose calls, but
no less than this share of what they did."""
FORGOTTEN_AFTER = 1000
"""Calls of other sizes after which a size counts as not seen."""


@dataclass(slots=True)
class _Point:
    elapsed_s: float
    seen_at: int
    """In calls of any size."""
    num_calls: int = 1
    num_outliers: int = 0
    num_usual: int = 0
    """Calls since the last outlier."""


class TimeCurve:
    """Seconds of a call over its size, an integer >= 1, of which four significant bits count.

    A larger call takes no less than a smaller one. Where it was measured otherwise the size that was seen
    last is right: one that is not in use is no dearer than the larger ones that are, and no cheaper than the
    smaller ones, whatever bad or good luck it had.

    Args:
        smoothing: weight of a new measurement; of the first ones all count the same.
        is_steady: whether calls of a size take about the same, so that a slow one says little.
    """

    def __init__(self, smoothing: float = SMOOTHING, *, is_steady: bool = True) -> None:
        self._smoothing = smoothing
        self._max_outliers = MAX_OUTLIERS if is_steady else 1
        self._most_at_once = MOST_AT_ONCE if is_steady else math.inf
        self._points: dict[int, _Point] = {}
        self._sizes: list[int] = []
        """Of the points, ascending; empty until they are asked for."""
        self._fitted: list[float] = []
        """Seconds of each, ascending, too."""
        self._num_calls = 0

    def knows(self, size: int) -> bool:
        return _rounded(size) in self._points

    def add(self, size: int, elapsed_s: float) -> None:
        """A call of this size took so long."""
        size = _rounded(size)
        self._num_calls += 1
        point = self._points.get(size)
        if point is None:
            self._points[size] = _Point(elapsed_s, self._num_calls)
        else:
            self._smooth(point, elapsed_s)
        self._forget()
        self._sizes = []

    def at(self, size: int) -> float:
        """Seconds of a call of this size: measured, or between its neighbours; 0 while nothing is known."""
        if not self._points:
            return 0.0
        if not self._sizes:
            self._fit()
        size = _rounded(size)
        idx = bisect.bisect_left(self._sizes, size)
        if idx == len(self._sizes):
            return self._fitted[-1]
        high = self._sizes[idx]
        if high == size or idx == 0:
            return self._fitted[idx] * size / high
        low = self._sizes[idx - 1]
        low_s, high_s = self._fitted[idx - 1], self._fitted[idx]
        return low_s + (size - low) / (high - low) * (high_s - low_s)

    def slope(self, size: int) -> float:
        """Seconds more for one more, around this size, never below 0."""
        below, above = max(1, math.floor(size / 1.5)), math.ceil(size * 1.5)
        return max(0.0, self.at(above) - self.at(below)) / (above - below)

    def _smooth(self, point: _Point, elapsed_s: float) -> None:
        point.seen_at = self._num_calls
        is_outlier = elapsed_s > OUTLIER * point.elapsed_s
        point.num_usual = 0 if is_outlier else point.num_usual + 1
        if point.num_usual == USUAL_AGAIN:
            point.num_outliers = 0
        if is_outlier and point.num_outliers < self._max_outliers:
            point.num_outliers += 1
            return
        point.num_calls += 1
        if not is_outlier:
            elapsed_s = min(elapsed_s, self._most_at_once * point.elapsed_s)
        point.elapsed_s += max(self._smoothing, 1 / point.num_calls) * (elapsed_s - point.elapsed_s)

    def _forget(self) -> None:
        oldest = self._num_calls - FORGOTTEN_AFTER
        if any(point.seen_at <= oldest for point in self._points.values()):
            self._points = {size: point for size, point in self._points.items() if point.seen_at > oldest}

    def _fit(self) -> None:
        """Put the sizes in order, those seen last first, each between its neighbours that are there."""
        self._sizes, self._fitted = [], []
        for size, point in sorted(self._points.items(), key=lambda item: item[1].seen_at, reverse=True):
            idx = bisect.bisect_left(self._sizes, size)
            elapsed_s = max(point.elapsed_s, self._fitted[idx - 1]) if idx > 0 else point.elapsed_s
            elapsed_s = min([elapsed_s, *self._fitted[idx : idx + 1]])
            self._sizes.insert(idx, size)
            self._fitted.insert(idx, elapsed_s)


@dataclass(slots=True)
class _Drafting:
    """Propose calls that ask for one gamma."""

    times: TimeCurve
    """Over the batch size."""
    proposed_at: int = 0
    """Which of all the propose calls was the last of these."""
    num_calls: int = 0
    share: float = 1.0
    """Of the tokens asked for, how many there were."""


class RoundCosts:
    """The curves of one lane; times hold all that is on the way: queueing, the network, the model.

    Args:
        verify: of verify calls, over their tokens; None begins a new one.
        is_ahead: whether the draft looks ahead, so that it is late the less, the less there is to draft.
    """

    def __init__(self, verify: TimeCurve | None = None, *, is_ahead: bool = False) -> None:
        self._verify = verify or TimeCurve()
        self._fewer_power = 2 if is_ahead else 1
        self._smoothing = AHEAD_SMOOTHING if is_ahead else SMOOTHING
        self._is_steady = not is_ahead
        self._propose: dict[int, _Drafting] = {}
        """By gamma."""
        self._num_proposed = 0

    def on_verified(self, num_tokens: int, elapsed_s: float) -> None:
        self._verify.add(num_tokens, elapsed_s)

    def on_proposed(self, batch_size: int, gamma: int, elapsed_s: float, drafted_share: float = 1.0) -> None:
        self._num_proposed += 1
        if gamma not in self._propose:
            self._propose[gamma] = _Drafting(TimeCurve(self._smoothing, is_steady=self._is_steady))
        drafting = self._propose[gamma]
        drafting.times.add(batch_size, elapsed_s)
        drafting.proposed_at = self._num_proposed
        drafting.num_calls += 1
        weight = max(AHEAD_SMOOTHING, 1 / drafting.num_calls)
        drafting.share += weight * (drafted_share - drafting.share)

    def knows(self, num_tokens: int, gamma: int) -> bool:
        """Whether so many tokens were verified lately, and so many drafted for a sequence."""
        return self._verify.knows(num_tokens) and (gamma == 0 or self.has_drafted(gamma))

    def has_drafted(self, gamma: int) -> bool:
        """Whether there are measurements of drafts of so many tokens."""
        return gamma in self._propose

    def verify_s(self, num_tokens: int) -> float:
        """Seconds to verify so many tokens, drafted and committed, of all sequences together."""
        return self._verify.at(num_tokens)

    def seconds_per_verified_token(self, num_tokens: int) -> float:
        """Seconds more for one token more."""
        return self._verify.slope(num_tokens)

    def propose_s(self, batch_size: int, gamma: int) -> float:
        """Seconds to draft ``gamma`` tokens for so many sequences.

        Where only others were drafted it is in proportion; for fewer tokens, of a draft that looks ahead, in
        proportion to the square, which is a hope. Another is that what was not drafted for long has become
        cheaper: so the nearly best are tried again soon, and the bad ones hardly ever.
        """
        if not self._propose:
            return 0.0
        nearest = self._nearest(gamma)
        drafting = self._propose[nearest]
        hope = max(CHEAPEST_HOPE, 1.0 - (self._num_proposed - drafting.proposed_at) / HOPE_AFTER)
        power = self._fewer_power if gamma < nearest else 1
        return hope * drafting.times.at(batch_size) * (gamma / nearest) ** power

    def drafted_share(self, gamma: int) -> float:
        """Of ``gamma`` tokens asked for, how many there are on average: drafts made ahead may be short."""
        if not self._propose:
            return 1.0
        nearest = self._nearest(gamma)
        share = self._propose[nearest].share
        return share if gamma >= nearest else min(1.0, share * nearest / gamma)

    def _nearest(self, gamma: int) -> int:
        """The number of draft tokens there are measurements of."""
        return min(self._propose, key=lambda other: abs(math.log(other / gamma)))


def _rounded(size: int) -> int:
    """Down to four significant bits: 1 to 16 as they are, then 18, 20, ..., 32, 36, ..."""
    shift = max(0, size.bit_length() - 4)
    return (size >> shift) << shift
