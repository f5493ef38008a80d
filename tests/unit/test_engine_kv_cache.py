"""Shared prefixes on a real model: what is taken over from others is as good as what is computed."""

import random

import pytest
import torch

from specdec.errors import KVCacheFull
from tests.tiny_models import (
    fed,
    fed_in_chunks,
    item,
    runner_of,
    sequence_id,
    tiny_decoder,
    tiny_llama,
    tokens,
)

A, B, C = (sequence_id(name) for name in "abc")
BLOCK = 16
PROMPT = tokens(2 * BLOCK, seed=1)
"""Two whole blocks."""
FIRST, SECOND = tokens(7, seed=2), tokens(9, seed=3)
"""What may follow."""


class Recorder:
    """A forward that notes how many tokens it was given each time."""

    def __init__(self, forward):
        self._forward = forward
        self.num_tokens = []

    @property
    def device(self):
        return self._forward.device

    def forward(self, batch, cache):
        self.num_tokens.append(len(batch.token_ids))
        return self._forward.forward(batch, cache)


@pytest.fixture(params=[tiny_llama, tiny_decoder], ids=["model", "decoder"])
def make(request):
    """Runners with a, b and c open; their `fed` notes what is fed."""

    def make(num_blocks=20, *, shares_prefixes=True):
        runner = runner_of(
            request.param(), kv_capacity_tokens=num_blocks * BLOCK, shares_prefixes=shares_prefixes
        )
        runner.model = runner.fed = Recorder(runner.model)
        for sequence in (A, B, C):
            runner.open(sequence)
        return runner

    return make


@pytest.fixture
def runner(make):
    return make()


@pytest.fixture
def expected(make):
    """Last rows of a sequence by a runner that shares nothing."""

    def logits(token_ids, num_rows=1):
        return fed(make(shares_prefixes=False), "a", token_ids)[-num_rows:]

    return logits


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=1e-4)


def adopting(runner, name, token_ids, num_rows, *, num_adopted):
    """Feed a whole sequence, of which the first tokens should be cached already."""
    logits = fed(runner, name, token_ids, num_rows)
    assert runner.fed.num_tokens[-1] == len(token_ids) - num_adopted
    assert runner.length(sequence_id(name)) == len(token_ids)
    runner.cache.blocks.check_invariants()
    return logits


# Adoption -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "num_rows", [0, 1, len(SECOND)], ids=["none", "last", "from the shared part's end on"]
)
@pytest.mark.parametrize("first_ended", [False, True])
def test_adopted_prefix_gives_the_same_logits(runner, expected, num_rows, first_ended):
    fed(runner, "a", PROMPT + FIRST)
    if first_ended:
        runner.close(A)
    logits = adopting(runner, "b", PROMPT + SECOND, num_rows, num_adopted=len(PROMPT))
    assert_same(logits, expected(PROMPT + SECOND, len(SECOND))[len(SECOND) - num_rows :])
    behind = expected([*PROMPT, *SECOND, 5])
    assert_same(fed(runner, "b", [5]), behind)


def test_first_sequence_goes_on_as_if_alone_while_others_share_its_prefix(runner, expected):
    fed(runner, "a", PROMPT + FIRST)
    adopting(runner, "b", PROMPT + SECOND, 1, num_adopted=len(PROMPT))
    adopting(runner, "c", PROMPT + FIRST, 1, num_adopted=len(PROMPT))
    assert runner.kv_tokens_in_use == len(PROMPT) + 3 * BLOCK
    assert_same(fed(runner, "a", [5, 6]), expected([*PROMPT, *FIRST, 5, 6], 2))


def test_conversations_with_a_common_beginning_one_after_another(runner, expected):
    """The third says what the first said: whole blocks of its own answer are known by then."""
    answer = tokens(BLOCK + 3, seed=4)
    for text, num_adopted in (
        (PROMPT + answer, 0),
        (PROMPT + SECOND, len(PROMPT)),
        (PROMPT + answer, len(PROMPT) + BLOCK),
    ):
        runner.open(A)
        assert_same(adopting(runner, "a", text, 1, num_adopted=num_adopted), expected(text))
        runner.close(A)
    assert runner.kv_tokens_in_use == 0


@pytest.mark.parametrize(
    ("num_rows", "num_adopted"), [(0, 2 * BLOCK), (1, BLOCK), (BLOCK, BLOCK), (BLOCK + 1, 0)]
)
def test_wanted_rows_are_computed_whatever_is_cached(runner, expected, num_rows, num_adopted):
    fed(runner, "a", PROMPT)
    logits = fed(runner, "b", PROMPT, num_rows)
    assert logits.shape[0] == num_rows
    assert sum(runner.fed.num_tokens) == 2 * len(PROMPT) - num_adopted
    if num_rows:
        assert_same(logits, expected(PROMPT, num_rows))


