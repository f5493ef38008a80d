"""What a worker holds: every feed that cannot be applied is answered with `Lost`, never with a guess."""

import pytest
from msgspec.structs import replace as changed

from specdec.engine.model_runner import ModelRunner
from specdec.engine.sessions import LIVE_GRACE_S, QUIET_OWNER_S, UNHEARD_OWNER_S, Session, SessionTable, Wish
from specdec.messages import Heartbeat, Lost
from tests.tiny_models import OWNER, RUNNERS, block_size, feed, sequence_id, simulated_runner

A, B, C = (sequence_id(name) for name in "abc")


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


class Table(SessionTable):
    """With the runner fed as an engine would feed it."""

    def __init__(self, clock=None, make=simulated_runner, **limits):
        self.runner = make(**limits)
        super().__init__(self.runner, clock or Clock())

    def apply(self, *feeds, owner=OWNER, num_extra=0):
        """One call of an engine: all feeds are prepared, then one forward takes all that are ready."""
        answers = self.prepare(owner, [Wish(feed=f, num_rows=0, num_extra=num_extra) for f in feeds])
        items = [
            answer.forward_item(f.token_ids, 0)
            for f, answer in zip(feeds, answers, strict=True)
            if isinstance(answer, Session)
        ]
        if items:
            self.runner.forward(items)
        if isinstance(self.runner, ModelRunner):
            self.runner.cache.blocks.check_invariants()
        return answers

    def beat(self, *live, owner=OWNER):
        self.reconcile(Heartbeat(owner=owner, live=frozenset(live)))


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def table(clock):
    return Table(clock)


def are_ready(answers):
    return [isinstance(answer, Session) for answer in answers]


def assert_lost(answer, reason, *, out_of_memory=False):
    assert isinstance(answer, Lost)
    assert reason in answer.reason
    assert answer.out_of_memory is out_of_memory


# Feeds ----------------------------------------------------------------------------------------------------


def test_session_holds_exactly_the_cached_tokens(table):
    table.apply(feed("a", [3, 4, 5]))
    [session] = table.apply(feed("a", [6, 7], keep=2))
    assert session.token_ids == [3, 4, 6, 7]
    assert table.runner.length(A) == 4


@pytest.mark.parametrize("keep", [0, 2, 3])
def test_feeding_twice_leaves_the_same_cache(table, keep):
    table.apply(feed("a", [3, 4, 5]))
    again = feed("a", [6, 7], keep=keep)
    [first] = table.apply(again)
    once = list(first.token_ids)
    [second] = table.apply(again)
    assert second.token_ids == once
    assert table.runner.length(A) == len(once)


def test_feed_of_an_unknown_sequence_is_lost(table):
    [answer] = table.apply(feed("a", [3], keep=4))
    assert_lost(answer, "sequence a is not cached here")
    assert (answer.sequence_id, answer.epoch) == (A, 0)


def test_feed_from_zero_without_opening_is_lost(table):
    [answer] = table.apply(changed(feed("a", [3]), opening=None))
    assert_lost(answer, "without its opening")
    assert len(table) == 0


def test_keeping_more_than_is_cached_is_lost_and_the_cache_stays(table):
    table.apply(feed("a", [3, 4, 5]))
    [answer] = table.apply(feed("a", [6], keep=4))
    assert_lost(answer, "keep 4, but 3 positions are cached")
    [session] = table.apply(feed("a", [6], keep=3))
    assert session.token_ids == [3, 4, 5, 6]


@pytest.mark.parametrize("epoch", [1, 3])
def test_feed_of_another_epoch_is_lost(table, epoch):
    table.apply(feed("a", [3, 4], epoch=2))
    [answer] = table.apply(feed("a", [5], keep=2, epoch=epoch))
    assert_lost(answer, f"epoch {epoch}, but 2 is cached")
    assert answer.epoch == epoch


