"""The log, the accept rule's cut at the end of a sequence, counters and policy."""

from __future__ import annotations

import pytest

from specdec.speculation.log import CommittedLog, cut_block
from specdec.speculation.policy import FixedGamma
from specdec.speculation.stats import AcceptanceCounter
from specdec.types import SpeculationStats, StopCriteria
from tests.unit.test_speculation_policy import Candidate

EOS = 9
BLOCK = (1, 2, 3, 4, 5)


def stop_at(*stop_token_ids: int, max_tokens: int = 100) -> StopCriteria:
    return StopCriteria(max_tokens=max_tokens, stop_token_ids=frozenset(stop_token_ids))


# CommittedLog -----------------------------------------------------------------------------------------------


def test_log_starts_with_the_prompt_and_grows_by_commits():
    log = CommittedLog((7, 8))
    assert (len(log), log.prompt_len, log.num_output_tokens, log.output_ids) == (2, 2, 0, ())
    log.commit((1, 2))
    log.commit(())
    log.commit((3,))
    assert (len(log), log.prompt_len, log.num_output_tokens, log.output_ids) == (5, 2, 3, (1, 2, 3))


def test_log_of_a_resumed_sequence_holds_what_was_committed_elsewhere():
    log = CommittedLog((7, 8), (1, 2))
    assert log.tail(0) == (7, 8, 1, 2)
    assert log.output_ids == (1, 2)
    assert log.num_output_tokens == 2


@pytest.mark.parametrize(
    ("start", "limit", "expected"),
    [(0, None, (7, 8, 1)), (1, None, (8, 1)), (3, None, ()), (0, 2, (7, 8)), (1, 1, (8,)), (2, 9, (1,))],
)
def test_tail_is_a_slice_of_at_most_limit_tokens(start, limit, expected):
    assert CommittedLog((7, 8), (1,)).tail(start, limit) == expected


def test_a_log_without_a_prompt_is_refused():
    with pytest.raises(AssertionError):
        CommittedLog(())


# cut_block --------------------------------------------------------------------------------------------------


def test_a_block_without_an_end_is_committed_whole():
    assert cut_block(BLOCK, stop_at(EOS), 0) == (BLOCK, None)


@pytest.mark.parametrize("place", range(len(BLOCK)))
def test_a_stop_token_anywhere_in_a_block_is_the_last_token(place):
    block = (*BLOCK[:place], EOS, *BLOCK[place + 1 :])
    assert cut_block(block, stop_at(EOS), 3) == ((*BLOCK[:place], EOS), "stop")


def test_the_first_of_several_stop_tokens_ends_the_sequence():
    assert cut_block((1, 5, 9, 5), stop_at(5, 9), 0) == ((1, 5), "stop")


@pytest.mark.parametrize("room", range(1, len(BLOCK)))
def test_the_cap_anywhere_in_a_block_cuts_behind_it(room):
    assert cut_block(BLOCK, stop_at(EOS, max_tokens=40), 40 - room) == (BLOCK[:room], "length")


def test_a_block_that_reaches_the_cap_exactly_ends_the_sequence():
    assert cut_block(BLOCK, stop_at(EOS, max_tokens=5), 0) == (BLOCK, "length")
    assert cut_block(BLOCK, stop_at(EOS, max_tokens=6), 0) == (BLOCK, None)


@pytest.mark.parametrize("place", range(len(BLOCK)))
def test_a_stop_token_at_the_very_cap_counts_as_stop(place):
    block = (*BLOCK[:place], EOS, *BLOCK[place + 1 :])
    assert cut_block(block, stop_at(EOS, max_tokens=20), 20 - place - 1) == (block[: place + 1], "stop")


@pytest.mark.parametrize("place", range(1, len(BLOCK)))
def test_a_stop_token_behind_the_cap_is_not_seen(place):
    block = (*BLOCK[:place], EOS, *BLOCK[place + 1 :])
    assert cut_block(block, stop_at(EOS, max_tokens=20), 20 - place) == (BLOCK[:place], "length")


# AcceptanceCounter ------------------------------------------------------------------------------------------


def counted(*rounds: tuple[int, int]) -> SpeculationStats:
    counter = AcceptanceCounter()
    for num_drafted, num_accepted in rounds:
        counter.record(num_drafted, num_accepted)
    return counter.snapshot()


def test_nothing_counted_yet():
    stats = counted()
    assert stats == SpeculationStats()
    assert stats.mean_acceptance_length == 1.0
    assert stats.draft_acceptance_rate == 0.0


def test_plain_rounds_count_as_rounds_and_not_as_spec_steps():
    stats = counted((0, 0), (0, 0), (2, 1))
    assert (stats.num_rounds, stats.num_spec_steps) == (3, 1)
    assert stats.mean_acceptance_length == 2.0


def test_counters_and_derived_rates_of_mixed_rounds():
    stats = counted((4, 4), (4, 0), (2, 1), (0, 0), (4, 1))
    assert stats.num_rounds == 5
    assert stats.num_spec_steps == 4
    assert stats.num_draft_tokens == 14
    assert stats.num_accepted_draft_tokens == 6
    assert stats.acceptance_histogram == (1, 2, 0, 0, 1)
    assert stats.mean_acceptance_length == 1 + 6 / 4
    assert stats.draft_acceptance_rate == 6 / 14


def test_histogram_grows_with_the_longest_draft_seen():
    assert counted((1, 1)).acceptance_histogram == (0, 1)
    assert counted((1, 1), (3, 0)).acceptance_histogram == (1, 1, 0, 0)


@pytest.mark.parametrize(("num_drafted", "num_accepted"), [(2, 3), (2, -1), (0, 1)])
def test_more_accepted_than_drafted_is_our_bug(num_drafted, num_accepted):
    with pytest.raises(AssertionError):
        counted((num_drafted, num_accepted))


@pytest.mark.parametrize("gamma", [0, 1, 8])
def test_fixed_gamma_is_the_same_at_any_load(gamma):
    policy = FixedGamma(gamma)
    for batch_size in (1, 32, 1000):
        policy.on_verified(batch_size, 10.0)
        policy.on_proposed(batch_size, 1, 10.0)
        assert policy.choose([Candidate(0.0, 1, 5)] * batch_size) == [gamma] * batch_size
