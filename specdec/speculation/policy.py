"""How many tokens to draft per sequence and round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from specdec.speculation.cost_model import RoundCosts

Rates = npt.NDArray[np.float64]
Gammas = npt.NDArray[np.int64]


class Candidate(Protocol):
    """A sequence that might be drafted for."""

    @property
    def acceptance_rate(self) -> float:
        """How likely the next draft token is accepted, in [0, 1]."""
        ...

    @property
    def num_missing(self) -> int:
        """Tokens its draft worker has to be fed first."""
        ...

    @property
    def max_gamma(self) -> int:
        """Most that may be drafted for it, whatever the policy thinks."""
        ...


class GammaPolicy(Protocol):
    """Chooses gamma for the sequences of one lane, and is told what rounds took."""

    def choose(self, candidates: Sequence[Candidate]) -> list[int]:
        """Tokens to draft for each sequence of the next round; 0 is plain decoding."""
        ...

    def on_proposed(self, batch_size: int, gamma: int, elapsed_s: float, drafted_share: float = 1.0) -> None:
        """A propose call asked for up to ``gamma`` tokens for each of ``batch_size`` sequences, and fed no
        prompt; ``drafted_share`` of the tokens were drafted.
        """
        ...

    def on_verified(self, num_tokens: int, elapsed_s: float) -> None:
        """A verify call fed ``num_tokens`` tokens in all, and no prompt."""
        ...


class FixedGamma:
    """The same gamma at any load."""

    def __init__(self, num_speculative_tokens: int) -> None:
        self._gamma = num_speculative_tokens

    def choose(self, candidates: Sequence[Candidate]) -> list[int]:
        return [self._gamma] * len(candidates)

    def on_proposed(self, batch_size: int, gamma: int, elapsed_s: float, drafted_share: float = 1.0) -> None:
        """Not asked for."""

    def on_verified(self, num_tokens: int, elapsed_s: float) -> None:
        """Not asked for."""


SOONEST_PROBE_AFTER, FIRST_PROBE_AFTER, LAST_PROBE_AFTER = 16, 32, 512
"""Plain rounds between two probes: 32 when speculation has just ceased to pay, twice as many with each probe
that was refused, a quarter with each that was accepted. At 512 a probe as long as a whole round costs 0.2
%."""
PROBED_SEQUENCES = 2
"""A probe drafts for this many, those whose draft lacks least: it must not feed every prompt to a useless
draft."""
REVIEW_EVERY = 8
"""Rounds a choice is kept while the batch stays as large as it was, and if what it costs is known."""
GOOD_RATE = 0.9
"""Where not even this acceptance rate would pay, an accepted probe is no reason to probe sooner."""
PAYS_FROM, PAYS_UNTIL = 1.02, 0.98
"""How much more than plain decoding speculation must promise to begin, and to go on: while nothing is drafted
hardly anything is learnt, so an unlucky moment of a draft that pays must not end it."""


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    gammas: Gammas
    """[sequences]"""
    tokens_per_s: float


class AdaptiveGamma:
    """The gammas that promise most tokens per second, from measured times and acceptance; 0 where none pays.

    A round of b sequences with gamma_i draft tokens each takes ``t_d(b, max gamma) + t_v(sum of (gamma_i +
    1))`` and commits ``E[N_i]`` tokens of each (`expected_tokens`). While gamma is 0 nothing is learnt of the
    draft, so now and then a round is a probe.

    Args:
        max_gamma: most tokens to draft.
        costs: what rounds take.
        trial_rounds: how long a choice is kept whose cost is not known yet: longer where calls of one kind
            take now this and now that long.
    """

    def __init__(self, max_gamma: int, costs: RoundCosts, trial_rounds: int = 1) -> None:
        self._max_gamma = max_gamma
        self._costs = costs
        self._trial_rounds = trial_rounds
        self._gammas: list[int] = []
        self._rounds_left = 0
        self._num_plain_rounds = 0
        self._probe_after = FIRST_PROBE_AFTER
        self._rate_before_probe: float | None = None

    def choose(self, candidates: Sequence[Candidate]) -> list[int]:
        """See `GammaPolicy.choose`."""
        self._heed_probe(candidates)
        self._rounds_left -= 1
        if self._rounds_left <= 0 or len(self._gammas) != len(candidates):
            self._gammas = self._best(_rates(candidates), candidates)
            self._rounds_left = self._num_rounds_for(self._gammas)
        if not any(self._gammas):
            return self._plain(candidates)
        self._num_plain_rounds, self._probe_after = 0, FIRST_PROBE_AFTER
        return self._gammas

    def on_proposed(self, batch_size: int, gamma: int, elapsed_s: float, drafted_share: float = 1.0) -> None:
        """See `GammaPolicy.on_proposed`."""
        self._costs.on_proposed(batch_size, gamma, elapsed_s, drafted_share)

    def on_verified(self, num_tokens: int, elapsed_s: float) -> None:
        """See `GammaPolicy.on_verified`."""
        self._costs.on_verified(num_tokens, elapsed_s)

    def _num_rounds_for(self, gammas: Sequence[int]) -> int:
        """How long to keep a choice."""
        gamma = max(gammas, default=0)
        if self._costs.knows(sum(gammas) + len(gammas), gamma):
            return REVIEW_EVERY
        return self._trial_rounds if gamma else 1

    def _plain(self, candidates: Sequence[Candidate]) -> list[int]:
        """No drafts, or a probe when it is time for one."""
        gammas = [0] * len(candidates)
        self._num_plain_rounds += 1
        if self._num_plain_rounds < self._probe_after or not candidates:
            return gammas
        self._num_plain_rounds = 0
        self._rate_before_probe = _mean(candidates)
        allowed = [idx for idx, candidate in enumerate(candidates) if candidate.max_gamma > 0]
        for idx in sorted(allowed, key=lambda idx: candidates[idx].num_missing)[:PROBED_SEQUENCES]:
            gammas[idx] = 1
        return gammas

    def _heed_probe(self, candidates: Sequence[Candidate]) -> None:
        """After a probe: look at its result at once, and probe again sooner or later."""
        if self._rate_before_probe is None or not candidates:
            return
        is_accepted = _mean(candidates) > self._rate_before_probe
        is_hopeful = is_accepted and any(self._best(np.maximum(_rates(candidates), GOOD_RATE), candidates))
        after = self._probe_after // 4 if is_hopeful else self._probe_after * 2
        self._probe_after = max(SOONEST_PROBE_AFTER, min(after, LAST_PROBE_AFTER))
        self._rate_before_probe = None
        self._rounds_left = 0

    def _best(self, rates: Rates, candidates: Sequence[Candidate]) -> list[int]:
        """The gammas that promise most.

        Each sequence gets tokens as long as one earns more than the target takes to verify it. What the draft
        takes for a token is shared by the batch, and weighed by trying every depth.

        Args:
            rates: [candidates] how likely their draft tokens are accepted.
            candidates: whose these are.
        """
        limits = np.array([max(0, candidate.max_gamma) for candidate in candidates], np.int64)
        # [candidates, max gamma]: how likely the first 1, 2, ... tokens are accepted, so what each commits
        reached = rates[:, None] ** np.arange(1, self._max_gamma + 1)
        plain = best = self._evaluate(np.zeros_like(limits), reached)
        plans: list[_Plan] = []
        for depth in self._depths():
            price = best.tokens_per_s * self._costs.seconds_per_verified_token(len(limits) * (depth + 1))
            affordable = np.count_nonzero(reached[:, :depth] > price, axis=1)
            plans.append(self._evaluate(np.minimum(affordable, limits), reached))
            best = max(best, plans[-1], key=_promise)
        drafted = max(plans, key=_promise, default=plain)
        pays = _promise(drafted) > (PAYS_UNTIL if any(self._gammas) else PAYS_FROM) * _promise(plain)
        gammas: list[int] = (drafted if pays else plain).gammas.tolist()
        return gammas

    def _depths(self) -> list[int]:
        """What to choose from: of what was not tried yet, nothing far from what is in use."""
        depths = range(1, self._max_gamma + 1)
        now = max(self._gammas, default=0)
        return [
            depth
            for depth in depths
            if not now or now / 2 <= depth <= 2 * now or self._costs.has_drafted(depth)
        ]

    def _evaluate(self, gammas: Gammas, reached: Rates) -> _Plan:
        elapsed_s = self._costs.verify_s(int(gammas.sum()) + len(gammas))
        share = 1.0
        if num_drafted := int(np.count_nonzero(gammas)):
            elapsed_s += self._costs.propose_s(num_drafted, int(gammas.max()))
            share = self._costs.drafted_share(int(gammas.max()))
        # Of the last token of a draft that is now this and now that long, there is a part.
        there = np.clip(share * gammas[:, None] - np.arange(self._max_gamma), 0.0, 1.0)
        expected = len(gammas) + float((reached * there).sum())
        # Before the first measurement every round takes equally long, so drafting is tried.
        return _Plan(gammas, expected / (elapsed_s or 1.0))


def expected_tokens(acceptance_rate: float, gamma: int) -> float:
    """E[N] of a round with ``gamma`` draft tokens, in [1, gamma + 1].

    ``(1 - alpha^(gamma + 1)) / (1 - alpha)``: Leviathan et al. 2023, arXiv:2211.17192, equation 1.
    """
    if acceptance_rate >= 1.0:
        return gamma + 1.0
    return (1.0 - acceptance_rate ** (gamma + 1)) / (1.0 - acceptance_rate)


def _promise(plan: _Plan) -> float:
    return plan.tokens_per_s


def _rates(candidates: Sequence[Candidate]) -> Rates:
    return np.array([candidate.acceptance_rate for candidate in candidates], np.float64)


def _mean(candidates: Sequence[Candidate]) -> float:
    return sum(candidate.acceptance_rate for candidate in candidates) / len(candidates)