def test_new_epoch_from_zero_starts_anew(table):
    table.apply(feed("a", [3, 4]))
    [session] = table.apply(feed("a", [3, 9, 9], epoch=1))
    assert (session.epoch, session.token_ids) == (1, [3, 9, 9])
    assert table.runner.length(A) == 3


def test_feed_without_tokens_is_lost(table):
    """It would ask for a row that nothing was fed for."""
    table.apply(feed("a", [3, 4]))
    [answer] = table.apply(feed("a", [], keep=2))
    assert_lost(answer, "a feed without tokens")


def test_feed_of_another_owner_is_lost_unless_it_starts_anew(table):
    """A gateway has resubmitted the sequence: the first coordinator's log may differ from the second's."""
    table.apply(feed("a", [3, 4, 5]), owner="coordinator-0")
    table.apply(feed("a", [3, 4, 9, 9]), owner="coordinator-1")
    [late] = table.apply(feed("a", [6], keep=3), owner="coordinator-0")
    assert_lost(late, "cached here for coordinator-1, not coordinator-0")
    [session] = table.apply(feed("a", [7], keep=4), owner="coordinator-1")
    assert session.token_ids == [3, 4, 9, 9, 7]


def test_outgrown_context_is_lost():
    table = Table(max_context=8)
    table.apply(feed("a", [3] * 6))
    [answer] = table.apply(feed("a", [4] * 3, keep=6))
    assert_lost(answer, "9 positions exceed the context of 8")
    [answer] = table.apply(feed("a", [4], keep=6), num_extra=2)
    assert_lost(answer, "9 positions exceed the context of 8")
    [session] = table.apply(feed("a", [4], keep=6), num_extra=1)
    assert len(session.token_ids) == 7


# Room -----------------------------------------------------------------------------------------------------


def test_items_of_one_call_that_exceed_capacity_together_lose_the_later_ones():
    table = Table(kv_capacity_tokens=10)
    *ready, third, fourth = table.apply(*(feed(name, [3] * 4) for name in "abcd"))
    assert are_ready(ready) == [True, True]
    assert_lost(third, "room for 4 tokens wanted, 10 in all", out_of_memory=True)
    assert_lost(fourth, "room for 4 tokens wanted, 10 in all", out_of_memory=True)
    assert table.runner.kv_tokens_in_use == 8


def test_smaller_item_behind_one_that_does_not_fit_still_fits():
    table = Table(kv_capacity_tokens=10)
    _, lost, small = table.apply(feed("a", [3] * 6), feed("b", [3] * 5), feed("c", [3] * 4))
    assert_lost(lost, "5 tokens", out_of_memory=True)
    assert isinstance(small, Session)
    assert table.runner.kv_tokens_in_use == 10


def test_tokens_a_worker_will_feed_itself_are_counted_beforehand():
    table = Table(kv_capacity_tokens=10)
    *ready, third = table.apply(*(feed(name, [3] * 3) for name in "abc"), num_extra=2)
    assert are_ready(ready) == [True, True]
    assert_lost(third, "room for 5 tokens wanted, 10 in all", out_of_memory=True)


def test_youngest_sequence_that_does_not_fit_gives_back_what_it_held():
    table = Table(kv_capacity_tokens=10)
    table.apply(feed("a", [3] * 5), feed("b", [3] * 5))
    [answer] = table.apply(feed("b", [4], keep=5))
    assert_lost(answer, "room for 6 tokens wanted, 10 in all", out_of_memory=True)
    assert table.runner.kv_tokens_in_use == 5
    [session] = table.apply(feed("a", [4], keep=5))
    assert len(session.token_ids) == 6


def test_rollback_in_the_same_feed_makes_room():
    table = Table(kv_capacity_tokens=10)
    table.apply(feed("a", [3] * 10))
    [session] = table.apply(feed("a", [4] * 6, keep=4))
    assert len(session.token_ids) == 10


