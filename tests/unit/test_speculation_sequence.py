"""One sequence's rounds: what is fed, what is committed, and how far each cache stays valid."""

from __future__ import annotations

import pytest

from specdec.messages import Draft, Lost, Verdict
from specdec.sampling.noise import Purpose, uniform
from specdec.speculation.sequence import SequenceState
from specdec.types import GenerationRequest, SamplingParams, SequenceId, StopCriteria, VerificationMode

NAME = SequenceId("request-0")
PROMPT = (11, 12, 13, 14, 15)
N = len(PROMPT)
WHOLE = 10_000
"""A chunk that holds any feed here."""
DRAFT_IDS = (1, 2, 3, 4)
GAMMA = len(DRAFT_IDS)
OTHER = 99
EOS = 7


def sequence(
    *,
    prompt=PROMPT,
    output=(),
    max_tokens=100,
    stop=(),
    max_draft_tokens=None,
    mode=VerificationMode.GREEDY,
    seed=0,
) -> SequenceState:
    return SequenceState(
        GenerationRequest(
            sequence_id=NAME,
            prompt_ids=prompt,
            sampling=SamplingParams(mode=mode, seed=seed),
            stop=StopCriteria(max_tokens=max_tokens, stop_token_ids=frozenset(stop)),
            max_draft_tokens=max_draft_tokens,
            output_ids=output,
        )
    )


def draft_of(*token_ids: int, epoch: int = 0) -> Draft:
    return Draft(sequence_id=NAME, epoch=epoch, token_ids=token_ids)


def verdict_of(*token_ids: int, epoch: int = 0, ratios: tuple[float, ...] = ()) -> Verdict:
    return Verdict(sequence_id=NAME, epoch=epoch, token_ids=token_ids, ratios=ratios)


def lost(epoch: int = 0, *, out_of_memory: bool = False) -> Lost:
    return Lost(sequence_id=NAME, epoch=epoch, reason="gone", out_of_memory=out_of_memory)


def accepting(num_accepted: int, draft_ids: tuple[int, ...] = DRAFT_IDS, epoch: int = 0) -> Verdict:
    """A greedy verdict that agrees with the first ``num_accepted`` draft tokens and with no other."""
    agreed = draft_ids[:num_accepted]
    return verdict_of(*agreed, *(OTHER,) * (len(draft_ids) + 1 - num_accepted), epoch=epoch)


def proposed(state: SequenceState, *draft_ids: int) -> Draft:
    """A draft that has answered, as the lane sees it."""
    item = state.propose_item(len(draft_ids), WHOLE)
    draft = state.on_proposed(item, draft_of(*draft_ids, epoch=state.draft.epoch))
    assert draft is not None
    return draft


def lengths(state: SequenceState) -> tuple[int, int]:
    return state.target.length, state.draft.length


# Rounds -----------------------------------------------------------------------------------------------------


def test_first_feeds_open_the_sequence_and_hold_the_whole_log():
    state = sequence(stop=(EOS,))
    item = state.propose_item(3, WHOLE)
    assert (item.feed.keep, item.feed.token_ids, item.num_draft_tokens) == (0, PROMPT, 3)
    opening = item.feed.opening
    assert opening is not None
    assert (opening.prompt_len, opening.stop_token_ids) == (N, {EOS})
    assert opening.sampling == state.request.sampling
    draft = state.on_proposed(item, draft_of(1, 2, 3))
    verify = state.verify_item(draft, WHOLE)
    assert (verify.feed.keep, verify.feed.token_ids, verify.num_rows) == (0, (*PROMPT, 1, 2, 3), 4)
    assert verify.feed.opening == opening
    assert verify.draft is draft


def test_all_accepted_emits_the_bonus_token_and_leaves_the_draft_without_its_last_token():
    """The draft never fed x_gamma to itself: it is behind by that and by the bonus token (A12)."""
    state = sequence()
    draft = proposed(state, *DRAFT_IDS)
    chunk = state.on_verdict(draft, accepting(GAMMA))
    assert chunk is not None
    assert chunk.token_ids == (*DRAFT_IDS, OTHER)
    assert (chunk.num_drafted, chunk.num_accepted, chunk.finish_reason) == (GAMMA, GAMMA, None)
    assert lengths(state) == (N + GAMMA, N + GAMMA - 1)
    assert state.propose_item(GAMMA, WHOLE).feed.token_ids == (DRAFT_IDS[-1], OTHER)
    assert state.verify_item(None, WHOLE).feed.token_ids == (OTHER,)


