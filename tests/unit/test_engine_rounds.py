"""Rounds of real engines as a coordinator drives them: the caches always hold the committed log's prefix."""

from dataclasses import replace

import numpy as np
import pytest
from msgspec.structs import replace as changed

from specdec.engine.drafting import DraftEngine
from specdec.engine.verifying import TargetEngine
from specdec.messages import ProposeRequest, VerifyRequest
from specdec.speculation.sequence import SequenceState
from specdec.types import GenerationRequest, StopCriteria
from tests.tiny_models import (
    COUPLED,
    GREEDY,
    OWNER,
    REJECTION,
    RUNNERS,
    feed,
    propose,
    sequence_id,
    tokens,
)

A = sequence_id("a")
PROMPT_LEN = 9
GAMMA = 4
CHUNK = 512
SUPPORT = 64
NOISE = 0.0015
"""Makes a draft that is right about every other time."""
MODES = pytest.mark.parametrize("sampling", [GREEDY, REJECTION, COUPLED], ids=lambda s: s.mode.value)


class Rounds:
    """One sequence through two engines, one round at a time."""

    def __init__(self, draft, target, sampling):
        self.draft = DraftEngine(draft, SUPPORT)
        self.target = TargetEngine(target)
        request = GenerationRequest(
            sequence_id=A,
            prompt_ids=tuple(tokens(PROMPT_LEN)),
            sampling=sampling,
            stop=StopCriteria(max_tokens=1000),
        )
        self.state = SequenceState(request)

    @property
    def log(self):
        return self.state.log.tail(0)

    def propose(self, gamma=GAMMA):
        item = self.state.propose_item(gamma, CHUNK)
        reply = self.draft.propose(ProposeRequest(owner=OWNER, items=(item,)))
        assert reply.lost == ()
        return self.state.on_proposed(item, reply.drafts[0])

    def verify(self, draft):
        item = self.state.verify_item(draft, CHUNK)
        reply = self.target.verify(VerifyRequest(owner=OWNER, items=(item,)))
        assert reply.lost == ()
        return self.state.on_verdict(draft, reply.verdicts[0])

    def run(self, gamma=GAMMA):
        return self.verify(self.propose(gamma))


@pytest.fixture(params=RUNNERS.values(), ids=RUNNERS)
def make_runner(request):
    return request.param


def fresh_draft(make_runner, log, sampling, gamma):
    """What a draft engine proposes that has never seen anything but this log."""
    f = feed("a", log, sampling=sampling)
    f = changed(f, opening=replace(f.opening, prompt_len=PROMPT_LEN))
    [draft] = DraftEngine(make_runner(noise=NOISE), SUPPORT).propose(propose((f, gamma))).drafts
    return draft


@MODES
def test_long_lived_draft_cache_equals_a_fresh_one_in_every_round(make_runner, sampling):
    rounds = Rounds(make_runner(noise=NOISE), make_runner(), sampling)
    accepted = []
    for _ in range(25):
        log = rounds.log
        draft = rounds.propose()
        expected = fresh_draft(make_runner, log, sampling, GAMMA)
        assert draft.token_ids == expected.token_ids
        if draft.support_probs is not None:
            np.testing.assert_allclose(draft.support_probs, expected.support_probs, atol=1e-5)
        accepted.append(rounds.verify(draft).num_accepted)
        assert rounds.draft.runner.length(A) >= rounds.state.draft.length
        assert rounds.target.runner.length(A) >= rounds.state.target.length == len(rounds.log) - 1
    assert {0, GAMMA} < set(accepted), "the draft should be rejected at once, later and never"


@MODES
def test_long_lived_target_cache_equals_a_fresh_one_in_every_round(make_runner, sampling):
    rounds = Rounds(make_runner(noise=NOISE), make_runner(), sampling)
    for _ in range(25):
        draft = rounds.propose()
        again = Rounds(make_runner(noise=NOISE), make_runner(), sampling)
        again.state.log.commit(rounds.log[PROMPT_LEN:])
        fresh = again.verify(draft)
        assert rounds.verify(draft).token_ids == fresh.token_ids


@MODES
def test_same_model_as_draft_is_accepted_whole_in_every_round(make_runner, sampling):
    """After full acceptance the draft lacks its own last token, and is fed it next time."""
    rounds = Rounds(make_runner(), make_runner(), sampling)
    for i in range(30):
        before = len(rounds.log)
        chunk = rounds.run()
        assert (chunk.num_drafted, chunk.num_accepted) == (GAMMA, GAMMA)
        assert len(rounds.log) == before + GAMMA + 1
        assert rounds.state.draft.length == before + GAMMA - 1, f"round {i}"
    assert rounds.state.propose_item(GAMMA, CHUNK).feed.token_ids == rounds.log[-2:]


def test_gamma_may_change_in_every_round(make_runner):
    """Rounds without a draft among them: the draft catches up on what was committed meanwhile."""
    rounds = Rounds(make_runner(noise=NOISE), make_runner(), GREEDY)
    plain = Rounds(make_runner(noise=NOISE), make_runner(), GREEDY)
    for gamma in (1, 5, 0, 0, 3, 1, 0, 8, 2, 0, 4):
        rounds.run(gamma) if gamma else rounds.verify(None)
    while len(plain.log) < len(rounds.log):
        plain.verify(None)
    assert plain.log[: len(rounds.log)] == rounds.log
    draft = rounds.propose()
    assert draft.token_ids == fresh_draft(make_runner, rounds.log, GREEDY, GAMMA).token_ids


@MODES
def test_lost_caches_are_rebuilt_from_the_log(make_runner, sampling):
    undisturbed = Rounds(make_runner(noise=NOISE), make_runner(), sampling)
    disturbed = Rounds(make_runner(noise=NOISE), make_runner(), sampling)
    for i in range(12):
        undisturbed.run()
        if i in (3, 7):
            disturbed.draft = DraftEngine(make_runner(noise=NOISE), SUPPORT)
            disturbed.state.draft.restart()
        if i in (5, 7):
            disturbed.target = TargetEngine(make_runner())
            disturbed.state.target.restart()
        disturbed.run()
    assert disturbed.log == undisturbed.log