def test_starting_anew_gives_back_the_old_cache_first():
    table = Table(kv_capacity_tokens=10)
    table.apply(feed("a", [3] * 10))
    [session] = table.apply(feed("a", [4] * 10, epoch=1))
    assert session.token_ids == [4] * 10


# Giving way -----------------------------------------------------------------------------------------------

GAVE_WAY = "it gave way to older sequences: the KV cache is full"


class Blocks(Table):
    """Counts in blocks; no two sequences begin alike."""

    def __init__(self, make, num_blocks, clock=None):
        self.size = block_size(make())
        super().__init__(clock, make, kv_capacity_tokens=num_blocks * self.size)

    def blocks(self, name, count, *, keep=0, epoch=0):
        return feed(
            name, [3 + ord(name) - ord("a")] * (count * self.size), keep=keep * self.size, epoch=epoch
        )

    @property
    def num_free(self):
        return (self.runner.kv_capacity_tokens - self.runner.kv_tokens_in_use) // self.size


@pytest.fixture(params=RUNNERS.values(), ids=RUNNERS)
def make_runner(request):
    return request.param


def test_youngest_gives_way_to_an_older_one_that_grows(make_runner):
    table = Blocks(make_runner, 3)
    table.apply(table.blocks("a", 1), table.blocks("b", 1), table.blocks("c", 1))
    [grown] = table.apply(table.blocks("a", 1, keep=1))
    assert len(grown.token_ids) == 2 * table.size
    assert (len(table), table.num_free) == (2, 0)
    kept, lost = table.apply(table.blocks("b", 1), table.blocks("c", 1, keep=1))
    assert isinstance(kept, Session)
    assert lost == Lost(sequence_id=C, epoch=0, reason=GAVE_WAY, out_of_memory=True)


def test_as_many_give_way_as_are_needed_and_no_more(make_runner):
    table = Blocks(make_runner, 5)
    table.apply(*(table.blocks(name, 1) for name in "abcde"))
    [session] = table.apply(table.blocks("a", 2, keep=1))
    assert len(session.token_ids) == 3 * table.size
    assert (len(table), table.num_free) == (3, 0)
    answers = table.apply(*(table.blocks(name, 1, keep=1) for name in "de"))
    assert [answer.reason for answer in answers] == [GAVE_WAY] * 2


def test_sequence_gives_way_as_a_whole(make_runner):
    table = Blocks(make_runner, 5)
    table.apply(table.blocks("a", 1), table.blocks("b", 4))
    table.apply(table.blocks("a", 1, keep=1))
    assert (len(table), table.num_free) == (1, 3)


def test_one_that_was_ready_gives_way_to_an_older_one_later_in_the_same_call(make_runner):
    table = Blocks(make_runner, 3)
    table.apply(table.blocks("a", 1), table.blocks("b", 1))
    answers = table.apply(table.blocks("b", 1, keep=1), table.blocks("a", 1, keep=1))
    assert are_ready(answers) == [False, True]
    assert answers[0] == Lost(sequence_id=B, epoch=0, reason=GAVE_WAY, out_of_memory=True)
    assert (table.runner.length(A), len(table), table.num_free) == (2 * table.size, 1, 1)


def test_one_that_gave_way_earlier_in_the_same_call_is_lost_there(make_runner):
    table = Blocks(make_runner, 2)
    table.apply(table.blocks("a", 1), table.blocks("b", 1))
    answers = table.apply(table.blocks("a", 1, keep=1), table.blocks("b", 1, keep=1))
    assert are_ready(answers) == [True, False]
    assert answers[1].reason == GAVE_WAY


def test_order_of_a_call_does_not_matter_among_opened_sequences(make_runner):
    outcomes = []
    for order in ("abc", "cba", "bca"):
        table = Blocks(make_runner, 4)
        table.apply(*(table.blocks(name, 1) for name in "abc"))
        answers = table.apply(*(table.blocks(name, 1, keep=1) for name in order))
        outcomes.append({name: isinstance(a, Session) for name, a in zip(order, answers, strict=True)})
    assert outcomes == [{"a": True, "b": True, "c": False}] * 3


