"""CUDA graphs against the same decoder without, and drafting that never waits against drafting that does."""

from dataclasses import replace

import pytest
import torch

from specdec.engine import drafting
from specdec.engine.decoder import graphs
from specdec.engine.decoder.graphs import GraphedDecoder
from specdec.engine.drafting import DraftEngine
from specdec.engine.model_runner import ModelRunner
from tests.gpu.conftest import MAX_CONTEXT
from tests.tiny_models import COUPLED, GREEDY, REJECTION, VOCAB_SIZE, feed, item, propose, sequence_id, tokens

NAMES = "abc"


def runner_of(decoder, *, graphed):
    runner = ModelRunner(
        decoder, vocab_size=VOCAB_SIZE, max_context=MAX_CONTEXT, kv_capacity_tokens=16 * MAX_CONTEXT
    )
    if graphed:
        runner.model = GraphedDecoder(decoder, runner.cache, MAX_CONTEXT)
    return runner


def steps():
    """Prefill, single tokens, unequal blocks over an edge, rollbacks; (items, lengths to go back to)."""
    yield [item("a", tokens(250, 1), 1), item("b", tokens(40, 2), 0), item("c", tokens(511, 3), 0)], {}
    yield [item("a", [3]), item("c", [4])], {}
    yield [item("a", tokens(5, 4)), item("b", tokens(2, 5)), item("c", tokens(9, 6))], {"a": 254, "c": 512}
    yield [item("c", tokens(4, 7), 2), item("a", tokens(9, 8)), item("b", [9])], {"a": 255}
    yield [item("b", tokens(12, 9), 1), item("a", [5])], {}
    yield [item(name, tokens(3, seed)) for seed, name in enumerate(NAMES)], {}
    yield [item(name, [11]) for name in "cab"], {}


def logits_of(runner):
    rows = []
    for name in NAMES:
        runner.open(sequence_id(name))
    for items, kept in steps():
        rows.append(runner.forward(items).float().clone())
        for name, length in kept.items():
            runner.truncate(sequence_id(name), length)
    return torch.cat(rows)


def _warmer(sampling):
    """With a processor that uploads something."""
    return sampling if sampling is GREEDY else replace(sampling, temperature=0.8)


def assert_close(actual, expected):
    """Padding makes other kernels multiply, which round otherwise."""
    assert (actual - expected).abs().mean() <= 0.05 * expected.std()


@pytest.mark.parametrize("is_prepared", [False, True], ids=["captured when met", "captured at start"])
def test_graphs_give_the_logits_of_the_decoder(decoder, is_prepared):
    runner = runner_of(decoder, graphed=True)
    if is_prepared:
        runner.model.prepare()
        assert runner.model.num_graphs == len(graphs.NUM_SEGMENTS) * len(graphs.TOKENS_PER_SEGMENT)
    assert_close(logits_of(runner), logits_of(runner_of(decoder, graphed=False)))
    assert runner.model.num_graphs >= 4


def test_other_sequences_survive_padding(decoder):
    """A graph's padding is written to the scratch block: the neighbour's cache stays what it was."""
    runner = runner_of(decoder, graphed=True)
    for name in NAMES:
        runner.open(sequence_id(name))
    runner.forward([item(name, tokens(300, seed), 0) for seed, name in enumerate(NAMES)])
    before = [layer.keys.clone() for layer in runner.cache._layers.values()]
    runner.forward([item("b", tokens(3, 9))])
    own = set(runner.cache.blocks.table(sequence_id("b")))
    size = runner.cache.block_size
    for old, layer in zip(before, runner.cache._layers.values(), strict=True):
        is_changed = (old != layer.keys).flatten(1).any(dim=1)
        changed = set((is_changed.nonzero().flatten() // size).tolist())
        assert changed <= own | {runner.cache.scratch_block}


@pytest.mark.parametrize("graphed", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("sampling", [GREEDY, COUPLED, REJECTION], ids=lambda params: params.mode.value)
def test_unseen_drafts_are_the_seen_ones(decoder, sampling, graphed):
    request = propose(
        *((feed(name, tokens(20 + i, i), sampling=sampling), 6) for i, name in enumerate(NAMES))
    )
    seen, unseen = (
        DraftEngine(runner_of(decoder, graphed=graphed), 16, draws_unseen=draws_unseen).propose(request)
        for draws_unseen in (False, True)
    )
    assert [draft.token_ids for draft in unseen.drafts] == [draft.token_ids for draft in seen.drafts]


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED, REJECTION], ids=lambda params: params.mode.value)
def test_drafting_unseen_waits_at_its_end_only(decoder, sampling, monkeypatch):
    engine = DraftEngine(runner_of(decoder, graphed=True), 16)
    request = propose((feed("a", tokens(20), sampling=_warmer(sampling)), 6))
    engine.propose(request)  # captures, which waits
    look_at = drafting.look_at

    def looking_is_allowed(steps):
        torch.cuda.set_sync_debug_mode("default")
        look_at(steps)

    monkeypatch.setattr(drafting, "look_at", looking_is_allowed)
    torch.cuda.set_sync_debug_mode("error")
    try:
        [draft] = engine.propose(request).drafts
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(draft.token_ids) == 6