def test_item_that_is_cached_already_and_wants_no_row_runs_no_forward(runner, expected):
    fed(runner, "a", PROMPT)
    assert fed(runner, "b", PROMPT, num_rows=0).shape[0] == 0
    assert runner.fed.num_tokens == [len(PROMPT)]
    assert runner.length(B) == len(PROMPT)
    assert runner.kv_tokens_in_use == len(PROMPT)
    assert_same(fed(runner, "b", FIRST), expected(PROMPT + FIRST, len(FIRST)))


def test_item_that_is_cached_already_beside_others_that_are_not(runner, expected):
    fed(runner, "a", PROMPT)
    logits = runner.forward([item("a", FIRST, 2), item("b", PROMPT, 0), item("c", PROMPT + SECOND, 1)])
    assert runner.fed.num_tokens[-1] == len(FIRST) + len(SECOND)
    assert_same(logits, torch.cat([expected(PROMPT + FIRST, 2), expected(PROMPT + SECOND)]))
    assert_same(fed(runner, "b", SECOND, 1), expected(PROMPT + SECOND))


def test_same_prompts_in_one_batch_are_computed_side_by_side(runner, expected):
    logits = runner.forward([item(name, PROMPT + FIRST, 1) for name in "abc"])
    assert runner.fed.num_tokens == [3 * len(PROMPT + FIRST)]
    assert_same(logits, expected(PROMPT + FIRST).expand(3, -1))
    for name in "abc":
        assert_same(fed(runner, name, [5]), expected([*PROMPT, *FIRST, 5]))


@pytest.mark.parametrize(("size", "num_computed"), [(BLOCK, 9), (2 * BLOCK, 9), (20, 25)])
def test_prompt_in_chunks_adopts_while_its_chunks_end_with_blocks(runner, expected, size, num_computed):
    text = PROMPT + SECOND
    fed(runner, "a", text)
    for start in range(0, len(text), size):
        last = fed(runner, "b", text[start : start + size], num_rows=start + size >= len(text))
    assert sum(runner.fed.num_tokens[1:]) == num_computed
    assert_same(last, expected(text))


def test_runner_that_shares_no_prefixes_computes_everything(make, expected):
    runner = make(shares_prefixes=False)
    fed(runner, "a", PROMPT + FIRST)
    adopting(runner, "b", PROMPT + FIRST, 0, num_adopted=0)
    runner.close(A)
    adopting(runner, "c", PROMPT + FIRST, 1, num_adopted=0)
    assert runner.kv_tokens_in_use == 6 * BLOCK


# Rollback into what is shared -----------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [1, BLOCK - 1, BLOCK, BLOCK + 5, 2 * BLOCK - 1])
def test_rollback_into_a_shared_block_and_other_tokens_leave_both_right(runner, expected, kept):
    fed(runner, "a", PROMPT + FIRST)
    adopting(runner, "b", PROMPT + SECOND, 1, num_adopted=len(PROMPT))
    runner.truncate(B, kept)
    other = PROMPT[:kept] + SECOND
    assert_same(fed(runner, "b", SECOND), expected(other, len(SECOND)))
    assert_same(fed(runner, "a", [5]), expected([*PROMPT, *FIRST, 5]))
    assert_same(fed(runner, "b", [5]), expected([*other, 5]))
    assert_same(adopting(runner, "c", PROMPT + SECOND, 1, num_adopted=len(PROMPT)), expected(PROMPT + SECOND))


def test_first_sequence_rolled_back_into_a_shared_block_leaves_the_other_right(runner, expected):
    fed(runner, "a", PROMPT + FIRST)
    fed(runner, "b", PROMPT + SECOND, 1)
    runner.truncate(A, BLOCK + 3)
    other = PROMPT[: BLOCK + 3] + FIRST
    assert_same(fed(runner, "a", FIRST), expected(other, len(FIRST)))
    assert_same(fed(runner, "b", [5]), expected([*PROMPT, *SECOND, 5]))


def test_rejected_draft_that_filled_a_block_is_seen_by_nobody_with_other_tokens(runner, expected):
    log, rejected, right = tokens(BLOCK - 2, seed=5), [7, 8, 9, 10], [11, 12, 13, 14]
    fed(runner, "a", log)
    fed(runner, "a", rejected)
    runner.truncate(A, len(log))
    assert_same(adopting(runner, "b", log + right, 1, num_adopted=0), expected(log + right))
    assert_same(fed(runner, "a", right, 4), expected(log + right, 4))
    assert_same(adopting(runner, "c", log + rejected, 1, num_adopted=0), expected(log + rejected))


def test_forward_that_died_leaves_nothing_to_adopt(runner, expected, monkeypatch):
    def dying(batch, cache):
        runner.fed._forward.forward(batch, cache)
        raise RuntimeError("device lost")

    with monkeypatch.context() as broken:
        broken.setattr(runner.fed, "forward", dying)
        with pytest.raises(RuntimeError):
            fed(runner, "a", PROMPT)
    assert runner.length(A) == 0
    runner.truncate(A, 0)
    assert runner.kv_tokens_in_use == 0
    assert_same(adopting(runner, "b", PROMPT, 1, num_adopted=0), expected(PROMPT))
    assert_same(adopting(runner, "a", PROMPT + FIRST, 1, num_adopted=len(PROMPT)), expected(PROMPT + FIRST))


