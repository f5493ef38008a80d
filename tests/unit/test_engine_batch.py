"""How a step's ragged tokens are laid out, by hand."""

import pytest
import torch

from specdec.engine.batch import TILE, Segment, StepBatch

CPU = torch.device("cpu")
SIZE = 4


@pytest.fixture
def batch():
    """A decoding sequence of six positions, and one of five that arrives."""
    segments = [
        Segment(start=0, num_tokens=1, kv_length=6, blocks=[7, 2, 5]),
        Segment(start=1, num_tokens=5, kv_length=5, blocks=[0, 3]),
    ]
    return StepBatch.of([10, 20, 21, 22, 23, 24], [0, 5], segments, SIZE, CPU)


def test_tokens_follow_each_other_without_gaps(batch):
    assert batch.token_ids.tolist() == [10, 20, 21, 22, 23, 24]
    assert batch.positions.tolist() == [5, 0, 1, 2, 3, 4]
    assert batch.segments.tolist() == [[0, 0, 1, 6], [1, 1, 5, 5]]


def test_tokens_are_written_to_their_positions_in_their_own_blocks(batch):
    assert batch.slots.tolist() == [2 * SIZE + 1, 0, 1, 2, 3, 3 * SIZE]
    assert batch.slots_of(0).tolist() == [28, 29, 30, 31, 8, 9]
    assert batch.slots_of(1).tolist() == [0, 1, 2, 3, 12]


def test_tables_are_as_wide_as_the_widest_one(batch):
    assert batch.tables.tolist() == [[7, 2, 5], [0, 3, 0]]


def test_tensors_say_the_same(batch):
    tensors = batch.tensors
    assert tensors.token_ids.tolist() == batch.token_ids.tolist()
    assert tensors.positions.tolist() == batch.positions.tolist()
    assert tensors.slots.tolist() == batch.slots.tolist()
    assert tensors.rows.tolist() == [0, 5]
    assert tensors.query_starts.tolist() == [0, 1, 6]
    assert tensors.kv_lengths.tolist() == [6, 5]
    assert tensors.tables.tolist() == batch.tables.tolist()
    assert (tensors.max_queries, tensors.max_kv_length, tensors.block_size) == (5, 6, SIZE)
    assert tensors.query_starts.dtype == tensors.kv_lengths.dtype == tensors.tables.dtype == torch.int32


def test_batch_without_tokens_is_empty():
    batch = StepBatch.of([], [], [], SIZE, CPU)
    assert (len(batch.token_ids), len(batch.slots), len(batch.tiles)) == (0, 0, 0)


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [
        (TILE, [[1, 1, TILE, 100]]),
        (TILE + 1, [[1, 1, TILE, 99], [1, 1 + TILE, 1, 100]]),
        (2 * TILE, [[1, 1, TILE, 100 - TILE], [1, 1 + TILE, TILE, 100]]),
        (3 * TILE + 2, [[1, 1 + i * TILE, TILE, 98 - (2 - i) * TILE] for i in range(3)] + [[1, 97, 2, 100]]),
    ],
)
def test_long_segments_are_cut_into_tiles_that_end_where_their_tokens_end(num_tokens, expected):
    segments = [
        Segment(start=0, num_tokens=1, kv_length=3, blocks=[0]),
        Segment(start=1, num_tokens=num_tokens, kv_length=100, blocks=range(1, 26)),
    ]
    batch = StepBatch.of(range(1 + num_tokens), [], segments, SIZE, CPU)
    assert sorted(batch.tiles.tolist()) == [[0, 0, 1, 3], *expected]


def test_tiles_are_dealt_out_so_that_neighbours_have_short_and_long_ones():
    """Threads get runs of neighbours, and a tile's work grows with the positions it sees."""
    num_tiles = 8
    segment = Segment(
        start=0,
        num_tokens=num_tiles * TILE,
        kv_length=num_tiles * TILE,
        blocks=range(num_tiles * TILE // SIZE),
    )
    batch = StepBatch.of(range(num_tiles * TILE), [], [segment], SIZE, CPU)
    assert (batch.tiles[:, 3] // TILE).tolist() == [1, 8, 2, 7, 3, 6, 4, 5]
