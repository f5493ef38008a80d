"""Drafting without looking at the tokens until all are drawn: the same drafts and caches.

Bit for bit, as long as no draft stops early: then the other way has one row less to multiply from there on,
and sums may be rounded otherwise.
"""

from dataclasses import replace

import numpy as np
import pytest
from msgspec.structs import replace as changed

from specdec.engine.drafting import DraftEngine
from specdec.engine.model_runner import ModelRunner
from tests.tiny_models import (
    COUPLED,
    GREEDY,
    REJECTION,
    RUNNERS,
    block_size,
    decoder_runner,
    feed,
    item,
    propose,
    sequence_id,
    tokens,
)

SUPPORT = 16
BIASED = replace(COUPLED, seed=5, temperature=0.7, top_k=9, top_p=0.9, logit_bias=((7, 2.0), (9, -3.0)))
SAMPLING = {
    "greedy": GREEDY,
    "rejection": REJECTION,
    "coupled": COUPLED,
    "coupled with every processor but penalties": BIASED,
    "rejection at another temperature": replace(REJECTION, seed=11, temperature=1.7, min_p=0.05),
}
GAMMAS = (5, 0, 1, 3, 8)


@pytest.fixture(params=RUNNERS.values(), ids=RUNNERS)
def engines(request):
    """One that looks at every token, one that does not."""
    return [DraftEngine(request.param(), SUPPORT, draws_unseen=unseen) for unseen in (False, True)]


def assert_same_round(engines, *requests, tolerance=0.0):
    """Both give the same drafts and hold the same caches; returns the drafts."""
    seen, unseen = (engine.propose(propose(*requests)) for engine in engines)
    assert len(seen.drafts) == len(requests)
    for expected, actual in zip(seen.drafts, unseen.drafts, strict=True):
        assert actual.token_ids == expected.token_ids
        for name in ("support_ids", "support_probs"):
            law, expected_law = getattr(actual, name), getattr(expected, name)
            assert (law is None) == (expected_law is None)
            if law is not None:
                assert law.dtype == expected_law.dtype
                np.testing.assert_allclose(law, expected_law, rtol=0.0, atol=tolerance)
    assert caches_of(engines[1]) == caches_of(engines[0])
    return seen.drafts


def caches_of(engine):
    """By sequence: what the session holds, how long the cache is, and which full blocks can be shared."""
    runner = engine.runner
    if isinstance(runner, ModelRunner):
        runner.cache.blocks.check_invariants()
    return {
        name: (
            session.token_ids,
            runner.length(name),
            runner.cache.blocks._tables[name].digests if isinstance(runner, ModelRunner) else None,
        )
        for name, session in engine.sessions._sessions.items()
    }


def requests_of(names="abcde", *, stops=(), round_idx=0, gammas=GAMMAS, sampling=SAMPLING):
    return [
        (feed(name, tokens(9 + 4 * i, seed=i + 10 * round_idx), sampling=params, stop_token_ids=stops), gamma)
        for i, (name, params, gamma) in enumerate(zip(names, sampling.values(), gammas, strict=True))
    ]


@pytest.mark.parametrize("gammas", [GAMMAS, (4,) * 5, (1,) * 5, (0, 8, 0, 8, 2), (0,) * 5])
def test_modes_and_lengths_mix_in_one_batch(engines, gammas):
    assert_same_round(engines, *requests_of(gammas=gammas))


@pytest.mark.parametrize("name", SAMPLING)
def test_each_mode_alone(engines, name):
    assert_same_round(engines, (feed("a", tokens(9), sampling=SAMPLING[name]), 6))


@pytest.mark.parametrize("place", [0, 2, 4])
@pytest.mark.parametrize("sampling", [GREEDY, REJECTION, COUPLED], ids=lambda s: s.mode.value)
def test_block_ends_with_its_first_stop_token(engines, sampling, place):
    prompt = tokens(9, seed=1)
    [free] = assert_same_round(engines, (feed("a", prompt, sampling=sampling), 5))
    stop = free.token_ids[place]
    stopping = (feed("a", prompt, sampling=sampling, stop_token_ids=[stop, 1]), 5)
    first, _ = assert_same_round(
        engines, stopping, (feed("b", tokens(20), sampling=sampling), 5), tolerance=1e-5
    )
    assert first.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]


