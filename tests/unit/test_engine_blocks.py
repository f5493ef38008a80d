"""Which block holds what: rollback, sharing, copies, what is remembered and for how long."""

import pytest

from specdec.engine.blocks import BlockManager
from specdec.errors import InvariantViolation, KVCacheFull, StaleCache
from tests.tiny_models import sequence_id

A, B, C, D = (sequence_id(name) for name in "abcd")
SIZE = 4
ONE, TWO, THREE = ([10 * first + i for i in range(SIZE)] for first in (1, 2, 3))
"""Contents of whole blocks."""


class Blocks(BlockManager):
    """Fed as the KV cache feeds it."""

    def __init__(self, num_blocks=8, *, open_ids=(A, B, C, D)):
        super().__init__(num_blocks, SIZE)
        for sequence in open_ids:
            self.open(sequence)

    def feed(self, sequence, token_ids):
        """Returns how many were cached already, and the copy that was asked for."""
        adopted = self.adopt(sequence, token_ids)
        copied = self.reserve(sequence, len(token_ids) - adopted)
        self.append(sequence, token_ids[adopted:])
        self.check_invariants()
        return adopted, copied

    def adopts(self, token_ids):
        """How many of them a newcomer would find."""
        newcomer = sequence_id("newcomer")
        self.open(newcomer)
        adopted = self.adopt(newcomer, token_ids)
        self.close(newcomer)
        self.check_invariants()
        return adopted


@pytest.fixture
def blocks():
    return Blocks()


# One sequence ---------------------------------------------------------------------------------------------