def test_one_that_finds_no_younger_one_gives_way_itself(make_runner):
    table = Blocks(make_runner, 3)
    table.apply(table.blocks("a", 2), table.blocks("b", 1))
    [lost] = table.apply(table.blocks("b", 1, keep=1))
    assert lost.out_of_memory
    assert lost.reason != GAVE_WAY
    assert (len(table), table.num_free, table.runner.length(A)) == (1, 1, 2 * table.size)


def test_newcomer_never_drives_out_another(make_runner):
    table = Blocks(make_runner, 2)
    table.apply(table.blocks("a", 1), table.blocks("b", 1))
    [lost] = table.apply(table.blocks("c", 1))
    assert lost.out_of_memory
    assert are_ready(table.apply(table.blocks("a", 1), table.blocks("b", 1))) == [True, True]


def test_one_that_comes_back_is_the_youngest(make_runner):
    table = Blocks(make_runner, 4)
    table.apply(table.blocks("a", 1), table.blocks("b", 1), table.blocks("c", 1))
    table.apply(table.blocks("a", 1, epoch=1))
    [session] = table.apply(table.blocks("b", 2, keep=1))
    assert len(session.token_ids) == 3 * table.size
    _, c, a = table.apply(
        table.blocks("b", 1, keep=2),
        table.blocks("c", 1, keep=0, epoch=1),
        table.blocks("a", 1, keep=1, epoch=1),
    )
    assert isinstance(c, Session)
    assert (a.reason, a.epoch) == (GAVE_WAY, 1)


def test_one_that_gave_way_is_told_so_once(make_runner):
    table = Blocks(make_runner, 2)
    table.apply(table.blocks("a", 1), table.blocks("b", 1))
    table.apply(table.blocks("a", 1, keep=1))
    [first] = table.apply(table.blocks("b", 1, keep=1))
    assert_lost(first, GAVE_WAY, out_of_memory=True)
    [second] = table.apply(table.blocks("b", 1, keep=1))
    assert_lost(second, "not cached here")


def test_one_that_gave_way_comes_back_from_its_log(make_runner):
    table = Blocks(make_runner, 2)
    table.apply(table.blocks("a", 1), table.blocks("b", 1))
    table.apply(table.blocks("a", 1, keep=1))
    table.release([A])
    [session] = table.apply(table.blocks("b", 2, epoch=1))
    assert len(session.token_ids) == table.runner.length(B) == 2 * table.size
    table.release([B])
    assert table.num_free == 2


def test_released_sequence_that_gave_way_is_forgotten(make_runner):
    table = Blocks(make_runner, 2)
    table.apply(table.blocks("a", 1), table.blocks("b", 1))
    table.apply(table.blocks("a", 1, keep=1))
    table.release([B])
    [answer] = table.apply(table.blocks("b", 1, keep=1))
    assert_lost(answer, "not cached here")


@pytest.mark.parametrize(("live", "reason"), [([A, B], GAVE_WAY), ([A], "not cached here")])
def test_heartbeat_that_lists_it_no_more_forgets_one_that_gave_way(make_runner, clock, live, reason):
    table = Blocks(make_runner, 2, clock)
    table.apply(table.blocks("a", 1), table.blocks("b", 1))
    table.apply(table.blocks("a", 1, keep=1))
    clock.advance(LIVE_GRACE_S + 0.001)
    table.beat(*live)
    [answer] = table.apply(table.blocks("b", 1, keep=1))
    assert_lost(answer, reason, out_of_memory=reason == GAVE_WAY)


