"""The KV cache: contents survive growth, rollback moves nothing. See also the one in tests/property."""

import pytest
import torch

from specdec.engine.kv_store import KVStore
from specdec.errors import InvariantViolation, KVCacheFull, StaleCache
from tests.tiny_models import sequence_id

A, B = sequence_id("a"), sequence_id("b")
KV_HEADS, HEAD_DIM, VALUE_HEAD_DIM, NUM_LAYERS = 2, 4, 3, 2


@pytest.fixture
def store():
    store = KVStore(capacity_tokens=1000)
    store.open(A)
    return store


def stamped(first: float, count: int, width: int = HEAD_DIM) -> torch.Tensor:
    """[kv_heads, count, width]: position i holds ``first + i`` everywhere."""
    stamps = torch.arange(count, dtype=torch.float32) + first
    return stamps.view(1, count, 1).expand(KV_HEADS, count, width)


def append(store, sequence, first, count):
    """Write one position per count in every layer; returns the views of the last layer."""
    for layer_idx in range(NUM_LAYERS):
        views = store.append(
            sequence, layer_idx, stamped(first, count), stamped(-first - count, count, VALUE_HEAD_DIM)
        )
    store.advance(sequence, count)
    store.check_invariants()
    return views


@pytest.mark.parametrize(
    "chunks", [(63, 1, 1), (64, 1), (60, 9), (64, 16, 1), (128, 1), (100, 100), (1, 300), (64, 64, 64)]
)
def test_growth_across_a_capacity_boundary_keeps_contents(store, chunks):
    done = 0
    for count in chunks:
        keys, _ = append(store, A, done, count)
        done += count
    torch.testing.assert_close(keys, stamped(0, done))


def test_values_may_be_narrower_than_keys(store):
    keys, values = append(store, A, 0, 5)
    assert keys.shape == (KV_HEADS, 5, HEAD_DIM)
    assert values.shape == (KV_HEADS, 5, VALUE_HEAD_DIM)
    torch.testing.assert_close(values, stamped(-5, 5, VALUE_HEAD_DIM))


@pytest.mark.parametrize("kept", [0, 1, 63, 64, 65, 95])
def test_rollback_and_append_in_its_place_move_nothing(store, kept):
    keys, values = append(store, A, 0, 100)
    places = (keys.data_ptr(), values.data_ptr())
    store.truncate(A, kept)
    assert store.length(A) == kept
    keys, values = append(store, A, 1000, 5)
    assert (keys.data_ptr(), values.data_ptr()) == places
    torch.testing.assert_close(keys[:, :kept], stamped(0, kept))
    torch.testing.assert_close(keys[:, kept:], stamped(1000, 5))


def test_appending_within_capacity_copies_nothing(store):
    keys, _ = append(store, A, 0, 1)
    place = keys.data_ptr()
    for i in range(1, 64):
        keys, _ = append(store, A, i, 1)
        assert keys.data_ptr() == place


def test_length_moves_when_all_layers_are_written(store):
    store.append(A, 0, stamped(0, 3), stamped(0, 3))
    assert store.length(A) == 0
    store.append(A, 1, stamped(0, 3), stamped(0, 3))
    store.advance(A, 3)
    assert store.length(A) == 3


def test_write_that_was_never_counted_is_overwritten(store):
    """A forward that failed half-way leaves no trace."""
    append(store, A, 0, 4)
    store.append(A, 0, stamped(500, 70), stamped(500, 70, VALUE_HEAD_DIM))
    keys, _ = append(store, A, 4, 2)
    torch.testing.assert_close(keys, stamped(0, 6))


def test_sequences_do_not_share_memory(store):
    store.open(B)
    append(store, A, 0, 5)
    append(store, B, 100, 5)
    keys, _ = append(store, A, 5, 1)
    torch.testing.assert_close(keys, stamped(0, 6))


def test_rollback_beyond_what_is_held_is_stale(store):
    append(store, A, 0, 5)
    with pytest.raises(StaleCache, match=r"keep 6, but 5"):
        store.truncate(A, 6)
    assert store.length(A) == 5


def test_room_is_counted_over_all_sequences():
    store = KVStore(capacity_tokens=10)
    for sequence in (A, B):
        store.open(sequence)
        append(store, sequence, 0, 4)
    store.reserve(2)
    with pytest.raises(KVCacheFull, match=r"3 tokens .* wanted, 2 of 10 free"):
        store.reserve(3)
    store.close(A)
    store.reserve(6)


def test_check_finds_more_tokens_than_capacity():
    store = KVStore(capacity_tokens=10)
    store.open(A)
    with pytest.raises(InvariantViolation, match="11 tokens cached, capacity 10"):
        append(store, A, 0, 11)


def test_check_finds_a_length_beyond_the_buffers(store):
    append(store, A, 0, 4)
    store.advance(A, 61)
    with pytest.raises(InvariantViolation, match="length 65 beyond its buffers"):
        store.check_invariants()