def test_table_covers_the_length_in_whole_blocks(blocks):
    for length in range(1, 3 * SIZE + 1):
        blocks.feed(A, [length])
        assert blocks.length(A) == length
        assert len(blocks.table(A)) == blocks.num_used == -(-length // SIZE)
    assert len(set(blocks.table(A))) == 3


def test_reserved_blocks_are_used_before_they_are_written(blocks):
    assert blocks.reserve(A, SIZE + 1) is None
    assert (blocks.length(A), blocks.num_used) == (0, 2)
    table = list(blocks.table(A))
    blocks.append(A, [*ONE, 5])
    assert list(blocks.table(A)) == table


def test_reserving_what_is_reserved_changes_nothing(blocks):
    blocks.reserve(A, SIZE + 1)
    table = list(blocks.table(A))
    for num_tokens in (0, 1, SIZE + 1, 2 * SIZE):
        assert blocks.reserve(A, num_tokens) is None
        assert list(blocks.table(A)) == table


@pytest.mark.parametrize(
    ("length", "num_kept"), [(0, 0), (1, 1), (SIZE, 1), (SIZE + 1, 2), (2 * SIZE, 2), (3 * SIZE - 1, 3)]
)
def test_rollback_lets_go_of_the_blocks_behind_at_once_and_moves_nothing(blocks, length, num_kept):
    blocks.feed(A, ONE + TWO + THREE)
    table = list(blocks.table(A))
    blocks.truncate(A, length)
    blocks.check_invariants()
    assert blocks.length(A) == length
    assert list(blocks.table(A)) == table[:num_kept]
    assert blocks.num_free == 8 - num_kept


def test_rollback_lets_go_of_reserved_blocks_too(blocks):
    blocks.feed(A, ONE)
    blocks.reserve(A, 3 * SIZE)
    blocks.truncate(A, SIZE)
    blocks.check_invariants()
    assert blocks.num_used == 1


def test_rollback_beyond_what_is_held_is_stale_and_changes_nothing(blocks):
    blocks.feed(A, ONE)
    blocks.reserve(A, SIZE)
    with pytest.raises(StaleCache, match="sequence a: keep 5, but 4 positions are cached"):
        blocks.truncate(A, SIZE + 1)
    assert (blocks.length(A), blocks.num_used) == (SIZE, 2)


def test_opening_again_lets_go_of_what_was_held(blocks):
    blocks.feed(A, ONE + TWO)
    blocks.open(A)
    blocks.check_invariants()
    assert (blocks.length(A), blocks.num_used) == (0, 0)


def test_closing_again_or_closing_an_unknown_sequence_changes_nothing(blocks):
    blocks.feed(A, ONE)
    blocks.feed(B, TWO)
    for _ in range(3):
        blocks.close(A)
        blocks.close(sequence_id("never opened"))
        blocks.check_invariants()
        assert (blocks.num_used, blocks.num_free) == (1, 7)


# Room -----------------------------------------------------------------------------------------------------


def test_full_cache_refuses_and_changes_nothing():
    blocks = Blocks(3)
    blocks.feed(A, [*ONE, 5])
    table = list(blocks.table(A))
    with pytest.raises(KVCacheFull, match="sequence a: 2 KV cache blocks wanted, 1 free"):
        blocks.reserve(A, SIZE + SIZE)
    blocks.check_invariants()
    assert (blocks.length(A), list(blocks.table(A)), blocks.num_free) == (SIZE + 1, table, 1)
    assert blocks.reserve(A, SIZE + SIZE - 1) is None


def test_full_cache_refuses_the_copy_of_a_shared_block_and_changes_nothing():
    blocks = Blocks(2)
    for sequence in (A, B):
        blocks.feed(sequence, ONE + TWO)
    blocks.truncate(B, SIZE + 1)
    tables = [list(blocks.table(sequence)) for sequence in (A, B)]
    with pytest.raises(KVCacheFull, match="sequence b: 1 KV cache blocks wanted, 0 free"):
        blocks.reserve(B, 1)
    blocks.check_invariants()
    assert [list(blocks.table(sequence)) for sequence in (A, B)] == tables
    assert blocks.adopts(ONE + TWO) == 2 * SIZE


def test_copy_and_new_blocks_are_counted_together():
    blocks = Blocks(4)
    for sequence in (A, B):
        blocks.feed(sequence, ONE + TWO)
    blocks.truncate(B, SIZE + 1)
    with pytest.raises(KVCacheFull, match="3 KV cache blocks wanted, 2 free"):
        blocks.reserve(B, 2 * SIZE)
    assert blocks.reserve(B, 2 * SIZE - 1) is not None
    assert blocks.num_free == 0


def test_shared_blocks_count_once():
    blocks = Blocks(2)
    for sequence in (A, B, C, D):
        assert blocks.feed(sequence, ONE + TWO) == ((0 if sequence is A else 2 * SIZE), None)
        assert blocks.num_used == 2


# Adoption -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", range(3 * SIZE + 2))
def test_whole_blocks_only_are_adopted(blocks, length):
    token_ids = [*ONE, *TWO, *THREE, 5][:length]
    blocks.feed(A, token_ids)
    assert blocks.feed(B, token_ids) == (length // SIZE * SIZE, None)
    num_shared = length // SIZE
    assert blocks.table(B)[:num_shared] == blocks.table(A)[:num_shared]
    assert set(blocks.table(B)[num_shared:]).isdisjoint(blocks.table(A))


@pytest.mark.parametrize("differing", range(2 * SIZE))
def test_adoption_ends_before_the_block_with_the_first_differing_token(blocks, differing):
    blocks.feed(A, ONE + TWO)
    other = ONE + TWO
    other[differing] = 99
    assert blocks.adopts(other) == differing // SIZE * SIZE


def test_same_content_behind_another_prefix_is_not_shared(blocks):
    blocks.feed(A, ONE + THREE)
    assert blocks.adopts(TWO + THREE) == 0
    assert blocks.adopts(THREE) == 0
    blocks.feed(B, TWO)
    assert blocks.adopts(TWO + THREE) == SIZE


def test_same_content_twice_in_one_sequence_is_two_blocks(blocks):
    blocks.feed(A, ONE + ONE)
    assert len(set(blocks.table(A))) == 2
    assert blocks.adopts(ONE + ONE + ONE) == 2 * SIZE


def test_sequence_adopts_on_its_way_when_it_ends_with_a_full_block(blocks):
    blocks.feed(A, ONE + TWO + THREE)
    blocks.feed(B, ONE)
    assert blocks.feed(B, TWO + THREE) == (2 * SIZE, None)
    assert blocks.table(B) == blocks.table(A)


def test_nothing_is_adopted_in_the_middle_of_a_block_or_before_reserved_ones(blocks):
    blocks.feed(A, ONE + TWO)
    blocks.feed(B, ONE[:2])
    assert blocks.adopt(B, [*ONE[2:], *TWO]) == 0
    blocks.reserve(C, 1)
    assert blocks.adopt(C, ONE + TWO) == 0
    blocks.check_invariants()


def test_block_is_not_known_before_it_is_written(blocks):
    blocks.reserve(A, SIZE)
    assert blocks.adopts(ONE) == 0
    blocks.append(A, ONE[:3])
    assert blocks.adopts(ONE) == 0
    blocks.append(A, ONE[3:])
    assert blocks.adopts(ONE) == SIZE


def test_two_that_computed_the_same_side_by_side_leave_one_known_block(blocks):
    for sequence in (A, B):
        blocks.reserve(sequence, SIZE)
    for sequence in (A, B):
        blocks.append(sequence, ONE)
        blocks.check_invariants()
    [first], [second] = blocks.table(A), blocks.table(B)
    assert first != second
    blocks.close(A)
    assert blocks.feed(C, ONE) == (SIZE, None)
    assert list(blocks.table(C)) == [first]


# After the end --------------------------------------------------------------------------------------------


def test_ended_sequence_is_free_and_its_prefix_still_known(blocks):
    blocks.feed(A, [*ONE, *TWO, 5])
    table = list(blocks.table(A))
    blocks.close(A)
    assert (blocks.num_used, blocks.num_free) == (0, 8)
    assert blocks.feed(B, ONE + TWO) == (2 * SIZE, None)
    assert list(blocks.table(B)) == table[:2]
    assert blocks.num_free == 6


def test_unknown_blocks_are_taken_before_known_ones():
    blocks = Blocks(3)
    blocks.feed(A, ONE)
    blocks.close(A)
    blocks.feed(B, TWO + THREE)
    assert blocks.adopts(ONE) == SIZE


def test_longest_idle_gives_way_first():
    blocks = Blocks(3)
    for sequence, content in ((A, ONE), (B, TWO), (C, THREE)):
        blocks.feed(sequence, content)
    for sequence in (B, A, C):
        blocks.close(sequence)
    for taken, known in ((1, (SIZE, 0, SIZE)), (2, (0, 0, SIZE)), (3, (0, 0, 0))):
        blocks.reserve(D, taken * SIZE)
        assert (blocks.adopts(ONE), blocks.adopts(TWO), blocks.adopts(THREE)) == known


def test_being_used_again_renews_the_time():
    blocks = Blocks(3)
    for sequence, content in ((A, ONE), (B, TWO), (C, THREE)):
        blocks.feed(sequence, content)
        blocks.close(sequence)
    assert blocks.adopts(ONE) == SIZE
    blocks.reserve(D, SIZE)
    assert (blocks.adopts(TWO), blocks.adopts(THREE), blocks.adopts(ONE)) == (0, SIZE, SIZE)


def test_end_of_a_sequence_gives_way_before_its_beginning():
    blocks = Blocks(3)
    blocks.feed(A, ONE + TWO + THREE)
    blocks.close(A)
    for num_left in (2, 1, 0):
        blocks.reserve(D, (3 - num_left) * SIZE)
        assert blocks.adopts(ONE + TWO + THREE) == num_left * SIZE


def test_block_in_use_never_gives_way():
    blocks = Blocks(2)
    blocks.feed(A, ONE)
    blocks.feed(B, ONE)
    blocks.close(A)
    blocks.reserve(C, SIZE)
    with pytest.raises(KVCacheFull):
        blocks.reserve(D, 1)
    assert blocks.adopts(ONE) == SIZE


# Writing into what others see -----------------------------------------------------------------------------


def test_shared_block_is_copied_before_it_is_written(blocks):
    blocks.feed(A, ONE + TWO)
    blocks.feed(B, ONE + TWO)
    blocks.truncate(B, SIZE + 2)
    shared = blocks.table(A)[1]
    adopted, copied = blocks.feed(B, [98, 99])
    assert adopted == 0
    assert copied == (shared, blocks.table(B)[1])
    assert blocks.table(A)[1] == shared != blocks.table(B)[1]
    assert blocks.table(A)[0] == blocks.table(B)[0]
    assert blocks.adopts(ONE + TWO) == blocks.adopts([*ONE, *TWO[:2], 98, 99]) == 2 * SIZE


def test_block_is_copied_once_and_by_each_writer_but_the_last(blocks):
    for sequence in (A, B, C):
        blocks.feed(sequence, ONE)
        blocks.truncate(sequence, 1)
    [shared] = blocks.table(A)
    assert blocks.reserve(A, 1) == (shared, blocks.table(A)[0])
    assert blocks.reserve(A, 1) is None
    assert blocks.reserve(B, 1) == (shared, blocks.table(B)[0])
    assert blocks.reserve(C, 1) is None
    assert list(blocks.table(C)) == [shared]
    blocks.check_invariants()


def test_reserving_nothing_copies_nothing(blocks):
    for sequence in (A, B):
        blocks.feed(sequence, ONE)
        blocks.truncate(sequence, 1)
    assert blocks.reserve(A, 0) is None
    assert blocks.table(A) == blocks.table(B)


def test_sole_users_block_is_written_in_place_and_no_longer_found_by_its_old_content(blocks):
    blocks.feed(A, ONE + TWO)
    table = list(blocks.table(A))
    blocks.truncate(A, SIZE + 2)
    assert blocks.adopts(ONE + TWO) == 2 * SIZE, "nothing has overwritten it yet"
    assert blocks.feed(A, [98]) == (0, None)
    assert list(blocks.table(A)) == table
    assert blocks.adopts(ONE + TWO) == SIZE
    blocks.feed(A, [99])
    assert blocks.adopts([*ONE, *TWO[:2], 98, 99]) == 2 * SIZE


def test_block_reserved_for_writing_is_unknown_though_nothing_was_written(blocks):
    blocks.feed(A, ONE)
    blocks.truncate(A, 2)
    blocks.reserve(A, 1)
    assert blocks.adopts(ONE) == 0
    blocks.close(A)
    blocks.check_invariants()
    assert blocks.adopts(ONE) == 0


def test_rejected_draft_that_filled_a_block_is_seen_by_nobody_with_other_tokens(blocks):
    """Known as what it was computed from, while it lasts; and overwritten, as what it is then."""
    log, rejected, right = [*ONE, 20, 21], [98, 99], [22, 23]
    blocks.feed(A, log)
    blocks.feed(A, rejected)
    blocks.truncate(A, len(log))
    assert blocks.feed(B, log + right) == (SIZE, None)
    assert blocks.table(B)[1] != blocks.table(A)[1]
    blocks.feed(A, right)
    assert blocks.adopts(log + right) == 2 * SIZE
    assert blocks.adopts(log + rejected) == SIZE


def test_rejected_draft_that_filled_whole_blocks_is_seen_only_by_those_who_say_the_same(blocks):
    blocks.feed(A, ONE)
    blocks.feed(A, TWO + THREE)
    blocks.truncate(A, SIZE)
    assert blocks.adopts(ONE + THREE) == SIZE
    assert blocks.adopts(ONE + TWO + THREE) == 3 * SIZE
    assert blocks.feed(A, THREE) == (0, None)
    assert blocks.adopts(ONE + THREE) == 2 * SIZE
    assert blocks.adopts(ONE + TWO + THREE) == 3 * SIZE


# Tokens that are not known yet ----------------------------------------------------------------------------


def test_unseen_tokens_count_as_cached_and_are_shared_by_nobody_until_they_are_told(blocks):
    blocks.feed(A, ONE)
    blocks.reserve(A, SIZE)
    for length in range(SIZE + 1, 2 * SIZE + 1):
        blocks.append_unseen(A, 1)
        blocks.check_invariants()
        assert blocks.length(A) == length
        assert blocks.adopts(ONE + TWO) == SIZE
    blocks.settle(A, TWO)
    blocks.check_invariants()
    assert blocks.length(A) == 2 * SIZE
    assert blocks.adopts(ONE + TWO) == 2 * SIZE


@pytest.mark.parametrize("num_kept", range(SIZE))
def test_unseen_tokens_that_are_not_told_are_not_kept(blocks, num_kept):
    blocks.feed(A, [*ONE, 20])
    blocks.reserve(A, SIZE)
    blocks.append_unseen(A, SIZE)
    blocks.settle(A, THREE[:num_kept])
    blocks.check_invariants()
    assert blocks.length(A) == SIZE + 1 + num_kept
    assert blocks.adopts([*ONE, 20, *THREE]) == (2 * SIZE if num_kept >= SIZE - 1 else SIZE)


def test_rollback_drops_unseen_tokens_and_cannot_keep_them(blocks):
    blocks.feed(A, ONE)
    blocks.reserve(A, SIZE)
    blocks.append_unseen(A, SIZE)
    with pytest.raises(StaleCache, match="sequence a: keep 5, but 4 positions are cached"):
        blocks.truncate(A, SIZE + 1)
    blocks.truncate(A, SIZE)
    blocks.check_invariants()
    assert (blocks.length(A), blocks.num_used) == (SIZE, 1)


def test_nothing_is_adopted_behind_unseen_tokens(blocks):
    blocks.feed(A, ONE + TWO + THREE)
    blocks.feed(B, ONE)
    blocks.reserve(B, SIZE)
    blocks.append_unseen(B, SIZE)
    assert blocks.adopt(B, THREE) == 0


# Laws -----------------------------------------------------------------------------------------------------


def test_check_finds_tokens_that_were_never_reserved(blocks):
    blocks.append(A, ONE[:3])
    with pytest.raises(InvariantViolation, match="sequence a: 3 positions exceed its blocks"):
        blocks.check_invariants()


def test_check_finds_a_block_in_two_tables_that_was_never_shared(blocks):
    blocks.feed(A, ONE[:3])
    blocks.feed(B, ONE[:3])
    blocks.table(B)[0] = blocks.table(A)[0]
    with pytest.raises(InvariantViolation, match="users of blocks do not add up"):
        blocks.check_invariants()
