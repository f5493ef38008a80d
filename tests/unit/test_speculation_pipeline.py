"""How rounds overlap: what is chosen, and how much the draft is asked to prepare."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from specdec.speculation.pipeline import (
    LAST_TRIAL_AFTER,
    WINDOW_ROUNDS,
    AdaptivePipeline,
    BranchBudget,
    FixedPipeline,
    new_pipeline_policy,
)
from specdec.types import Overlap

WAYS: tuple[Overlap, ...] = ("lookahead", "groups", "serial")


class World:
    """Rounds that take what they are told to, by overlap."""

    def __init__(
        self, policy: AdaptivePipeline, seconds: Callable[[Overlap], float], noise: float = 0.05
    ) -> None:
        self.policy = policy
        self.seconds = seconds
        self.now_s = 0.0
        self.num_sequences = 8
        self.rounds: dict[Overlap, int] = dict.fromkeys(WAYS, 0)
        self._noise = noise
        self._random = random.Random(1)

    def run(self, num_rounds: int) -> None:
        for _ in range(num_rounds):
            way = self.policy.overlap
            self.rounds[way] += 1
            self.now_s += self.seconds(way) * self._random.gauss(1.0, self._noise)
            self.policy.on_round(self.num_sequences, 3.0 * self.num_sequences, self.now_s)

    def share(self, way: Overlap) -> float:
        return self.rounds[way] / sum(self.rounds.values())


@pytest.mark.parametrize("best", WAYS)
def test_auto_finds_the_fastest_way_and_stays_with_it(best):
    world = World(AdaptivePipeline(WAYS), lambda way: 0.016 if way == best else 0.022)
    world.run(50 * WINDOW_ROUNDS)
    world.rounds = dict.fromkeys(WAYS, 0)
    world.run(400 * WINDOW_ROUNDS)
    assert world.share(best) > 1 - 2 / LAST_TRIAL_AFTER - 0.02


def test_auto_changes_its_mind_when_the_world_does():
    best: Overlap = "lookahead"
    world = World(AdaptivePipeline(WAYS), lambda way: 0.016 if way == best else 0.022)
    world.run(300 * WINDOW_ROUNDS)
    best = "serial"
    world.run(3 * LAST_TRIAL_AFTER * WINDOW_ROUNDS)
    world.rounds = dict.fromkeys(WAYS, 0)
    world.run(100 * WINDOW_ROUNDS)
    assert world.share("serial") > 0.8


def test_a_slump_is_looked_into_at_once():
    """Trials are rare after a long time; a way that suddenly takes twice as long does not wait for one."""
    policy = AdaptivePipeline(WAYS)
    is_slow = False
    world = World(policy, lambda way: 0.032 if is_slow and way == "lookahead" else 0.016, noise=0.0)
    world.run(400 * (WINDOW_ROUNDS + 2))
    is_slow = True
    world.rounds = dict.fromkeys(WAYS, 0)
    world.run(8 * (WINDOW_ROUNDS + 2))
    assert policy.overlap != "lookahead"


def test_a_difference_within_the_noise_changes_nothing():
    world = World(AdaptivePipeline(WAYS), lambda way: 0.016, noise=0.01)
    world.run(300 * WINDOW_ROUNDS)
    assert world.share("lookahead") > 0.9


def test_one_sequence_is_never_two_groups():
    world = World(AdaptivePipeline(WAYS), lambda way: 0.010 if way == "groups" else 0.022)
    world.num_sequences = 1
    world.run(100 * WINDOW_ROUNDS)
    assert world.rounds["groups"] == 0
    world.num_sequences = 8
    world.run(100 * WINDOW_ROUNDS)
    assert world.policy.overlap == "groups"
    world.num_sequences = 1
    world.run(1)
    assert world.policy.overlap == "lookahead"


def test_windows_with_other_numbers_of_sequences_are_not_compared():
    """The load doubles in the middle of a trial, which looks like a gain of twice the tokens."""
    policy = AdaptivePipeline(WAYS)
    world = World(policy, lambda way: 0.016 if way == "lookahead" else 0.022, noise=0.0)
    while policy.overlap == "lookahead":
        world.run(1)
    world.num_sequences = 16
    world.rounds = dict.fromkeys(WAYS, 0)
    world.run(40 * WINDOW_ROUNDS)
    assert world.share("lookahead") > 0.7


def test_rounds_are_serial_while_draft_and_target_share_a_device():
    policy = AdaptivePipeline(WAYS)
    policy.on_drafts(shares_device=True)
    world = World(policy, lambda way: 0.016)
    world.run(20 * WINDOW_ROUNDS)
    assert world.share("serial") == 1.0
    policy.on_drafts(shares_device=False)
    assert policy.overlap == "lookahead"


def test_an_idle_lane_is_not_timed():
    policy = AdaptivePipeline(WAYS)
    world = World(policy, lambda way: 0.016 if way == "lookahead" else 0.017, noise=0.0)
    for _ in range(20):
        world.run(WINDOW_ROUNDS)
        world.now_s += 100.0
        policy.on_idle()
    assert policy.overlap == "lookahead"


@pytest.mark.parametrize("way", WAYS)
def test_a_setting_is_kept_at_any_time(way):
    policy = new_pipeline_policy(way)
    assert isinstance(policy, FixedPipeline)
    policy.on_drafts(shares_device=True)
    for number in range(1000):
        policy.on_round(4, 10.0, float(number))
    assert policy.overlap == way


def test_a_draft_that_gets_done_is_asked_for_more_and_one_that_does_not_for_less():
    budget = BranchBudget(8)
    assert budget.num_branches == 8
    for _ in range(50):
        budget.on_answer(is_done=False)
    assert budget.num_branches == 1
    for _ in range(3):
        budget.on_answer(is_done=True)
    assert budget.num_branches == 4
    for _ in range(50):
        budget.on_answer(is_done=True)
    assert budget.num_branches == 8


def test_the_number_of_branches_settles_around_what_fits():
    """Five branches fit into a verification: asked for more, the draft is interrupted."""
    budget = BranchBudget(16)
    asked = []
    for _ in range(200):
        asked.append(budget.num_branches)
        budget.on_answer(is_done=asked[-1] <= 5)
    assert set(asked[50:]) <= {4, 5, 6}