# Room -----------------------------------------------------------------------------------------------------


def test_evicted_prefix_is_computed_again(make, expected):
    runner = make(num_blocks=4)
    fed(runner, "a", PROMPT + FIRST)
    runner.close(A)
    fed(runner, "b", tokens(4 * BLOCK, seed=6))
    runner.close(B)
    assert_same(adopting(runner, "c", PROMPT + FIRST, 1, num_adopted=0), expected(PROMPT + FIRST))


def test_half_evicted_prefix_is_adopted_up_to_there(make, expected):
    runner = make(num_blocks=4)
    fed(runner, "a", PROMPT + FIRST)
    runner.close(A)
    fed(runner, "b", tokens(3 * BLOCK, seed=6))
    runner.close(B)
    assert_same(adopting(runner, "c", PROMPT + FIRST, 1, num_adopted=BLOCK), expected(PROMPT + FIRST))


def test_item_and_its_extra_tokens_fit_exactly(make, expected):
    runner = make(num_blocks=3)
    runner.reserve(item("a", PROMPT, 1), num_extra=BLOCK)
    assert runner.kv_tokens_in_use == 3 * BLOCK
    text = PROMPT + tokens(BLOCK, seed=7)
    logits = torch.cat([fed(runner, "a", PROMPT, 1), fed_in_chunks(runner, "a", text[len(PROMPT) :], 1)])
    assert_same(logits, expected(text, BLOCK + 1))
    with pytest.raises(KVCacheFull):
        fed(runner, "a", [5])


def test_extra_tokens_behind_an_adopted_prefix_fit_exactly(make, expected):
    runner = make(num_blocks=4)
    fed(runner, "a", PROMPT)
    runner.reserve(item("b", PROMPT + FIRST, 1), num_extra=2 * BLOCK - len(FIRST))
    assert runner.kv_tokens_in_use == 4 * BLOCK
    fed(runner, "b", PROMPT + FIRST, 1)
    rest = tokens(2 * BLOCK - len(FIRST), seed=7)
    assert_same(fed_in_chunks(runner, "b", rest, 1)[-1:], expected(PROMPT + FIRST + rest))
    with pytest.raises(KVCacheFull):
        fed(runner, "b", [5])


def test_item_that_finds_no_room_is_as_if_never_asked_for(make, expected):
    """What it would have adopted included: it may be asked for something else next."""
    runner = make(num_blocks=4)
    fed(runner, "a", PROMPT)
    with pytest.raises(KVCacheFull):
        runner.reserve(item("b", PROMPT + tokens(BLOCK), 1), num_extra=2 * BLOCK)
    assert (runner.length(B), runner.kv_tokens_in_use) == (0, len(PROMPT))
    assert_same(adopting(runner, "b", SECOND, 1, num_adopted=0), expected(SECOND))


def test_reservation_survives_one_that_finds_no_room(make, expected):
    runner = make(num_blocks=4)
    runner.reserve(item("a", PROMPT, 1), num_extra=BLOCK)
    with pytest.raises(KVCacheFull):
        runner.reserve(item("a", PROMPT, 1), num_extra=3 * BLOCK)
    assert runner.kv_tokens_in_use == 3 * BLOCK
    assert_same(fed(runner, "a", PROMPT, 1), expected(PROMPT))


# Everything at once ---------------------------------------------------------------------------------------


def test_long_walk_of_requests_with_common_beginnings_gives_the_right_logits(make, expected):
    """Rounds of three requests at a time, with rollbacks, in a cache too small for what has been."""
    rng = random.Random(0)
    runner = make(num_blocks=12)
    prompts = [PROMPT, PROMPT + tokens(BLOCK, seed=8), PROMPT[:BLOCK] + tokens(20, seed=9)]
    texts = {name: [] for name in "abc"}
    for _ in range(60):
        items = []
        for name, text in texts.items():
            if len(text) > 4 * BLOCK - 8 or not text:
                runner.open(sequence_id(name))
                text[:] = []
                new = rng.choice(prompts) + rng.choices((3, 4), k=rng.randint(1, 4))
            else:
                del text[len(text) - rng.randint(0, 5) :]
                runner.truncate(sequence_id(name), len(text))
                new = rng.choices((3, 4), k=rng.randint(1, 8))
            text += new
            items.append(item(name, new, 1))
        logits = runner.forward(items)
        assert_same(logits, torch.cat([expected(text) for text in texts.values()]))
        runner.cache.blocks.check_invariants()
    assert sum(runner.fed.num_tokens) < 60 * 3 * 8
