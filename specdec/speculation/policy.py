"""How many tokens to draft per sequence and round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from specdec.speculation.cost_model import RoundCosts


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sequence that might be drafted for."""

    acceptance_rate: float
    """How likely the next draft token is accepted, in [0, 1]."""
    num_missing: int
    """Tokens its draft worker has to be fed first."""
    max_gamma: int
    """Most that may be drafted for it, whatever the policy thinks."""


class GammaPolicy(Protocol):
    """Chooses gamma for the sequences of one lane, and is told what rounds took."""

    def choose(self, candidates: Sequence[Candidate]) -> list[int]:
        """Tokens to draft for each sequence of the next round; 0 is plain decoding."""
        ...

    def on_proposed(self, batch_size: int, gamma: int, elapsed_s: float) -> None:
        """A propose call drafted up to ``gamma`` tokens for each of ``batch_size`` sequences, and fed no
        prompt.
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

    def on_proposed(self, batch_size: int, gamma: int, elapsed_s: float) -> None:
        """Not asked for."""

    def on_verified(self, num_tokens: int, elapsed_s: float) -> None:
        """Not asked for."""


SOONEST_PROBE_AFTER, FIRST_PROBE_AFTER, LAST_PROBE_AFTER = 4, 32, 512
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
PAYS_FROM = 1.02
"""How much more than plain decoding speculation must promise: an estimate that is a little wrong costs
nothing."""


@dataclass(frozen=True, slots=True)
class _Plan:
    gammas: tuple[int, ...]
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
        self._gammas: tuple[int, ...] = ()
        self._rounds_left = 0
        self._num_plain_rounds = 0
        self._probe_after = FIRST_PROBE_AFTER
        self._rate_before_probe: float | None = None

    def choose(self, candidates: Sequence[Candidate]) -> list[int]:
        """See `GammaPolicy.choose`."""
        self._heed_probe(candidates)
        self._rounds_left -= 1
        if self._rounds_left <= 0 or len(self._gammas) != len(candidates):
            self._gammas = self._best(candidates).gammas
            is_known = self._costs.has_verified(sum(self._gammas) + len(candidates))
            self._rounds_left = REVIEW_EVERY if is_known else self._trial_rounds
        if not any(self._gammas):
            return self._plain(candidates)
        self._num_plain_rounds, self._probe_after = 0, FIRST_PROBE_AFTER
        return list(self._gammas)

    def on_proposed(self, batch_size: int, gamma: int, elapsed_s: float) -> None:
        """See `GammaPolicy.on_proposed`."""
        self._costs.on_proposed(batch_size, gamma, elapsed_s)

    def on_verified(self, num_tokens: int, elapsed_s: float) -> None:
        """See `GammaPolicy.on_verified`."""
        self._costs.on_verified(num_tokens, elapsed_s)

    def _plain(self, candidates: Sequence[Candidate]) -> list[int]:
        """No drafts, or a probe when it is time for one."""
        gammas = [0] * len(candidates)
        self._num_plain_rounds += 1
        if self._num_plain_rounds < self._probe_after or not candidates:
            return gammas
        self._num_plain_rounds = 0
        self._rate_before_probe = _mean(candidates)
        allowed = [idx for idx, candidate in enumerate(candidates) if self._limit(candidate)]
        for idx in sorted(allowed, key=lambda idx: candidates[idx].num_missing)[:PROBED_SEQUENCES]:
            gammas[idx] = 1
        return gammas

    def _heed_probe(self, candidates: Sequence[Candidate]) -> None:
        """After a probe: look at its result at once, and probe again sooner or later."""
        if self._rate_before_probe is None or not candidates:
            return
        is_accepted = _mean(candidates) > self._rate_before_probe
        is_hopeful = is_accepted and any(self._best([_if_good(c) for c in candidates]).gammas)
        after = self._probe_after // 4 if is_hopeful else self._probe_after * 2
        self._probe_after = max(SOONEST_PROBE_AFTER, min(after, LAST_PROBE_AFTER))
        self._rate_before_probe = None
        self._rounds_left = 0

    def _best(self, candidates: Sequence[Candidate]) -> _Plan:
        plain = best = self._evaluate([0] * len(candidates), candidates)
        for depth in range(1, self._max_gamma + 1):
            plan = self._evaluate(self._fill(candidates, depth, best.tokens_per_s), candidates)
            if plan.tokens_per_s > best.tokens_per_s:
                best = plan
        return best if best.tokens_per_s > PAYS_FROM * plain.tokens_per_s else plain

    def _fill(self, candidates: Sequence[Candidate], depth: int, tokens_per_s: float) -> list[int]:
        """Up to ``depth`` tokens each, as long as a token earns more than the target takes to verify it.

        What the draft takes for a token is shared by the batch, and weighed by trying every depth.
        """
        price = tokens_per_s * self._costs.seconds_per_verified_token(len(candidates) * (depth + 1))
        return [
            _affordable(candidate.acceptance_rate, min(depth, self._limit(candidate)), price)
            for candidate in candidates
        ]

    def _evaluate(self, gammas: Sequence[int], candidates: Sequence[Candidate]) -> _Plan:
        elapsed_s = self._costs.verify_s(sum(gammas) + len(gammas))
        if drafted := [gamma for gamma in gammas if gamma]:
            elapsed_s += self._costs.propose_s(len(drafted), max(drafted))
        pairs = zip(candidates, gammas, strict=True)
        expected = sum(expected_tokens(candidate.acceptance_rate, gamma) for candidate, gamma in pairs)
        # Before the first measurement every round takes equally long, so drafting is tried.
        return _Plan(tuple(gammas), expected / (elapsed_s or 1.0))

    def _limit(self, candidate: Candidate) -> int:
        return min(self._max_gamma, candidate.max_gamma)


def expected_tokens(acceptance_rate: float, gamma: int) -> float:
    """E[N] of a round with ``gamma`` draft tokens, in [1, gamma + 1].

    ``(1 - alpha^(gamma + 1)) / (1 - alpha)``: Leviathan et al. 2023, arXiv:2211.17192, equation 1.
    """
    if acceptance_rate >= 1.0:
        return gamma + 1.0
    return (1.0 - acceptance_rate ** (gamma + 1)) / (1.0 - acceptance_rate)


def _affordable(rate: float, depth: int, price: float) -> int:
    """How many of ``depth`` tokens are accepted with a probability above ``price``; it falls with each."""
    gamma = 0
    while gamma < depth and rate ** (gamma + 1) > price:
        gamma += 1
    return gamma


def _if_good(candidate: Candidate) -> Candidate:
    """The sequence if its draft were as good as drafts are."""
    return replace(candidate, acceptance_rate=max(GOOD_RATE, candidate.acceptance_rate))


def _mean(candidates: Sequence[Candidate]) -> float:
    return sum(candidate.acceptance_rate for candidate in candidates) / len(candidates)