def test_one_that_gave_way_is_remembered_while_its_owner_is_heard_of(make_runner, clock):
    table = Blocks(make_runner, 2, clock)
    table.apply(table.blocks("a", 1), owner="coordinator-0")
    table.apply(table.blocks("b", 1), owner="coordinator-1")
    table.apply(table.blocks("a", 1, keep=1), owner="coordinator-0")
    for _ in range(4):
        clock.advance(UNHEARD_OWNER_S / 2)
        table.beat(A, owner="coordinator-0")
        table.beat(B, owner="coordinator-1")
    [lost] = table.apply(table.blocks("b", 1, keep=1), owner="coordinator-1")
    assert_lost(lost, GAVE_WAY, out_of_memory=True)


def test_one_that_gave_way_is_forgotten_with_its_silent_owner(make_runner, clock):
    table = Blocks(make_runner, 2, clock)
    table.apply(table.blocks("a", 1), owner="coordinator-0")
    table.apply(table.blocks("b", 1), owner="coordinator-1")
    table.apply(table.blocks("a", 1, keep=1), owner="coordinator-0")
    clock.advance(UNHEARD_OWNER_S + 0.001)
    table.beat(A, owner="coordinator-0")
    [lost] = table.apply(table.blocks("b", 1, keep=1), owner="coordinator-1")
    assert_lost(lost, "not cached here")


def test_age_counts_across_owners(make_runner):
    table = Blocks(make_runner, 2)
    table.apply(table.blocks("a", 1), owner="coordinator-0")
    table.apply(table.blocks("b", 1), owner="coordinator-1")
    assert are_ready(table.apply(table.blocks("a", 1, keep=1), owner="coordinator-0")) == [True]
    [lost] = table.apply(table.blocks("b", 1, keep=1), owner="coordinator-1")
    assert_lost(lost, GAVE_WAY, out_of_memory=True)


def test_room_a_worker_needs_for_its_own_tokens_makes_younger_ones_give_way(make_runner):
    table = Blocks(make_runner, 3)
    table.apply(table.blocks("a", 1), table.blocks("b", 1))
    [session] = table.apply(table.blocks("a", 1, keep=1), num_extra=table.size)
    assert len(session.token_ids) == 2 * table.size
    assert (len(table), table.num_free) == (1, 0)


# Release and heartbeats -----------------------------------------------------------------------------------


def test_releasing_frees_and_releasing_again_is_fine(table):
    table.apply(feed("a", [3, 4]), feed("b", [5]))
    table.release([A])
    table.release([A, sequence_id("never seen")])
    assert len(table) == 1
    assert table.runner.kv_tokens_in_use == 1
    [answer] = table.apply(feed("a", [6], keep=2))
    assert_lost(answer, "not cached here")


def test_unlisted_sequence_is_freed_after_the_grace_period_only(table, clock):
    """A heartbeat may have left its coordinator before the sequence came to it."""
    table.apply(feed("a", [3, 4]), feed("b", [5]))
    clock.advance(LIVE_GRACE_S)
    table.beat(B)
    assert len(table) == 2
    clock.advance(0.001)
    table.beat(B)
    assert len(table) == 1
    assert table.runner.kv_tokens_in_use == 1


def test_feeding_renews_the_grace_period(table, clock):
    table.apply(feed("a", [3, 4]))
    clock.advance(LIVE_GRACE_S)
    table.apply(feed("a", [5], keep=2))
    clock.advance(LIVE_GRACE_S)
    table.beat()
    assert len(table) == 1


def test_listed_sequence_is_never_freed(table, clock):
    """However long nothing is fed: a stream may wait, its owner still lists it."""
    table.apply(feed("a", [3, 4]))
    for _ in range(20):
        clock.advance(UNHEARD_OWNER_S)
        table.beat(A)
        table.beat(owner="coordinator-1")
    assert len(table) == 1


