"""How the rounds of a lane overlap: in turn, with the draft looking ahead, or as two groups by turns."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, Protocol

from specdec.types import Overlap

GUESSED = (0.6, 0.2, 0.1, 0.05)
"""How often a recovered token is the draft's first, second, ... other choice."""


@lru_cache(maxsize=4096)
def fan_out(gamma: int, acceptance_rate: float, num_branches: int) -> tuple[int, ...]:
    """Share ``num_branches`` guesses out over the outcomes of a block, the likeliest first
    (arXiv:2603.03251).

    After ``a < gamma`` accepted tokens, which happens with a probability of ``alpha^a (1 - alpha)``, the
    recovered token is one of the draft's other choices. After all of them the bonus token is the draft's own
    choice as often as any draft token is accepted.

    Args:
        gamma: tokens of the block, >= 0.
        acceptance_rate: alpha, in [0, 1].
        num_branches: guesses in all, >= 1.

    Returns:
        gamma + 1 numbers of guesses, by accept length; their sum is ``num_branches`` or less.
    """
    hopes = [
        (acceptance_rate**accepted * (1.0 - acceptance_rate) * share, accepted)
        for accepted in range(gamma)
        for share in GUESSED
    ]
    bonus = acceptance_rate**gamma
    hopes.append((bonus * acceptance_rate, gamma))
    hopes += [(bonus * (1.0 - acceptance_rate) * share, gamma) for share in GUESSED]
    chosen = sorted(hopes, key=lambda hope: hope[0], reverse=True)[:num_branches]
    counts = [0] * (gamma + 1)
    for probability, accepted in chosen:
        counts[accepted] += probability > 0.0
    return tuple(counts)


class BranchBudget:
    """How many outcomes per sequence to prepare for: what the draft gets done while the target verifies.

    One more after each time it got done, a quarter fewer after each time it did not.

    Args:
        most: outcomes at most.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._wanted = float(most)

    @property
    def num_branches(self) -> int:
        return int(self._wanted)

    def on_answer(self, is_done: bool) -> None:
        """Whether the draft had prepared all when it was asked for the next block."""
        self._wanted = min(self._most, self._wanted + 1) if is_done else max(1.0, 0.75 * self._wanted)


class PipelinePolicy(Protocol):
    """Chooses how the rounds of one lane overlap."""

    @property
    def overlap(self) -> Overlap:
        """Of the next round."""
        ...

    def on_round(self, num_sequences: int, num_expected: float, ended_at_s: float) -> None:
        """A round ended: how many sequences the lane has, and what such a round commits on average."""
        ...

    def on_drafts(self, *, shares_device: bool) -> None:
        """The lane's draft workers are others now: whether one computes on the target's device."""
        ...

    def on_idle(self) -> None:
        """The lane has nothing to do."""
        ...


class FixedPipeline:
    """The same at any load."""

    def __init__(self, overlap: Overlap) -> None:
        self._overlap = overlap

    @property
    def overlap(self) -> Overlap:
        return self._overlap

    def on_round(self, num_sequences: int, num_expected: float, ended_at_s: float) -> None:
        """Not asked for."""

    def on_drafts(self, *, shares_device: bool) -> None:
        """Not asked for."""

    def on_idle(self) -> None:
        """Not asked for."""


WINDOW_ROUNDS = 32
"""Rounds that are timed together: luck with the draft's guesses moves the rate of so many by 2 or 3 %."""
SETTLING_ROUNDS = 2
"""The first ones after a change are not timed."""
FIRST_TRIAL_AFTER, LAST_TRIAL_AFTER, TRIALS_RARER = 2, 64, 4
"""Windows between two trials: four times as many with each that changed nothing."""
BETTER_BY = 1.03
"""What a trial must gain to be kept."""
SLUMP = 0.8
"""A window that much slower than the one before: something has changed, and trials are frequent again."""
SAME_SIZE = 1.25
"""Windows are compared when they had as many sequences, give or take this factor."""


