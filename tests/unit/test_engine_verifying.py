"""The target side of a round, on a real model by both paths and on a simulated one."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
from msgspec.structs import replace as changed

from specdec.engine.drafting import DraftEngine
from specdec.engine.verifying import TargetEngine
from specdec.messages import Draft, VerifyRequest
from tests.tiny_models import (
    COUPLED,
    GREEDY,
    OWNER,
    REJECTION,
    RUNNERS,
    feed,
    fresh_logits,
    in_blocks,
    judge,
    prefill,
    propose,
    runner_of,
    sequence_id,
    tiny_llama,
    tokens,
    verify,
)

A, B, C = (sequence_id(name) for name in "abc")
MODES = pytest.mark.parametrize("sampling", [GREEDY, REJECTION, COUPLED], ids=lambda s: s.mode.value)


class Pair:
    """A target, and drafts by a model of the same kind with other weights."""

    def __init__(self, make_runner):
        self.make_runner = make_runner

    def target(self, **limits):
        return TargetEngine(self.make_runner(**limits))

    def draft(self, f, gamma):
        [draft] = DraftEngine(self.make_runner(seed=1), 16).propose(propose((f, gamma))).drafts
        return draft


@pytest.fixture(params=RUNNERS.values(), ids=RUNNERS)
def pair(request):
    return Pair(request.param)


def verdict_of(engine, verify_item):
    [verdict] = engine.verify(verify(verify_item)).verdicts
    return verdict


def assert_same_verdict(actual, expected):
    assert (actual.sequence_id, actual.epoch) == (expected.sequence_id, expected.epoch)
    assert actual.token_ids == expected.token_ids
    np.testing.assert_allclose(actual.ratios, expected.ratios, rtol=1e-4)


def test_greedy_verdict_is_the_targets_choice_at_every_position(pair):
    prompt, engine = tokens(9), pair.target()
    draft = pair.draft(feed("a", prompt), 4)
    verdict = verdict_of(engine, judge(feed("a", prompt), draft))
    rows = fresh_logits(engine.runner, [*prompt, *draft.token_ids])[-5:]
    assert verdict.token_ids == tuple(rows.argmax(dim=-1).tolist())


@MODES
@pytest.mark.parametrize("gamma", [0, 1, 5])
def test_verdict_has_a_token_per_position_and_ratios_in_rejection_mode_only(pair, sampling, gamma):
    prompt = feed("a", tokens(9), sampling=sampling)
    verdict = verdict_of(pair.target(), judge(prompt, pair.draft(prompt, gamma) if gamma else None))
    assert len(verdict.token_ids) == gamma + 1
    assert len(verdict.ratios) == (gamma if sampling is REJECTION else 0)


def test_ratios_are_target_over_draft_probability(pair):
    prompt, engine = tokens(9), pair.target()
    draft = pair.draft(feed("a", prompt, sampling=REJECTION), 3)
    verdict = verdict_of(engine, judge(feed("a", prompt, sampling=REJECTION), draft))
    target_law = fresh_logits(engine.runner, [*prompt, *draft.token_ids])[-4:-1].softmax(dim=-1)
    for i, token in enumerate(draft.token_ids):
        draft_prob = draft.support_probs[i][draft.support_ids[i].tolist().index(token)]
        assert verdict.ratios[i] == pytest.approx(float(target_law[i, token]) / draft_prob, rel=1e-4)


def test_recovered_tokens_have_more_probability_in_the_target_than_in_the_draft(pair):
    prompt, engine = tokens(9), pair.target()
    for seed in range(20):
        sampling = replace(REJECTION, seed=seed)
        draft = pair.draft(feed("a", prompt, sampling=sampling), 2)
        verdict = verdict_of(engine, judge(feed("a", prompt, sampling=sampling), draft))
        target_law = fresh_logits(engine.runner, [*prompt, *draft.token_ids])[-3:-1].softmax(dim=-1)
        for i in range(2):
            support = dict(zip(draft.support_ids[i].tolist(), draft.support_probs[i].tolist(), strict=True))
            recovered = verdict.token_ids[i]
            assert float(target_law[i, recovered]) > support.get(recovered, 0.0)


def test_coupled_verdict_does_not_depend_on_the_draft_it_judges(pair):
    """The target's own tokens: the same one by one as behind a block that happens to be right."""
    prompt, engine, alone = tokens(9), pair.target(), []
    for _ in range(4):
        verdict = verdict_of(engine, judge(feed("a", [*prompt, *alone], sampling=COUPLED)))
        alone.extend(verdict.token_ids)
    right = Draft(sequence_id=A, epoch=0, token_ids=tuple(alone[:3]))
    assert verdict_of(engine, judge(feed("a", prompt, sampling=COUPLED), right)).token_ids == tuple(alone)


@MODES
def test_draft_of_the_same_model_is_accepted_whole(pair, sampling):
    prompt = feed("a", tokens(9), sampling=sampling)
    same = DraftEngine(pair.make_runner(), support=64)
    [draft] = same.propose(propose((prompt, 4))).drafts
    verdict = verdict_of(pair.target(), judge(prompt, draft))
    if sampling is REJECTION:
        np.testing.assert_allclose(verdict.ratios, 1.0, rtol=1e-4)
    else:
        assert verdict.token_ids[:4] == draft.token_ids


# Prefill --------------------------------------------------------------------------------------------------


def test_prefill_chunk_fills_the_cache_and_gets_no_verdict(pair):
    engine = pair.target()
    reply = engine.verify(verify(prefill(feed("a", tokens(9)))))
    assert (reply.verdicts, reply.lost) == ((), ())
    assert engine.runner.length(A) == 9


