"""What every `Runner` promises, checked on the real one and on the simulated one alike."""

from collections.abc import Callable

import pytest
import torch

from specdec.engine.runner import Runner
from specdec.errors import KVCacheFull, StaleCache
from tests.tiny_models import (
    VOCAB_SIZE,
    fed,
    fed_in_chunks,
    fresh_logits,
    item,
    model_runner,
    sequence_id,
    simulated_runner,
    tokens,
)

A, B = sequence_id("a"), sequence_id("b")

MakeRunner = Callable[..., Runner]


class Kind:
    """One implementation and how exactly it repeats itself."""

    def __init__(self, make: MakeRunner, tolerance: float) -> None:
        self.make = make
        self.tolerance = tolerance

    def assert_same(self, actual: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(actual, expected, rtol=0.0, atol=self.tolerance)


@pytest.fixture(params=[(model_runner, 1e-5), (simulated_runner, 0.0)], ids=["model", "simulated"])
def kind(request):
    return Kind(*request.param)


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
    runner = kind.make(max_context=77, kv_capacity_tokens=99)
    assert (runner.vocab_size, runner.max_context, runner.kv_capacity_tokens) == (VOCAB_SIZE, 77, 99)


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
    runner = kind.make(kv_capacity_tokens=10)
    runner.open(A)
    runner.open(B)
    fed(runner, "a", tokens(6))
    with pytest.raises(KVCacheFull):
        runner.forward([item("a", tokens(1)), item("b", tokens(4))])
    assert (runner.length(A), runner.length(B)) == (6, 0)
    runner.forward([item("a", tokens(1)), item("b", tokens(3))])
    assert runner.kv_tokens_in_use == runner.kv_capacity_tokens


def test_rollback_makes_room_at_once(kind):
    runner = kind.make(kv_capacity_tokens=10)
    runner.open(A)
    runner.open(B)
    fed(runner, "a", tokens(10))
    runner.truncate(A, 4)
    fed(runner, "b", tokens(6))
    assert runner.kv_tokens_in_use == 10


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


def test_tokens_in_use_are_the_lengths_of_the_open_sequences(runner):
    fed(runner, "a", tokens(6))
    fed(runner, "b", tokens(70))
    assert runner.kv_tokens_in_use == runner.length(A) + runner.length(B) == 76
    runner.truncate(B, 30)
    assert runner.kv_tokens_in_use == 36
    runner.close(A)
    assert runner.kv_tokens_in_use == 30
    runner.close(B)
    assert runner.kv_tokens_in_use == 0


def test_five_hundred_sequences_one_after_another_leave_nothing_behind(kind):
    runner = kind.make(kv_capacity_tokens=16)
    for _ in range(500):
        runner.open(A)
        fed(runner, "a", [3, 4], num_rows=1)
        runner.close(A)
    assert runner.kv_tokens_in_use == 0
