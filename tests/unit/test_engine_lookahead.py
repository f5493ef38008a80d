"""Drafting ahead: what is prepared is what would have been drafted, and nothing of it is left behind."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from msgspec.structs import replace as changed

from specdec.engine.drafting import DraftEngine
from specdec.engine.runner import Runner
from specdec.engine.verifying import TargetEngine
from specdec.messages import Draft, ProposeItem, ProposeRequest, VerifyRequest
from specdec.speculation.pipeline import fan_out
from specdec.speculation.sequence import SequenceState
from specdec.types import GenerationRequest, SamplingParams, StopCriteria, VerificationMode
from tests.tiny_models import COUPLED, GREEDY, OWNER, REJECTION, RUNNERS, sequence_id, tokens

SUPPORT = 16
GAMMA = 3
BRANCHES = 8
NEVER: Callable[[], bool] = lambda: False  # noqa: E731
NOISES = {"equal": 0.0, "ordinary": 0.003, "bad": 0.02}
MODES = {"greedy": GREEDY, "rejection": REJECTION, "coupled": COUPLED}
PENALISED = replace(COUPLED, frequency_penalty=0.7, repetition_penalty=1.2)


class Pair:
    """A target, a draft that looks ahead and one that does not, and the sequences they decode."""

    def __init__(self, make: Callable[..., Runner], noise: float, **limits: int) -> None:
        self.target = TargetEngine(make())
        self.ahead = DraftEngine(make(noise=noise, **limits), SUPPORT)
        self.serial = DraftEngine(make(noise=noise), SUPPORT)
        self.states: list[SequenceState] = []
        self.texts: dict[str, list[int]] = {}
        self.num_prepared = self.num_drafts = self.num_postponed = 0

    def add(self, name: str, sampling: SamplingParams, *, prompt_len: int = 19, max_tokens: int = 40) -> None:
        request = GenerationRequest(
            sequence_id=sequence_id(name),
            prompt_ids=tuple(tokens(prompt_len, seed=len(self.states))),
            sampling=replace(sampling, seed=100 + len(self.states)),
            stop=StopCriteria(max_tokens=max_tokens),
        )
        self.states.append(SequenceState(request))
        self.texts[name] = []

    def play(self, is_interrupted: Callable[[], bool] = NEVER) -> None:
        """Rounds until all sequences have ended."""
        while running := [state for state in self.states if state.finish_reason is None]:
            self.round(running)
            self.ahead.look_ahead(is_interrupted)

    def round(self, running: list[SequenceState]) -> None:
        items = {
            state.sequence_id: state.propose_item(state.gamma(GAMMA, 10_000), 10_000, BRANCHES)
            for state in running
        }
        drafts = self.propose(tuple(items.values()))
        verify_items = []
        for state in running:
            draft = state.on_proposed(items[state.sequence_id], drafts[state.sequence_id])
            verify_items.append(state.verify_item(draft, 10_000))
        reply = self.target.verify(VerifyRequest(owner=OWNER, items=tuple(verify_items)))
        assert not reply.lost
        for state, item, verdict in zip(running, verify_items, reply.verdicts, strict=True):
            chunk = state.on_verdict(item.draft, verdict)
            assert chunk is not None
            self.texts[state.sequence_id] += chunk.token_ids
            if chunk.is_last:
                for engine in (self.target, self.ahead, self.serial):
                    engine.sessions.release([state.sequence_id])

    def propose(self, items: tuple[ProposeItem, ...]) -> dict[str, Draft]:
        ahead = self.ahead.propose(ProposeRequest(owner=OWNER, items=items))
        plain = tuple(changed(item, fan_out=()) for item in items)
        serial = self.serial.propose(ProposeRequest(owner=OWNER, items=plain))
        assert not ahead.lost
        assert not serial.lost
        expected = {draft.sequence_id: draft for draft in serial.drafts}
        for draft in ahead.drafts:
            self.count(draft, expected[draft.sequence_id])
        return {draft.sequence_id: draft for draft in ahead.drafts}

    def count(self, draft: Draft, expected: Draft) -> None:
        self.num_drafts += 1
        self.num_prepared += draft.is_prepared
        self.num_postponed += not draft.token_ids
        assert_begins_alike(draft, expected)

    def assert_empty(self) -> None:
        for engine in (self.target, self.ahead, self.serial):
            assert engine.runner.kv_tokens_in_use == 0
            assert len(engine.sessions) == 0


def assert_begins_alike(draft: Draft, expected: Draft) -> None:
    """The same tokens out of the same laws, as many as there are."""
    count = len(draft.token_ids)
    assert draft.token_ids == expected.token_ids[:count]
    if draft.support_ids is not None:
        assert expected.support_ids is not None
        np.testing.assert_array_equal(draft.support_ids, expected.support_ids[:count])
        np.testing.assert_allclose(draft.support_probs, expected.support_probs[:count], atol=1e-5)


@pytest.fixture(params=RUNNERS.values(), ids=RUNNERS)
def make(request: pytest.FixtureRequest) -> Callable[..., Runner]:
    return request.param


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
@pytest.mark.parametrize("sampling", MODES.values(), ids=MODES)
def test_what_is_prepared_is_what_would_have_been_drafted(make, sampling, noise) -> None:
    pair = Pair(make, noise)
    pair.add("one", sampling)
    pair.play()
    assert pair.num_prepared > 0
    pair.assert_empty()


def test_prepared_and_postponed_drafts_mix_in_a_batch(make) -> None:
    pair = Pair(make, NOISES["ordinary"])
    for number in range(6):
        mode = list(MODES.values())[number % 3]
        pair.add(f"s{number}", mode, prompt_len=10 + 7 * number, max_tokens=30 + 5 * number)
    pair.add("penalised", PENALISED)
    pair.play()
    assert pair.num_prepared > pair.num_drafts // 4
    assert pair.num_postponed > 0
    pair.assert_empty()


@pytest.mark.parametrize("seed", range(4))
def test_an_interruption_at_any_step_changes_no_draft(make, seed: int) -> None:
    rng = random.Random(seed)
    pair = Pair(make, NOISES["ordinary"])
    for number, mode in enumerate(MODES.values()):
        pair.add(f"s{number}", mode)
    pair.play(lambda: rng.random() < 0.4)
    pair.assert_empty()


def test_a_draft_equal_to_the_target_foresees_almost_every_outcome(make) -> None:
    pair = Pair(make, 0.0)
    pair.add("one", GREEDY)
    pair.play()
    assert pair.num_prepared >= pair.num_drafts - 2


@pytest.mark.parametrize("mode", [REJECTION, COUPLED], ids=["rejection", "coupled"])
def test_the_targets_noise_makes_good_guesses_of_sampled_tokens(make, mode: SamplingParams) -> None:
    """Blind guesses among 64 tokens at temperature 1 would seldom be right."""
    pair = Pair(make, NOISES["ordinary"])
    for number in range(4):
        pair.add(f"s{number}", mode, max_tokens=60)
    pair.play()
    assert pair.num_prepared > pair.num_drafts // 3


def test_without_room_for_branches_drafting_goes_on(make) -> None:
    pair = Pair(make, NOISES["ordinary"], kv_capacity_tokens=96)
    pair.add("one", GREEDY, max_tokens=40)
    pair.play()
    pair.assert_empty()


def test_branches_give_way_to_sequences(make) -> None:
    engine = DraftEngine(make(kv_capacity_tokens=128), SUPPORT)
    first = SequenceState(request("a", 40))
    engine.propose(proposal(first))
    engine.look_ahead(NEVER)
    in_use = engine.runner.kv_tokens_in_use
    reply = engine.propose(proposal(SequenceState(request("b", 60)), branches=0))
    assert not reply.lost
    assert len(engine.sessions) == 2
    assert in_use > 48


def test_releasing_a_sequence_frees_its_branches(make) -> None:
    engine = DraftEngine(make(), SUPPORT)
    engine.propose(proposal(SequenceState(request("a", 20))))
    engine.look_ahead(NEVER)
    engine.sessions.release([sequence_id("a")])
    assert engine.runner.kv_tokens_in_use == 0
    engine.look_ahead(NEVER)


def test_another_coordinator_gets_nothing_that_was_prepared(make) -> None:
    engine = DraftEngine(make(), SUPPORT)
    state = SequenceState(request("a", 20))
    engine.propose(proposal(state))
    engine.look_ahead(NEVER)
    stranger = replace(proposal(state), owner="another")
    item = stranger.items[0]
    moved = changed(item, feed=changed(item.feed, keep=20, token_ids=(1,), opening=None))
    reply = engine.propose(replace(stranger, items=(moved,)))
    assert not reply.drafts
    assert "cached here for" in reply.lost[0].reason


def test_a_failure_while_looking_ahead_costs_only_what_was_prepared(make, monkeypatch) -> None:
    pair = Pair(make, NOISES["ordinary"])
    pair.add("one", GREEDY)
    pair.round(pair.states)
    forward = pair.ahead.runner.forward
    monkeypatch.setattr(pair.ahead.runner, "forward", failing)
    with pytest.raises(RuntimeError, match="device"):
        pair.ahead.look_ahead(NEVER)
    monkeypatch.setattr(pair.ahead.runner, "forward", forward)
    assert not pair.ahead._ahead.is_pending
    pair.ahead.sessions.release([sequence_id("one")])
    assert pair.ahead.runner.kv_tokens_in_use == 0


def failing(*args: object) -> None:
    raise RuntimeError("device")


def request(name: str, prompt_len: int) -> GenerationRequest:
    return GenerationRequest(
        sequence_id=sequence_id(name),
        prompt_ids=tuple(tokens(prompt_len)),
        sampling=SamplingParams(mode=VerificationMode.GREEDY, temperature=0.0),
        stop=StopCriteria(max_tokens=100),
    )


def proposal(state: SequenceState, branches: int = BRANCHES) -> ProposeRequest:
    return ProposeRequest(owner=OWNER, items=(state.propose_item(GAMMA, 10_000, branches),))


@pytest.mark.parametrize(
    ("gamma", "rate", "num_branches", "expected"),
    [
        (4, 1.0, 8, (0, 0, 0, 0, 1)),
        (4, 0.0, 3, (3, 0, 0, 0, 0)),
        (0, 0.8, 3, (3,)),
        (2, 0.8, 4, (1, 1, 2)),
        (4, 0.8, 1, (0, 0, 0, 0, 1)),
    ],
)
def test_guesses_go_to_the_likeliest_outcomes(gamma, rate, num_branches, expected) -> None:
    assert fan_out(gamma, rate, num_branches) == expected