class AdaptivePipeline:
    """The overlap that commits most tokens per second, found by trying.

    Rounds are timed in windows. Now and then another way is tried for one window, and kept if it was faster.
    What a round commits is taken from the acceptance rate and not counted: luck would hide the difference.
    While draft and target share a device, where what one does ahead the other waits for, rounds are serial.

    Args:
        ways: to choose from; the first is where it begins.
    """

    def __init__(self, ways: Sequence[Overlap]) -> None:
        self._ways = tuple(ways)
        self._kept: Overlap = self._ways[0]
        self._tried: Overlap | None = None
        self._next = 1
        """Of the ways, which is tried next."""
        self._trial_after = FIRST_TRIAL_AFTER
        self._num_windows = 0
        """Since the last trial."""
        self._kept_rate: tuple[int, float] | None = None
        """Sequences and tokens per second of the last window of the way that is kept."""
        self._shares_device = False
        self._num_rounds = self._size = 0
        """Of the window that is being timed, with its sequences,"""
        self._began_at_s = self._expected = 0.0
        """its beginning, and the tokens that such rounds commit on average."""

    @property
    def overlap(self) -> Overlap:
        return "serial" if self._shares_device else self._tried or self._kept

    def on_round(self, num_sequences: int, num_expected: float, ended_at_s: float) -> None:
        """See `PipelinePolicy.on_round`."""
        if self._shares_device:
            return
        if self._kept == "groups" and num_sequences < 2:
            self._kept, self._kept_rate = self._ways[0], None
            self._restart()
        if self._num_rounds < SETTLING_ROUNDS or not _is_near(num_sequences, self._size):
            if self._num_rounds >= SETTLING_ROUNDS:
                self._restart()
            self._size, self._began_at_s = num_sequences, ended_at_s
            self._num_rounds += 1
            return
        self._num_rounds += 1
        self._expected += num_expected
        if self._num_rounds == SETTLING_ROUNDS + WINDOW_ROUNDS:
            self._on_window(self._expected / max(1e-9, ended_at_s - self._began_at_s))

    def on_drafts(self, *, shares_device: bool) -> None:
        """See `PipelinePolicy.on_drafts`."""
        self._shares_device = shares_device
        self._restart()

    def on_idle(self) -> None:
        """See `PipelinePolicy.on_idle`."""
        self._restart()

    def _restart(self) -> None:
        self._num_rounds = self._size = 0
        self._began_at_s = self._expected = 0.0

    def _on_window(self, tokens_per_s: float) -> None:
        size = self._size
        self._restart()
        if self._tried is None:
            if self._has_slumped(size, tokens_per_s):
                self._trial_after = FIRST_TRIAL_AFTER
            self._kept_rate = (size, tokens_per_s)
            self._num_windows += 1
            self._try_another()
            return
        kept_size, kept_rate = self._kept_rate or (0, 0.0)
        tried, self._tried = self._tried, None
        if not _is_near(size, kept_size):
            return  # they say nothing of each other: again behind the next window
        self._num_windows = 0
        if tokens_per_s > BETTER_BY * kept_rate:
            self._kept, self._kept_rate = tried, (size, tokens_per_s)
            self._trial_after = FIRST_TRIAL_AFTER
        else:
            self._trial_after = min(TRIALS_RARER * self._trial_after, LAST_TRIAL_AFTER)

    def _has_slumped(self, size: int, tokens_per_s: float) -> bool:
        kept_size, kept_rate = self._kept_rate or (0, 0.0)
        return _is_near(size, kept_size) and tokens_per_s < SLUMP * kept_rate

    def _try_another(self) -> None:
        if self._num_windows < self._trial_after:
            return
        others = [way for way in self._ways if way != self._kept and _suits(way, self._kept_rate)]
        if others:
            self._tried = others[self._next % len(others)]
            self._next += 1


def _suits(way: Overlap, kept_rate: tuple[int, float] | None) -> bool:
    """One sequence makes no two groups."""
    return way != "groups" or (kept_rate is not None and kept_rate[0] > 1)


def _is_near(size: int, other: int) -> bool:
    return max(size, other) <= SAME_SIZE * max(1, min(size, other))


def new_pipeline_policy(setting: Overlap | Literal["auto"]) -> PipelinePolicy:
    """The policy behind a deployment's setting; ``auto`` chooses."""
    return (
        AdaptivePipeline(("lookahead", "groups", "serial")) if setting == "auto" else FixedPipeline(setting)
    )
