"""The policy for gamma against rounds whose times and acceptance are known."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass

import pytest

from specdec.speculation.acceptance import INITIAL_RATE, SmoothedAcceptance
from specdec.speculation.cost_model import (
    CHEAPEST_HOPE,
    FORGOTTEN_AFTER,
    HOPE_AFTER,
    RoundCosts,
    TimeCurve,
)
from specdec.speculation.policy import (
    LAST_PROBE_AFTER,
    PROBED_SEQUENCES,
    AdaptiveGamma,
    FixedGamma,
    expected_tokens,
)

MAX_GAMMA = 8
UNLIMITED = 1_000


@dataclass(frozen=True)
class Candidate:
    """See `specdec.speculation.policy.Candidate`."""

    acceptance_rate: float
    num_missing: int
    max_gamma: int


@dataclass
class World:
    """Rounds as a target and a draft of these speeds would make them."""

    acceptance_rate: float
    draft_step_s: float = 0.002
    verify_s: float = 0.016
    per_token_s: float = 0.0
    """Of verification, for every token."""
    batch_size: int = 1
    num_tokens: int = 0
    elapsed_s: float = 0.0
    num_drafting: int = 0
    num_rounds: int = 0
    slow_share: float = 0.0
    """Of verify calls, which take three times as long."""
    seed: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        shared = SmoothedAcceptance()
        self.acceptances = [SmoothedAcceptance(shared) for _ in range(self.batch_size)]
        self.missing = [UNLIMITED] * self.batch_size

    def round_s(self, gammas: list[int]) -> float:
        return self.propose_s(gammas) + self.verify_time_s(gammas)

    def propose_s(self, gammas: list[int]) -> float:
        return self.draft_step_s * max(gammas)

    def verify_time_s(self, gammas: list[int]) -> float:
        return self.verify_s + self.per_token_s * (sum(gammas) + len(gammas))

    def play(self, policy: AdaptiveGamma, num_rounds: int) -> None:
        for _ in range(num_rounds):
            candidates = [
                Candidate(acceptance.rate, missing, UNLIMITED)
                for acceptance, missing in zip(self.acceptances, self.missing, strict=True)
            ]
            gammas = policy.choose(candidates)
            num_drafted = sum(gamma > 0 for gamma in gammas)
            if num_drafted:
                policy.on_proposed(num_drafted, max(gammas), self.propose_s(gammas))
            luck = 3.0 if self.slow_share and self.random.random() < self.slow_share else 1.0
            policy.on_verified(sum(gammas) + len(gammas), luck * self.verify_time_s(gammas))
            self.elapsed_s += self.round_s(gammas)
            self.num_rounds += 1
            self.num_drafting += num_drafted > 0
            for idx, gamma in enumerate(gammas):
                self.num_tokens += 1 + self.accept(idx, gamma)

    def accept(self, idx: int, gamma: int) -> int:
        num_accepted = 0
        while num_accepted < gamma and self.random.random() < self.acceptance_rate:
            num_accepted += 1
        if gamma:
            self.acceptances[idx].record(gamma, num_accepted)
            self.missing[idx] = 2
        return num_accepted

    def tokens_per_s(self, gamma: int) -> float:
        """What a fixed gamma makes in the long run."""
        expected = self.batch_size * expected_tokens(self.acceptance_rate, gamma)
        return expected / self.round_s([gamma] * self.batch_size)

    def best_fixed(self) -> float:
        return max(self.tokens_per_s(gamma) for gamma in range(MAX_GAMMA + 1))


def played(world: World, num_rounds: int = 3000) -> World:
    world.play(AdaptiveGamma(MAX_GAMMA, RoundCosts()), num_rounds)
    return world


WORLDS = [
    World(acceptance_rate, draft_step_s, verify_s, per_token_s, batch_size)
    for acceptance_rate in (0.0, 0.3, 0.6, 0.8, 0.95)
    for draft_step_s, verify_s, per_token_s, batch_size in (
        (0.002, 0.016, 0.0, 1),
        (0.008, 0.016, 0.0, 1),
        (0.006, 0.016, 0.0, 1),
        (0.030, 0.016, 0.0, 1),
        (0.002, 0.008, 0.0006, 8),
        (0.003, 0.008, 0.0006, 32),
        (0.003, 0.040, 0.00001, 32),
    )
]


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_it_makes_about_as_many_tokens_as_the_best_fixed_gamma(world: World) -> None:
    played(world)
    assert world.num_tokens / world.elapsed_s > 0.95 * world.best_fixed()


def test_a_useless_draft_costs_less_than_two_percent_of_plain_decoding() -> None:
    world = played(World(0.0, draft_step_s=0.01), 5000)
    assert world.num_tokens / world.elapsed_s > 0.98 * world.tokens_per_s(0)
    assert 5 <= world.num_drafting <= 60


def test_a_draft_that_becomes_good_is_found_out() -> None:
    world = World(0.0)
    policy = AdaptiveGamma(MAX_GAMMA, RoundCosts())
    world.play(policy, 3000)
    world.acceptance_rate = 0.9
    world.play(policy, 6 * LAST_PROBE_AFTER)
    before = world.num_drafting
    world.play(policy, 100)
    assert world.num_drafting - before >= 98  # what plain rounds take is looked at again now and then


def test_it_stops_when_the_target_gets_busy_and_starts_again_afterwards() -> None:
    world = World(0.5, batch_size=4)
    policy = AdaptiveGamma(MAX_GAMMA, RoundCosts())
    world.play(policy, 200)
    world.per_token_s, world.verify_s = 0.01, 0.0
    world.play(policy, 200)
    before = world.num_drafting
    world.play(policy, 200)
    assert world.num_drafting - before < 20
    world.per_token_s, world.verify_s = 0.0, 0.016
    world.play(policy, 2000)
    before = world.num_drafting
    world.play(policy, 200)
    assert world.num_drafting - before > 180


def test_one_slow_moment_is_not_remembered() -> None:
    world = World(0.8)
    policy = AdaptiveGamma(MAX_GAMMA, RoundCosts())
    world.play(policy, 100)
    world.verify_s, slow_s = 0.5, world.verify_s
    world.play(policy, 2)
    world.verify_s = slow_s
    before = world.num_drafting
    world.play(policy, 50)
    assert world.num_drafting - before == 50


def test_good_and_bad_sequences_of_one_batch_get_different_gammas() -> None:
    costs = RoundCosts()
    for num_tokens in (2, 4, 8, 16):
        costs.on_verified(num_tokens, 0.008 + 0.002 * num_tokens)
    costs.on_proposed(2, 4, 0.004)
    policy = AdaptiveGamma(MAX_GAMMA, costs)
    good, bad = policy.choose([Candidate(0.95, 1, UNLIMITED), Candidate(0.05, 1, UNLIMITED)])
    assert good >= 3
    assert bad == 0


def test_no_candidate_gets_more_than_it_may() -> None:
    policy = AdaptiveGamma(MAX_GAMMA, RoundCosts())
    assert policy.choose([Candidate(0.99, 1, 0), Candidate(0.99, 1, 1), Candidate(0.99, 1, UNLIMITED)]) == [
        0,
        1,
        MAX_GAMMA,
    ]


def test_a_probe_takes_the_sequences_whose_draft_lacks_least_and_may_draft() -> None:
    costs = RoundCosts()
    for num_tokens in range(1, 80):
        costs.on_verified(num_tokens, 0.01 * num_tokens)
    policy = AdaptiveGamma(MAX_GAMMA, costs)
    candidates = [Candidate(0.1, 10 * idx, 0 if idx == 1 else 5) for idx in range(8)]
    chosen = [policy.choose(candidates) for _ in range(100)]
    probes = [gammas for gammas in chosen if any(gammas)]
    assert probes
    assert all(gammas == [1, 0, 1, 0, 0, 0, 0, 0] for gammas in probes)
    assert sum(probes[0]) == PROBED_SEQUENCES


@pytest.mark.parametrize("policy", [AdaptiveGamma(MAX_GAMMA, RoundCosts()), FixedGamma(3)])
def test_nobody_to_draft_for(policy: AdaptiveGamma | FixedGamma) -> None:
    assert [policy.choose([]) for _ in range(100)] == [[]] * 100


@pytest.mark.parametrize(
    ("acceptance_rate", "gamma", "expected"),
    [(0.0, 4, 1.0), (1.0, 4, 5.0), (0.8, 4, 3.3616), (0.5, 1, 1.5), (0.7, 0, 1.0)],
)
def test_expected_tokens(acceptance_rate: float, gamma: int, expected: float) -> None:
    assert expected_tokens(acceptance_rate, gamma) == pytest.approx(expected)


def test_the_smoothed_rate_is_the_rate_of_single_tokens() -> None:
    rng = random.Random(1)
    acceptance = SmoothedAcceptance(SmoothedAcceptance())
    assert acceptance.rate == pytest.approx(INITIAL_RATE)
    rates = []
    for _ in range(4000):
        num_accepted = 0
        while num_accepted < 5 and rng.random() < 0.7:
            num_accepted += 1
        acceptance.record(5, num_accepted)
        rates.append(acceptance.rate)
    assert sum(rates[100:]) / len(rates[100:]) == pytest.approx(0.7, abs=0.02)


def test_a_new_sequence_starts_with_what_the_others_showed() -> None:
    shared = SmoothedAcceptance()
    for _ in range(200):
        SmoothedAcceptance(shared).record(4, 0)
    assert SmoothedAcceptance(shared).rate < 0.1


def test_a_curve_is_read_between_its_points_in_proportion_below_and_flat_beyond() -> None:
    curve = TimeCurve()
    assert curve.at(3) == 0.0
    curve.add(2, 10.0)
    assert [curve.at(size) for size in (1, 2, 100)] == [5.0, 10.0, 10.0]
    curve.add(6, 30.0)
    assert [curve.at(size) for size in (1, 2, 4, 6, 7)] == [5.0, 10.0, 20.0, 30.0, 30.0]
    assert curve.slope(4) == pytest.approx(5.0)


def test_a_size_that_was_not_seen_for_long_is_forgotten() -> None:
    curve = TimeCurve()
    curve.add(8, 100.0)
    for _ in range(FORGOTTEN_AFTER - 1):
        curve.add(1, 1.0)
    assert curve.at(8) == 100.0
    curve.add(1, 1.0)
    assert curve.at(8) == 1.0


def test_outliers_do_not_count_until_they_are_the_rule() -> None:
    curve = TimeCurve()
    curve.add(1, 1.0)
    for _ in range(2):
        curve.add(1, 100.0)
    assert curve.at(1) == 1.0
    curve.add(1, 100.0)
    assert curve.at(1) > 20.0


def test_one_slow_call_moves_little_and_many_tell_the_truth() -> None:
    curve = TimeCurve()
    for _ in range(10):
        curve.add(8, 0.017)
    curve.add(8, 0.051)
    assert curve.at(8) == pytest.approx(0.017 * 1.1)
    for _ in range(40):
        curve.add(8, 0.051)
    assert curve.at(8) == pytest.approx(0.051, rel=0.01)


def test_a_larger_call_takes_no_less_than_a_smaller_one_and_the_latest_is_right() -> None:
    """So a size that was unlucky before it fell out of use does not stay dearer than what is used instead."""
    curve = TimeCurve()
    for size, elapsed_s in ((4, 0.014), (8, 0.026), (16, 0.022), (12, 0.018)):
        curve.add(size, elapsed_s)
    assert [curve.at(size) for size in (4, 8, 12, 16)] == [0.014, 0.018, 0.018, 0.022]
    for _ in range(20):
        curve.add(4, 0.020)
    assert 0.018 < curve.at(4) < 0.022
    assert [curve.at(size) for size in (8, 12, 16)] == [curve.at(4), curve.at(4), 0.022]


def test_slow_moments_do_not_make_it_draft_where_that_does_not_pay() -> None:
    """With one sequence drafts pay, with eight the target is bound by tokens. Some calls take three times as
    long."""
    shares = []
    for seed in range(20):
        policy = AdaptiveGamma(MAX_GAMMA, RoundCosts())
        sizes = {"slow_share": 0.02, "seed": seed}
        alone, busy = (World(0.35, 0.003, 0.0125, 0.0007, batch_size, **sizes) for batch_size in (1, 8))
        alone.play(policy, 150)
        busy.play(policy, 300)
        shares.append(busy.num_drafting / busy.num_rounds)
    print(shares)
    assert statistics.mean(shares) < 0.2


def test_drafts_that_are_there_at_once_or_not_at_all_are_timed_by_their_mean() -> None:
    costs = RoundCosts(is_ahead=True)
    for number in range(500):
        costs.on_proposed(1, 2, 0.012 if number % 5 == 0 else 0.001)
    assert costs.propose_s(1, 2) == pytest.approx(0.0032, rel=0.2)


def test_drafts_that_come_short_promise_less() -> None:
    """Asked for eight tokens it has two: then those that cost nothing more are better asked for."""
    choices = []
    for share in (0.25, 1.0):
        costs = RoundCosts(is_ahead=True)
        for num_tokens in range(1, MAX_GAMMA + 2):
            costs.on_verified(num_tokens, 0.016)
        for _ in range(100):
            costs.on_proposed(1, 8, 0.004, drafted_share=share)
            costs.on_proposed(1, 3, 0.002)
        assert costs.drafted_share(8) == pytest.approx(share)
        assert costs.drafted_share(3) == 1.0
        choices += AdaptiveGamma(MAX_GAMMA, costs).choose([Candidate(0.9, 1, UNLIMITED)])
    assert choices[0] < MAX_GAMMA
    assert choices[1] == MAX_GAMMA


def test_what_was_not_drafted_for_long_is_hoped_to_cost_less_but_not_nothing() -> None:
    costs = RoundCosts()
    costs.on_proposed(1, 4, 0.010)
    for _ in range(1000):
        costs.on_proposed(1, 1, 0.002)
    assert CHEAPEST_HOPE * 0.010 < costs.propose_s(1, 4) < 0.009
    for _ in range(HOPE_AFTER):
        costs.on_proposed(1, 1, 0.002)
    assert costs.propose_s(1, 4) == pytest.approx(CHEAPEST_HOPE * 0.010)
    assert costs.propose_s(1, 1) == pytest.approx(0.002)


def test_an_unlucky_moment_does_not_end_a_draft_that_pays() -> None:
    """Between what it takes to begin and what it takes to go on, things stay as they are."""
    costs = RoundCosts()
    for num_tokens in (1, 2):
        costs.on_verified(num_tokens, 0.016)
    costs.on_proposed(1, 1, 0.004)
    lucky, unlucky = [Candidate(0.30, 1, 1)], [Candidate(0.25, 1, 1)]
    begun, not_begun = AdaptiveGamma(1, costs), AdaptiveGamma(1, costs)
    assert [begun.choose(lucky) for _ in range(8)] == [[1]] * 8
    assert begun.choose(unlucky) == [1]
    assert not_begun.choose(unlucky) == [0]