def test_other_owners_sequences_are_kept_while_they_are_heard_of(table, clock):
    table.apply(feed("a", [3]), owner="coordinator-0")
    table.apply(feed("b", [3]), owner="coordinator-1")
    for _ in range(10):
        clock.advance(UNHEARD_OWNER_S / 2)
        table.beat(A, owner="coordinator-0")
        table.beat(B, owner="coordinator-1")
    assert len(table) == 2


def test_sequences_of_a_silent_owner_are_freed(table, clock):
    table.apply(feed("a", [3]), owner="coordinator-0")
    table.apply(feed("b", [3, 4]), owner="coordinator-1")
    clock.advance(UNHEARD_OWNER_S)
    table.beat(A, owner="coordinator-0")
    assert len(table) == 2
    clock.advance(0.001)
    table.beat(A, owner="coordinator-0")
    assert len(table) == 1
    assert table.runner.length(A) == 1


def test_calls_count_as_a_sign_of_life(table, clock):
    table.apply(feed("a", [3]), owner="coordinator-1")
    clock.advance(UNHEARD_OWNER_S)
    table.apply(feed("b", [3]), owner="coordinator-1")
    clock.advance(UNHEARD_OWNER_S)
    table.beat(owner="coordinator-0")
    assert len(table) == 2


def test_five_hundred_sequences_come_and_go(table, clock):
    """Half are released, half are forgotten by a release that never came."""
    for i in range(500):
        name = f"s{i}"
        table.apply(feed(name, [3, 4, 5]))
        if i % 2:
            table.release([sequence_id(name)])
        clock.advance(1.0)
        table.beat()
        assert len(table) <= LIVE_GRACE_S + 1
    clock.advance(LIVE_GRACE_S + 1)
    table.beat()
    assert (len(table), table.runner.kv_tokens_in_use) == (0, 0)


def test_a_moved_sequence_takes_the_room_of_its_original_whose_coordinator_is_silent(clock):
    """It is the younger one, and would give way to it for ever."""
    table = Table(clock, kv_capacity_tokens=10)
    table.apply(feed("a", [1] * 8), owner="dead")
    clock.advance(QUIET_OWNER_S / 2)
    (refused,) = table.apply(feed("a.1", [1] * 8))
    assert isinstance(refused, Lost)
    assert refused.out_of_memory
    clock.advance(QUIET_OWNER_S)
    (taken,) = table.apply(feed("a.1", [1] * 8))
    assert isinstance(taken, Session)
    assert len(table) == 1


def test_a_silent_coordinators_sequence_that_gave_way_is_reported_when_it_speaks_again(clock):
    table = Table(clock, kv_capacity_tokens=10)
    table.apply(feed("a", [1] * 8), owner="stalled")
    clock.advance(2 * QUIET_OWNER_S)
    table.apply(feed("b", [1] * 8))
    (lost,) = table.apply(feed("a", [2], keep=8), owner="stalled")
    assert isinstance(lost, Lost)
    assert lost.out_of_memory
    assert len(table) == 1


@pytest.mark.parametrize("keep", [0, 3])
def test_a_feed_older_than_the_last_is_refused_and_one_that_comes_twice_is_not(table, keep):
    table.apply(feed("a", [1, 2, 3], serial=4))
    table.apply(feed("a", [4, 5], keep=3, serial=6))
    (late,) = table.apply(feed("a", [9, 9], keep=keep, serial=5))
    assert isinstance(late, Lost)
    assert "came behind" in late.reason
    (again,) = table.apply(feed("a", [4, 5], keep=3, serial=6))
    assert isinstance(again, Session)
    assert again.token_ids == [1, 2, 3, 4, 5]


def test_an_older_epoch_does_not_open_what_a_newer_one_holds(table):
    table.apply(feed("a", [1, 2, 3], epoch=2, serial=4))
    (late,) = table.apply(feed("a", [1, 2], epoch=1, serial=9))
    assert isinstance(late, Lost)
    (going,) = table.apply(feed("a", [4], keep=3, epoch=2, serial=5))
    assert isinstance(going, Session)
