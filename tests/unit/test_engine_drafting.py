"""The draft side of a round, on a real model by both paths and on a simulated one."""

from dataclasses import replace

import numpy as np
import pytest

from specdec.engine.drafting import DraftEngine
from specdec.messages import ProposeRequest
from tests.tiny_models import (
    COUPLED,
    GREEDY,
    OWNER,
    REJECTION,
    RUNNERS,
    feed,
    fresh_logits,
    in_blocks,
    propose,
    runner_of,
    sequence_id,
    tiny_llama,
    tokens,
)

SUPPORT = 16
A, B, C = (sequence_id(name) for name in "abc")


@pytest.fixture(params=[False, True], ids=["seen", "unseen"])
def draws_unseen(request):
    """Whether drafted tokens are looked at one by one, or stay on the device until all are drawn."""
    return request.param


@pytest.fixture(params=RUNNERS.values(), ids=RUNNERS)
def make_engine(request, draws_unseen):
    return lambda **limits: DraftEngine(request.param(**limits), SUPPORT, draws_unseen=draws_unseen)


@pytest.fixture
def engine(make_engine):
    return make_engine()


def drafted(engine, f, gamma):
    [draft] = engine.propose(propose((f, gamma))).drafts
    return draft


def assert_same_draft(actual, expected):
    assert (actual.sequence_id, actual.epoch) == (expected.sequence_id, expected.epoch)
    assert actual.token_ids == expected.token_ids
    assert (actual.support_ids is None) == (expected.support_ids is None)
    if actual.support_ids is not None:
        np.testing.assert_array_equal(actual.support_ids, expected.support_ids)
        np.testing.assert_allclose(actual.support_probs, expected.support_probs, atol=1e-5)


def test_greedy_draft_is_the_models_own_continuation(engine):
    prompt = tokens(9)
    expected = list(prompt)
    for _ in range(5):
        expected.append(int(fresh_logits(engine.runner, expected)[-1].argmax()))
    assert drafted(engine, feed("a", prompt), 5).token_ids == tuple(expected[9:])


def test_last_drafted_token_is_not_cached(engine):
    drafted(engine, feed("a", tokens(9)), 5)
    assert engine.runner.length(A) == 9 + 5 - 1


def test_catching_up_gives_an_empty_draft_and_fills_the_cache(engine):
    draft = drafted(engine, feed("a", tokens(9)), 0)
    assert (draft.token_ids, draft.support_ids, draft.support_probs) == ((), None, None)
    assert engine.runner.length(A) == 9
    behind = drafted(engine, feed("a", [7], keep=9), 3)
    assert_same_draft(behind, drafted(engine, feed("a", [*tokens(9), 7]), 3))


@pytest.mark.parametrize("place", [0, 2, 4])
def test_draft_ends_with_the_first_stop_token(engine, place):
    """It is not fed, and nothing is drafted behind it."""
    prompt = tokens(9, seed=1)
    free = drafted(engine, feed("a", prompt), 5).token_ids
    stop = free[place]
    first = free.index(stop)
    draft = drafted(engine, feed("a", prompt, stop_token_ids=[stop, 1]), 5)
    assert draft.token_ids == free[: first + 1]
    assert engine.runner.length(A) == 9 + first


def test_sequence_that_stops_leaves_the_others_drafting(engine):
    long, short = feed("a", tokens(9)), feed("b", tokens(5, seed=1))
    stop = drafted(engine, short, 1).token_ids[0]
    stopping = feed("b", tokens(5, seed=1), stop_token_ids=[stop])
    first, second = engine.propose(propose((long, 4), (stopping, 4))).drafts
    assert_same_draft(first, drafted(engine, long, 4))
    assert second.token_ids == (stop,)


def test_modes_drafts_and_catching_up_mix_in_one_batch(make_engine):
    requests = [
        (feed("a", tokens(9), sampling=REJECTION), 3),
        (feed("b", tokens(40, seed=1)), 5),
        (feed("c", tokens(3, seed=2), sampling=COUPLED), 1),
        (feed("d", tokens(20, seed=3), sampling=REJECTION), 0),
        (feed("e", tokens(7, seed=4), sampling=replace(REJECTION, seed=8, top_k=3)), 4),
        (feed("f", tokens(2, seed=5), sampling=replace(GREEDY, presence_penalty=2.0)), 5),
    ]
    together = make_engine().propose(propose(*requests))
    assert together.lost == ()
    for draft, (f, gamma) in zip(together.drafts, requests, strict=True):
        assert len(draft.token_ids) == gamma
        assert_same_draft(draft, drafted(make_engine(), f, gamma))


def test_rejection_draft_carries_the_law_it_was_drawn_from(engine):
    draft = drafted(engine, feed("a", tokens(9), sampling=REJECTION), 4)
    assert draft.support_ids.shape == draft.support_probs.shape == (4, SUPPORT)
    assert (draft.support_ids.dtype, draft.support_probs.dtype) == (np.int32, np.float32)
    np.testing.assert_allclose(draft.support_probs.sum(axis=1), 1.0, atol=1e-6)
    for token, ids, probs in zip(draft.token_ids, draft.support_ids, draft.support_probs, strict=True):
        assert len(set(ids.tolist())) == SUPPORT
        assert probs[ids.tolist().index(token)] > 0