@pytest.mark.parametrize("num_accepted", range(GAMMA))
def test_rejection_keeps_what_was_accepted_on_both_sides(num_accepted):
    state = sequence()
    draft = proposed(state, *DRAFT_IDS)
    chunk = state.on_verdict(draft, accepting(num_accepted))
    assert chunk is not None
    assert chunk.token_ids == (*DRAFT_IDS[:num_accepted], OTHER)
    assert (chunk.num_drafted, chunk.num_accepted) == (GAMMA, num_accepted)
    kept = N + num_accepted
    assert lengths(state) == (kept, kept)
    for feed in (state.propose_item(GAMMA, WHOLE).feed, state.verify_item(None, WHOLE).feed):
        assert (feed.keep, feed.token_ids, feed.opening) == (kept, (OTHER,), None)


@pytest.mark.parametrize("num_accepted", [0, 1])
def test_a_single_draft_token_is_never_cached_by_the_draft(num_accepted):
    state = sequence()
    draft = proposed(state, 1)
    state.on_verdict(draft, accepting(num_accepted, (1,)))
    assert lengths(state) == (N + num_accepted, N)


def test_a_round_without_draft_commits_the_targets_own_token():
    state = sequence()
    verify = state.verify_item(None, WHOLE)
    assert (verify.feed.token_ids, verify.num_rows, verify.draft) == (PROMPT, 1, None)
    chunk = state.on_verdict(None, verdict_of(5))
    assert chunk is not None
    assert (chunk.token_ids, chunk.num_drafted, chunk.num_accepted) == ((5,), 0, 0)
    assert lengths(state) == (N, 0)


def test_a_draft_left_out_for_some_rounds_catches_up_with_all_it_missed():
    state = sequence()
    state.on_verdict(proposed(state, 1, 2), accepting(2, (1, 2)))
    for token in (21, 22, 23):
        state.on_verdict(None, verdict_of(token))
    feed = state.propose_item(2, WHOLE).feed
    assert (feed.keep, feed.token_ids) == (N + 1, (2, OTHER, 21, 22, 23))


@pytest.mark.parametrize("num_accepted", range(GAMMA + 1))
def test_rejection_mode_compares_ratios_with_the_noise_of_their_positions(num_accepted):
    state = sequence(mode=VerificationMode.REJECTION, seed=42, output=(21,))
    start = N + 1
    draft = proposed(state, *DRAFT_IDS)
    draws = [uniform(42, start + i, Purpose.ACCEPT) for i in range(GAMMA)]
    # Accepted by a hair up to there, and refused by none at all.
    ratios = tuple(u * (1 + 1e-12) if i < num_accepted else u for i, u in enumerate(draws))
    chunk = state.on_verdict(draft, verdict_of(31, 32, 33, 34, 35, ratios=ratios))
    assert chunk is not None
    assert chunk.num_accepted == num_accepted
    assert chunk.token_ids == (*DRAFT_IDS[:num_accepted], 31 + num_accepted)


# Ends -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", range(GAMMA + 1))
def test_a_stop_token_accepted_anywhere_in_a_block_ends_the_sequence(place):
    """A29: nothing of the block behind it is emitted, and it is counted."""
    block = (*DRAFT_IDS[:place], EOS, *DRAFT_IDS[place + 1 :])[: GAMMA + 1]
    draft_ids = block[:GAMMA]
    state = sequence(stop=(EOS,))
    bonus = EOS if place == GAMMA else OTHER
    chunk = state.on_verdict(proposed(state, *draft_ids), verdict_of(*draft_ids, bonus))
    assert chunk is not None
    assert chunk.token_ids == (*DRAFT_IDS[:place], EOS)
    assert state.finish_reason == chunk.finish_reason == "stop"
    assert state.log.output_ids == chunk.token_ids


