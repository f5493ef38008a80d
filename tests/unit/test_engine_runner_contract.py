"""What every `Runner` promises, checked on the real one by both paths and on the simulated one alike."""

from collections.abc import Callable

import pytest
import torch

from specdec.engine.runner import Runner
from specdec.errors import KVCacheFull, StaleCache
from tests.tiny_models import (
    RUNNERS,
    VOCAB_SIZE,
    block_size,
    fed,
    fed_in_chunks,
    fresh_logits,
    in_blocks,
    item,
    sequence_id,
    tokens,
)

A, B = sequence_id("a"), sequence_id("b")

MakeRunner = Callable[..., Runner]


class Kind:
    """One implementation, how exactly it repeats itself, and the size of its blocks."""

    def __init__(self, make: MakeRunner, tolerance: float) -> None:
        self.make = make
        self.tolerance = tolerance
        self.block = block_size(make())

    def assert_same(self, actual: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(actual, expected, rtol=0.0, atol=self.tolerance)


TOLERANCES = {"model": 2e-5, "decoder": 2e-5, "simulated": 0.0}


@pytest.fixture(params=RUNNERS)
def kind(request):
    return Kind(RUNNERS[request.param], TOLERANCES[request.param])


@pytest.fixture
def runner(kind):
    runner = kind.make()
    runner.open(A)
    runner.open(B)
    return runner


def test_opened_sequence_is_empty(runner):
    assert runner.length(A) == 0
    assert runner.kv_tokens_in_use == 0


def test_forward_advances_length_by_the_tokens_fed(runner):
    fed(runner, "a", tokens(5))
    fed(runner, "a", tokens(2))
    assert runner.length(A) == 7
    assert runner.length(B) == 0


def test_limits_are_those_it_was_made_with(kind):
    """Of the cache, whole blocks."""
    runner = kind.make(max_context=77, kv_capacity_tokens=99)
    assert (runner.vocab_size, runner.max_context) == (VOCAB_SIZE, 77)
    assert runner.kv_capacity_tokens == (99 if kind.block == 1 else 112)


def test_logits_have_one_row_per_row_wanted_and_cover_the_vocabulary(runner):
    logits = runner.forward([item("a", tokens(5), num_rows=2), item("b", tokens(3), num_rows=1)])
    assert logits.shape[0] == 3
    assert logits.shape[1] >= runner.vocab_size
    assert logits.dtype == torch.float32


@pytest.mark.parametrize("size", [1, 3, 4, 20])
def test_chunked_prefill_equals_whole_prefill(kind, runner, size):
    token_ids = tokens(20)
    kind.assert_same(fed_in_chunks(runner, "a", token_ids, size), fresh_logits(runner, token_ids))


@pytest.mark.parametrize("num_rows", [0, 1, 2, 6])
def test_wanted_rows_are_the_last_ones(kind, runner, num_rows):
    token_ids = tokens(6)
    expected = fresh_logits(runner, token_ids)[6 - num_rows :]
    kind.assert_same(fed(runner, "a", token_ids, num_rows), expected)


def test_ragged_batch_equals_each_sequence_alone(kind, runner):
    """Lengths that differ tenfold, one mid-decode, one without rows, in both orders."""
    runner.open(sequence_id("c"))
    long, short, chunk = tokens(50, 1), tokens(5, 2), tokens(9, 3)
    alone = {name: fresh_logits(runner, ids) for name, ids in (("a", long), ("b", short))}
    fed(runner, "b", short[:4])
    logits = runner.forward([item("a", long, 3), item("c", chunk, 0), item("b", short[4:], 1)])
    kind.assert_same(logits[:3], alone["a"][-3:])
    kind.assert_same(logits[3:], alone["b"][-1:])
    after = runner.forward([item("c", long[:1], 1), item("a", short, 5)])
    kind.assert_same(after[:1], fresh_logits(runner, chunk + long[:1])[-1:])
    kind.assert_same(after[1:], fresh_logits(runner, long + short)[-5:])


@pytest.mark.parametrize("kept", range(0, 13, 3))
def test_rollback_then_refeed_equals_never_having_fed_the_tail(kind, runner, kept):
    token_ids, rejected = tokens(12, 1), tokens(7, 2)
    fed(runner, "a", token_ids[:kept] + rejected)
    runner.truncate(A, kept)
    assert runner.length(A) == kept
    if kept < 12:
        kind.assert_same(fed(runner, "a", token_ids[kept:]), fresh_logits(runner, token_ids)[kept:])


def test_repeated_rollbacks_leave_no_trace(kind, runner):
    """Eight rounds of a draft of four of which one token stays, beside a sequence that keeps all."""
    token_ids = tokens(9, 1)
    fed(runner, "a", token_ids[:1])
    for done in range(1, 9):
        wrong = tokens(3, seed=done)
        runner.forward([item("a", [token_ids[done], *wrong]), item("b", tokens(4, seed=100 + done))])
        runner.truncate(A, done + 1)
    kind.assert_same(fed(runner, "a", [5]), fresh_logits(runner, [*token_ids, 5])[-1:])
    kept = [token for done in range(1, 9) for token in tokens(4, seed=100 + done)]
    kind.assert_same(fed(runner, "b", [5]), fresh_logits(runner, [*kept, 5])[-1:])


def test_truncating_to_the_present_length_changes_nothing(kind, runner):
    fed(runner, "a", tokens(6))
    runner.truncate(A, 6)
    kind.assert_same(fed(runner, "a", [9]), fresh_logits(runner, [*tokens(6), 9])[-1:])


def test_truncating_beyond_the_length_is_stale_and_keeps_the_cache(runner):
    fed(runner, "a", tokens(6))
    with pytest.raises(StaleCache, match=r"sequence a: keep 7, but 6"):
        runner.truncate(A, 7)
    assert runner.length(A) == 6


def test_full_cache_feeds_nothing_of_the_whole_batch(kind):
    block = kind.block
    runner = kind.make(kv_capacity_tokens=10 * block)
    runner.open(A)
    runner.open(B)
    fed(runner, "a", tokens(6 * block))
    with pytest.raises(KVCacheFull):
        runner.forward([item("a", tokens(1)), item("b", tokens(3 * block + 1))])
    assert (runner.length(A), runner.length(B)) == (6 * block, 0)
    runner.forward([item("a", tokens(block)), item("b", tokens(3 * block))])
    assert runner.kv_tokens_in_use == runner.kv_capacity_tokens


def test_rollback_makes_room_at_once(kind):
    block = kind.block
    runner = kind.make(kv_capacity_tokens=10 * block)
    runner.open(A)
    runner.open(B)
    fed(runner, "a", tokens(10 * block))
    runner.truncate(A, 4 * block)
    fed(runner, "b", tokens(6 * block))
    assert runner.kv_tokens_in_use == 10 * block


def test_reserved_item_and_its_extra_tokens_fit_whatever_is_fed_in_between(kind):
    block = kind.block
    runner = kind.make(kv_capacity_tokens=10 * block)
    runner.open(A)
    runner.open(B)
    runner.reserve(item("a", tokens(3 * block)), num_extra=2 * block)
    assert (runner.length(A), runner.kv_tokens_in_use) == (0, 5 * block)
    with pytest.raises(KVCacheFull):
        fed(runner, "b", tokens(5 * block + 1))
    fed(runner, "b", tokens(5 * block))
    fed(runner, "a", tokens(3 * block))
    for _ in range(2 * block):
        fed(runner, "a", tokens(1))
    assert runner.length(A) == 5 * block
    assert runner.kv_tokens_in_use == 10 * block


def test_reserving_again_for_the_same_item_takes_nothing_more(kind, runner):
    for _ in range(3):
        runner.reserve(item("a", tokens(5)), num_extra=3)
    assert runner.kv_tokens_in_use == in_blocks(runner, 8)


def test_rollback_gives_back_what_was_reserved(kind):
    block = kind.block
    runner = kind.make(kv_capacity_tokens=10 * block)
    runner.open(A)
    fed(runner, "a", tokens(block))
    runner.reserve(item("a", tokens(1)), num_extra=9 * block - 1)
    assert runner.kv_tokens_in_use == 10 * block
    runner.truncate(A, block)
    assert runner.kv_tokens_in_use == block


def test_reserving_beyond_the_cache_is_refused_and_changes_nothing(kind):
    block = kind.block
    runner = kind.make(kv_capacity_tokens=10 * block)
    runner.open(A)
    fed(runner, "a", tokens(3 * block))
    with pytest.raises(KVCacheFull):
        runner.reserve(item("a", tokens(1)), num_extra=7 * block)
    assert (runner.length(A), runner.kv_tokens_in_use) == (3 * block, 3 * block)
    runner.reserve(item("a", tokens(1)), num_extra=7 * block - 1)


def test_reserving_beyond_the_context_is_stale_and_changes_nothing(kind):
    runner = kind.make(max_context=8)
    runner.open(A)
    fed(runner, "a", tokens(5))
    with pytest.raises(StaleCache, match="sequence a: 9 positions exceed the context of 8"):
        runner.reserve(item("a", tokens(2)), num_extra=2)
    assert (runner.length(A), runner.kv_tokens_in_use) == (5, in_blocks(runner, 5))
    runner.reserve(item("a", tokens(2)), num_extra=1)


def test_outgrown_context_feeds_nothing_of_the_whole_batch(kind):
    runner = kind.make(max_context=8)
    runner.open(A)
    runner.open(B)
    fed(runner, "a", tokens(7))
    with pytest.raises(StaleCache, match="context of 8"):
        runner.forward([item("b", tokens(2)), item("a", tokens(2))])
    assert (runner.length(A), runner.length(B)) == (7, 0)
    fed(runner, "a", tokens(1))
    assert runner.length(A) == runner.max_context


def test_closing_an_unknown_sequence_is_ignored(runner):
    runner.close(sequence_id("never opened"))
    runner.close(A)
    runner.close(A)
    assert runner.kv_tokens_in_use == 0


def test_reopening_drops_the_old_cache(kind, runner):
    fed(runner, "a", tokens(6))
    runner.open(A)
    assert runner.length(A) == 0
    assert runner.kv_tokens_in_use == 0
    token_ids = tokens(4, seed=5)
    kind.assert_same(fed(runner, "a", token_ids), fresh_logits(runner, token_ids))


def test_tokens_in_use_are_the_lengths_of_the_open_sequences_in_whole_blocks(runner):
    fed(runner, "a", tokens(6))
    fed(runner, "b", tokens(70))
    assert (runner.length(A), runner.length(B)) == (6, 70)
    assert runner.kv_tokens_in_use == in_blocks(runner, 6, 70)
    runner.truncate(B, 30)
    assert runner.kv_tokens_in_use == in_blocks(runner, 6, 30)
    runner.close(A)
    assert runner.kv_tokens_in_use == in_blocks(runner, 30)
    runner.close(B)
    assert runner.kv_tokens_in_use == 0


def test_five_hundred_sequences_one_after_another_leave_nothing_behind(kind):
    runner = kind.make(kv_capacity_tokens=16)
    for _ in range(500):
        runner.open(A)
        fed(runner, "a", [3, 4], num_rows=1)
        runner.close(A)
    assert runner.kv_tokens_in_use == 0