def test_law_of_each_position_is_the_models_truncated_law(engine):
    prompt = tokens(9)
    draft = drafted(engine, feed("a", prompt, sampling=REJECTION), 3)
    rows = fresh_logits(engine.runner, [*prompt, *draft.token_ids[:-1]])[-3:]
    best, ids = rows.softmax(dim=-1).topk(SUPPORT)
    np.testing.assert_array_equal(draft.support_ids, ids.numpy())
    np.testing.assert_allclose(draft.support_probs, (best / best.sum(-1, keepdim=True)).numpy(), atol=1e-5)


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED])
def test_other_modes_carry_no_law(engine, sampling):
    draft = drafted(engine, feed("a", tokens(9), sampling=sampling), 4)
    assert len(draft.token_ids) == 4
    assert draft.support_ids is None
    assert draft.support_probs is None


@pytest.mark.parametrize("sampling", [GREEDY, REJECTION, COUPLED])
def test_same_request_twice_gives_the_same_draft(engine, sampling):
    """A round that is repeated after a lost answer changes nothing."""
    drafted(engine, feed("a", tokens(9), sampling=sampling), 2)
    again = feed("a", [5, 6], keep=9, sampling=sampling)
    assert_same_draft(drafted(engine, again, 4), drafted(engine, again, 4))


def test_penalties_see_the_draft_so_far(engine):
    sampling = replace(GREEDY, presence_penalty=1000.0)
    draft = drafted(engine, feed("a", tokens(9), sampling=sampling), 12)
    assert len(set(draft.token_ids)) == 12


def test_padded_ids_are_never_drafted():
    """The embedding has 64 rows, the tokenizer 20 ids."""
    runner = runner_of(tiny_llama(), vocab_size=20)
    engine = DraftEngine(runner, SUPPORT)
    requests = [
        (feed(f"s{i}", [3 + i, 4], sampling=sampling), 8)
        for i, sampling in enumerate((GREEDY, REJECTION, COUPLED, replace(COUPLED, seed=3)))
    ]
    drafts = engine.propose(propose(*requests)).drafts
    assert all(token < 20 for draft in drafts for token in draft.token_ids)
    assert max(draft.support_ids.max() for draft in drafts if draft.support_ids is not None) < 20


# Losses ---------------------------------------------------------------------------------------------------


def test_stale_feed_is_lost_while_the_others_go_on_in_order(engine):
    prompt = tokens(9)
    expected = drafted(engine, feed("c", prompt), 3)
    stale = feed("b", [3], keep=5)
    reply = engine.propose(propose((feed("a", prompt), 3), (stale, 3), (feed("c", prompt), 3)))
    assert [draft.sequence_id for draft in reply.drafts] == [A, C]
    assert [draft.token_ids for draft in reply.drafts] == [expected.token_ids] * 2
    assert [(lost.sequence_id, lost.out_of_memory) for lost in reply.lost] == [(B, False)]


def test_batch_of_stale_feeds_only_is_answered(engine):
    reply = engine.propose(propose((feed("a", [3], keep=5), 3)))
    assert reply.drafts == ()
    assert len(reply.lost) == 1


def test_empty_request_is_answered(engine):
    reply = engine.propose(ProposeRequest(owner=OWNER, items=()))
    assert (reply.drafts, reply.lost) == ((), ())


def test_sequence_without_room_is_lost_while_the_others_go_on(make_engine):
    engine = make_engine(kv_capacity_tokens=48)
    small = feed("b", tokens(8), sampling=REJECTION)
    reply = engine.propose(propose((feed("a", tokens(15)), 3), (feed("c", tokens(30)), 3), (small, 3)))
    assert [draft.sequence_id for draft in reply.drafts] == [A, B]
    assert [(lost.sequence_id, lost.out_of_memory) for lost in reply.lost] == [(C, True)]
    assert engine.runner.kv_tokens_in_use == in_blocks(engine.runner, 15 + 2, 8 + 2)


def test_room_kept_for_drafting_is_given_back_after_the_call(make_engine):
    engine = make_engine(kv_capacity_tokens=32)
    drafted(engine, feed("a", tokens(13)), 4)
    assert engine.runner.kv_tokens_in_use == 16
    assert drafted(engine, feed("b", tokens(16)), 1).sequence_id == B


def test_room_kept_for_drafting_is_given_back_after_a_call_that_failed(make_engine, monkeypatch):
    engine = make_engine(kv_capacity_tokens=16)
    drafted(engine, feed("a", tokens(12)), 0)
    behind = feed("a", [7], keep=12)

    def failing(items):
        raise RuntimeError("device lost")

    with monkeypatch.context() as broken:
        broken.setattr(engine.runner, "forward", failing)
        with pytest.raises(RuntimeError):
            drafted(engine, behind, 4)
    assert len(drafted(engine, behind, 4).token_ids) == 4
    assert engine.runner.kv_tokens_in_use == 16


def test_draft_that_would_outgrow_the_context_is_lost_and_a_shorter_one_is_not(make_engine):
    engine = make_engine(max_context=12)
    prompt = tokens(9)
    reply = engine.propose(propose((feed("a", prompt), 5)))
    assert "exceed the context of 12" in reply.lost[0].reason
    assert len(drafted(engine, feed("a", prompt), 4).token_ids) == 4
    assert engine.runner.length(A) == 12