@pytest.mark.parametrize("room", range(1, GAMMA + 2))
def test_the_cap_anywhere_in_a_block_ends_the_sequence(room):
    state = sequence(output=(21, 22), max_tokens=2 + room)
    chunk = state.on_verdict(proposed(state, *DRAFT_IDS), accepting(GAMMA))
    assert chunk is not None
    assert chunk.token_ids == (*DRAFT_IDS, OTHER)[:room]
    assert state.finish_reason == "length"
    assert state.log.num_output_tokens == state.request.stop.max_tokens


def test_a_rejected_stop_token_ends_nothing():
    state = sequence(stop=(EOS,))
    chunk = state.on_verdict(proposed(state, 1, EOS), verdict_of(1, OTHER, 5))
    assert chunk is not None
    assert (chunk.token_ids, chunk.finish_reason) == ((1, OTHER), None)


def test_the_context_of_the_target_is_a_cap():
    state = sequence(max_tokens=100)
    state.limit_to_context(N + 3)
    assert state.max_total_tokens == N + 3
    state.limit_to_context(N + 50)
    assert state.max_total_tokens == N + 3
    chunk = state.on_verdict(proposed(state, *DRAFT_IDS), accepting(GAMMA))
    assert chunk is not None
    assert (chunk.token_ids, chunk.finish_reason) == (DRAFT_IDS[:3], "length")


# Gamma ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "policy_gamma", "draft_context", "expected"),
    [
        ({}, 4, 100, 4),
        ({}, 0, 100, 0),
        ({"max_draft_tokens": 0}, 4, 100, 0),
        ({"max_draft_tokens": 2}, 4, 100, 2),
        ({"max_draft_tokens": 9}, 4, 100, 4),
        # The last token is always the target's own.
        ({"max_tokens": 1}, 4, 100, 0),
        ({"max_tokens": 2}, 4, 100, 1),
        ({"max_tokens": 5}, 4, 100, 4),
        ({"max_tokens": 6, "output": (1, 2, 3)}, 4, 100, 2),
        # The draft feeds the log and all of its own tokens but the last.
        ({}, 4, N + 3, 4),
        ({}, 4, N + 2, 3),
        ({}, 4, N, 1),
        ({}, 4, N - 1, 0),
        ({}, 4, 1, 0),
        ({"output": (1, 2)}, 4, N + 1, 0),
    ],
)
def test_gamma_is_within_every_limit(fields, policy_gamma, draft_context, expected):
    assert sequence(**fields).gamma(policy_gamma, draft_context) == expected


def test_the_end_of_the_targets_context_limits_gamma():
    state = sequence()
    state.limit_to_context(N + 3)
    assert state.gamma(8, 100) == 2


def test_no_draft_is_asked_once_it_had_no_room():
    state = sequence()
    state.on_draft_lost(lost(out_of_memory=True))
    assert state.gamma(4, 100) == 0
    state.leave_draft()
    assert state.gamma(4, 100) == 4, "another draft may have room"


# Catching up in chunks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_tokens", [1, 2, 3, 4, 5, 6, 100])
@pytest.mark.parametrize("output", [(), (21, 22, 23)])
def test_prefill_chunks_cover_the_log_exactly_once(chunk_tokens, output):
    state = sequence(output=output)
    fed: list[int] = []
    while (item := state.verify_item(None, chunk_tokens)).num_rows == 0:
        assert item.feed.keep == len(fed)
        assert len(item.feed.token_ids) == chunk_tokens
        assert (item.feed.opening is None) == (len(fed) > 0)
        fed.extend(item.feed.token_ids)
        state.on_prefilled(item)
    assert item.feed.keep == len(fed)
    assert 1 <= len(item.feed.token_ids) <= chunk_tokens
    assert (*fed, *item.feed.token_ids) == (*PROMPT, *output)


@pytest.mark.parametrize("chunk_tokens", [1, 2, 3, 4, 5, 100])
def test_the_draft_drafts_only_once_it_has_caught_up(chunk_tokens):
    state = sequence()
    fed: list[int] = []
    while (item := state.propose_item(3, chunk_tokens)).num_draft_tokens == 0:
        assert item.feed.keep == len(fed)
        fed.extend(item.feed.token_ids)
        assert state.on_proposed(item, draft_of()) is None
    assert (*fed, *item.feed.token_ids) == PROMPT
    assert item.num_draft_tokens == 3