def test_many_stops_in_a_mixed_batch(engines):
    drafts = assert_same_round(engines, *requests_of(stops=range(3, 40), gammas=(8,) * 5), tolerance=1e-5)
    assert min(len(draft.token_ids) for draft in drafts) < 8


def test_rounds_behind_each_other(engines):
    """Rollback to any place, a catch-up after full acceptance, and sequences that come and go."""
    drafts = assert_same_round(engines, *requests_of(gammas=(4,) * 5))
    lengths = {draft.sequence_id: 9 + 4 * i for i, draft in enumerate(drafts)}
    for round_idx in range(1, 6):
        requests = []
        for i, draft in enumerate(drafts):
            accepted = (i + round_idx) % (len(draft.token_ids) + 1)
            cached = min(accepted, len(draft.token_ids) - 1)
            keep = lengths[draft.sequence_id] + cached
            new = [*draft.token_ids[cached:accepted], 3 + round_idx]
            lengths[draft.sequence_id] = keep + len(new)
            requests.append((changed(feed(draft.sequence_id, new, keep=keep), opening=None), 1 + i))
        drafts = assert_same_round(engines, *requests)


def test_penalties_in_the_batch_are_seen_token_by_token(engines):
    penalised = (feed("p", tokens(6), sampling=replace(GREEDY, presence_penalty=1000.0)), 12)
    drafts = assert_same_round(engines, penalised, *requests_of())
    assert len(set(drafts[0].token_ids)) == 12


def test_only_one_look_at_the_device_per_call(monkeypatch):
    looks = []
    monkeypatch.setattr("specdec.engine.drafting.look_at", lambda steps: looks.append(len(steps)))
    engine = DraftEngine(decoder_runner(), SUPPORT, draws_unseen=True)
    engine.propose(propose(*requests_of()))
    assert looks == [8]


def test_blocks_filled_by_drafts_are_shared_afterwards():
    """Two blocks of drafted tokens: known by their content as soon as the call ends, and not before."""
    engine = DraftEngine(decoder_runner(), SUPPORT, draws_unseen=True)
    size = block_size(engine.runner)
    prompt = tokens(size - 3)
    gamma = 2 * size
    [draft] = engine.propose(propose((feed("a", prompt), gamma))).drafts
    text = [*prompt, *draft.token_ids]
    blocks = engine.runner.cache.blocks
    blocks.check_invariants()
    before = blocks.num_used
    engine.propose(propose((feed("b", text), 0)))
    assert list(blocks.table(sequence_id("b")))[:2] == list(blocks.table(sequence_id("a")))[:2]
    assert blocks.num_used == before + 1


@pytest.mark.parametrize("fails_at", [1, 3])
def test_call_that_fails_half_way_leaves_a_cache_to_go_on_with(engines, monkeypatch, fails_at):
    engine = engines[1]
    prompt = tokens(14)
    engine.propose(propose((feed("a", prompt), 0)))
    behind = feed("a", [7], keep=14)
    forward, calls = engine.runner.forward, []

    def failing(items, *args):
        calls.append(items)
        if len(calls) == fails_at + 1:
            raise RuntimeError("device lost")
        return forward(items, *args)

    with monkeypatch.context() as broken:
        broken.setattr(engine.runner, "forward", failing)
        with pytest.raises(RuntimeError):
            engine.propose(propose((behind, 6)))
    engines[0].propose(propose((feed("a", prompt), 0)))
    assert_same_round(engines, (behind, 6))


def test_unseen_tokens_may_be_dropped(engines):
    """Whoever feeds them may go on without saying what they were."""
    runner = engines[1].runner
    a = sequence_id("a")
    runner.open(a)
    logits = runner.forward([item("a", tokens(5), num_rows=1)])
    runner.forward([item("a", [0])], logits.argmax(dim=-1))
    assert runner.length(a) == 6
    runner.truncate(a, 5)
    assert runner.length(a) == 5
    runner.forward([item("a", [0])], logits.argmax(dim=-1))
    runner.settle(a, logits.argmax(dim=-1).tolist())
    assert runner.length(a) == 6