@MODES
def test_prefill_in_chunks_changes_no_verdict(pair, sampling):
    prompt = tokens(11)
    draft = pair.draft(feed("a", prompt, sampling=sampling), 3)
    whole = verdict_of(pair.target(), judge(feed("a", prompt, sampling=sampling), draft))
    engine = pair.target()
    first = changed(
        feed("a", prompt[:4], sampling=sampling),
        opening=feed("a", prompt, sampling=sampling).opening,
    )
    engine.verify(verify(prefill(first)))
    engine.verify(verify(prefill(feed("a", prompt[4:8], keep=4))))
    assert_same_verdict(verdict_of(engine, judge(feed("a", prompt[8:], keep=8), draft)), whole)


# Batches --------------------------------------------------------------------------------------------------


def test_modes_gammas_and_prefill_mix_in_one_batch(pair):
    opened = [
        feed("a", tokens(9), sampling=REJECTION),
        feed("b", tokens(40, seed=1)),
        feed("c", tokens(3, seed=2), sampling=COUPLED),
        feed("d", tokens(7, seed=3), sampling=replace(REJECTION, seed=8, top_p=0.8, temperature=0.7)),
        feed("e", tokens(2, seed=4), sampling=replace(GREEDY, frequency_penalty=1.5)),
        feed("f", tokens(5, seed=5), sampling=REJECTION),
    ]
    gammas = (3, 5, 1, 2, 4, 0)
    items = [
        judge(f, pair.draft(f, gamma) if gamma else None) for f, gamma in zip(opened, gammas, strict=True)
    ]
    chunk = prefill(feed("g", tokens(30, seed=6)))
    reply = pair.target().verify(verify(*items[:2], chunk, *items[2:]))
    assert reply.lost == ()
    for verdict, alone in zip(reply.verdicts, items, strict=True):
        assert_same_verdict(verdict, verdict_of(pair.target(), alone))


def test_stale_feed_is_lost_while_the_others_go_on_in_order(pair):
    f = feed("a", tokens(9))
    draft = pair.draft(f, 3)
    engine = pair.target()
    expected = verdict_of(engine, judge(f, draft))
    stale = judge(feed("b", [3], keep=5), changed(draft, sequence_id=B))
    other = judge(feed("c", tokens(9)), changed(draft, sequence_id=C))
    reply = engine.verify(verify(judge(f, draft), stale, other))
    assert [verdict.sequence_id for verdict in reply.verdicts] == [A, C]
    assert [verdict.token_ids for verdict in reply.verdicts] == [expected.token_ids] * 2
    assert [(lost.sequence_id, lost.out_of_memory) for lost in reply.lost] == [(B, False)]


def test_sequence_without_room_is_lost_while_the_others_go_on(pair):
    engine = pair.target(kv_capacity_tokens=48)
    draft = pair.draft(feed("a", tokens(14)), 3)
    reply = engine.verify(
        verify(judge(feed("a", tokens(14)), draft), judge(feed("b", tokens(32))), judge(feed("c", tokens(8))))
    )
    assert [verdict.sequence_id for verdict in reply.verdicts] == [A, C]
    assert [(lost.sequence_id, lost.out_of_memory) for lost in reply.lost] == [(B, True)]
    assert reply.kv_free_tokens == 48 - in_blocks(engine.runner, 14 + 3, 8)


def test_batch_of_stale_feeds_only_is_answered(pair):
    reply = pair.target().verify(verify(judge(feed("a", [3], keep=5))))
    assert reply.verdicts == ()
    assert len(reply.lost) == 1


def test_empty_request_is_answered(pair):
    reply = pair.target().verify(VerifyRequest(owner=OWNER, items=()))
    assert (reply.verdicts, reply.lost) == ((), ())


@MODES
def test_repeated_round_gives_the_same_verdict(pair, sampling):
    engine, prompt = pair.target(), feed("a", tokens(9), sampling=sampling)
    engine.verify(verify(prefill(prompt)))
    draft = pair.draft(feed("a", [*tokens(9), 5], sampling=sampling), 3)
    again = judge(feed("a", [5], keep=9), draft)
    assert_same_verdict(verdict_of(engine, again), verdict_of(engine, again))


def test_padded_ids_are_never_emitted():
    engine = TargetEngine(runner_of(tiny_llama(), vocab_size=20))
    items = [
        judge(feed(f"s{i}", [3 + i, 4], sampling=replace(sampling, seed=i)))
        for i in range(30)
        for sampling in [(GREEDY, REJECTION, COUPLED)[i % 3]]
    ]
    assert all(verdict.token_ids[0] < 20 for verdict in engine.verify(verify(*items)).verdicts)


# The wire -------------------------------------------------------------------------------------------------


def read_only(draft):
    """As it arrives through an object store: the arrays are views of shared memory."""
    buffers = []
    data = pickle.dumps(draft, protocol=5, buffer_callback=buffers.append)
    arrived = pickle.loads(data, buffers=[memoryview(bytes(buffer)) for buffer in buffers])
    assert not arrived.support_probs.flags.writeable
    return arrived


@pytest.mark.filterwarnings("error")
def test_read_only_arrays_are_as_good_as_any(pair):
    prompt = feed("a", tokens(9), sampling=REJECTION)
    draft = pair.draft(prompt, 4)
    expected = verdict_of(pair.target(), judge(prompt, draft))
    assert_same_verdict(verdict_of(pair.target(), judge(prompt, read_only(draft))), expected)