def test_a_resumed_sequence_goes_on_behind_its_output():
    state = sequence(output=(21, 22), max_tokens=4)
    assert state.verify_item(None, WHOLE).feed.token_ids == (*PROMPT, 21, 22)
    assert state.propose_item(1, WHOLE).feed.opening.prompt_len == N
    chunk = state.on_verdict(proposed(state, 1), accepting(1, (1,)))
    assert (chunk.token_ids, chunk.finish_reason) == ((1, OTHER), "length")
    assert state.log.output_ids == (21, 22, 1, OTHER)


# Losses and stale answers -----------------------------------------------------------------------------------


def snapshot(state: SequenceState):
    return state.log.tail(0), vars_of(state.target), vars_of(state.draft), state.finish_reason


def vars_of(view):
    return {name: getattr(view, name) for name in view.__slots__}


def test_a_lost_cache_is_built_anew_from_the_log_under_a_new_epoch():
    state = sequence()
    state.on_verdict(proposed(state, *DRAFT_IDS), accepting(2))
    state.on_draft_lost(lost(epoch=0))
    feed = state.propose_item(1, WHOLE).feed
    assert (feed.epoch, feed.keep, feed.token_ids) == (1, 0, state.log.tail(0))
    assert feed.opening is not None
    assert state.verify_item(None, WHOLE).feed.epoch == 0, "the other worker has lost nothing"


def test_a_sequence_that_leaves_its_workers_is_fed_to_the_next_ones_from_the_log():
    state = sequence()
    state.on_verdict(proposed(state, *DRAFT_IDS), accepting(2))
    state.leave_workers()
    for feed in (state.propose_item(1, WHOLE).feed, state.verify_item(None, WHOLE).feed):
        assert (feed.epoch, feed.keep, feed.token_ids) == (1, 0, (*PROMPT, 1, 2, OTHER))


@pytest.mark.parametrize("epoch", [0, 2])
def test_a_stale_draft_is_discarded(epoch):
    state = sequence()
    state.draft.restart()
    item = state.propose_item(3, WHOLE)
    before = snapshot(state)
    assert state.on_proposed(item, draft_of(1, 2, 3, epoch=epoch)) is None
    assert snapshot(state) == before


@pytest.mark.parametrize("epoch", [0, 2])
def test_a_stale_verdict_commits_nothing(epoch):
    state = sequence()
    state.target.restart()
    draft = proposed(state, *DRAFT_IDS)
    before = snapshot(state)
    assert state.on_verdict(draft, accepting(GAMMA, epoch=epoch)) is None
    assert snapshot(state) == before


@pytest.mark.parametrize("epoch", [0, 2])
def test_a_stale_loss_changes_nothing(epoch):
    state = sequence()
    state.target.restart()
    state.draft.restart()
    before = snapshot(state)
    for on_lost in (state.on_target_lost, state.on_draft_lost):
        on_lost(lost(epoch=epoch, out_of_memory=True))
    assert snapshot(state) == before


def test_losses_are_counted_until_tokens_are_committed():
    state = sequence()
    for epoch in range(3):
        state.on_target_lost(lost(epoch=epoch))
    assert state.target.num_losses == 3
    state.on_verdict(None, verdict_of(5, epoch=3))
    assert state.target.num_losses == 0


def test_a_draft_whose_target_was_lost_is_asked_again_with_a_token_to_feed():
    """The draft holds the whole log then, but a worker can only give the law behind a token it is fed."""
    state = sequence()
    proposed(state, *DRAFT_IDS)
    state.on_target_lost(lost())
    feed = state.propose_item(GAMMA, WHOLE).feed
    assert (feed.keep, feed.token_ids) == (N - 1, PROMPT[-1:])


def test_a_draft_lost_while_its_block_is_verified_is_still_built_anew():
    state = sequence()
    draft = proposed(state, *DRAFT_IDS)
    state.on_draft_lost(lost())
    chunk = state.on_verdict(draft, accepting(2))
    assert chunk is not None
    assert chunk.token_ids == (1, 2, OTHER)
    feed = state.propose_item(1, WHOLE).feed
    assert (feed.epoch, feed.keep, feed.token_ids) == (1, 0, state.log.tail(0))
