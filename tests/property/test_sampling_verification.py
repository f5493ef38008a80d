"""Acceptance, residual, race and truncation over random laws: disjoint, one-hot, with zeros, any gamma."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.sampling.drawing import exponential_rows
from specdec.sampling.noise import Purpose
from specdec.sampling.verification import (
    acceptance_ratios,
    race,
    residual_probs,
    residual_weights,
    truncate_support,
)
from specdec.speculation.acceptance import count_accepted
from specdec.types import VerificationMode
from tests.laws import race_joint_law

SMALLEST_NOISE = 2.0**-33
LARGEST_NOISE = 24 * math.log(2)
"""The ends of what `exponentials` can return."""
SEED = st.integers(0, 10_000)

SHAPES = ("any", "tiny entries", "holes", "one-hot", "flat", "low half", "high half")


@st.composite
def weight_rows(draw, vocab_size: int, num_rows: int, dtype=torch.float32) -> torch.Tensor:
    """Rows that sum to 1, each of one of several shapes; the halves have disjoint supports."""
    rows = [_weights(draw(st.sampled_from(SHAPES)), draw(SEED), vocab_size) for _ in range(num_rows)]
    weights = torch.from_numpy(np.array(rows))
    return (weights / weights.sum(dim=-1, keepdim=True)).to(dtype)


def _weights(shape: str, seed: int, vocab_size: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    weights = rng.exponential(size=vocab_size)
    token, chosen, half = np.arange(vocab_size), rng.integers(vocab_size), vocab_size // 2
    match shape:
        case "tiny entries":
            weights *= rng.choice([1.0, 1e-7, 1e-20, 1e-30], size=vocab_size)
        case "holes":
            weights *= (rng.random(vocab_size) < 0.5) | (token == chosen)
        case "one-hot":
            weights *= token == chosen
        case "flat":
            weights[:] = 1.0
        case "low half":
            weights *= token < half
        case "high half":
            weights *= token >= half
    return weights


@st.composite
def pairs_of_laws(draw):
    """Target rows, draft rows of the same shape, and a support size."""
    vocab_size, gamma = draw(st.integers(2, 50)), draw(st.integers(1, 8))
    target, draft = (draw(weight_rows(vocab_size, gamma)) for _ in range(2))
    if draw(st.booleans()):
        draft[0] = target[0]
    return target, draft, draw(st.integers(1, 60))


@given(pairs_of_laws())
@settings(max_examples=150, deadline=None)
def test_ratios_are_never_negative_and_refuse_what_the_target_excludes(case):
    target, draft, support = case
    ids, probs = truncate_support(draft, support)
    dense = _dense(ids, probs, target.shape[1])
    ratios = _all_ratios(target, ids, probs)
    assert torch.all(torch.isfinite(ratios))
    assert torch.all(ratios >= 0.0)
    assert torch.all(ratios[(target == 0.0) | (dense == 0.0)] == 0.0)
    assert torch.all(ratios[(dense > 0.0) & (target >= dense)] >= 1.0)
    assert torch.all(ratios[(target > 0.0) & (dense > 0.0)] > 0.0)


def test_a_ratio_of_zero_refuses_even_a_draw_of_zero():
    assert count_accepted(VerificationMode.REJECTION, [2], [0, 0], [0.0], [0.0]) == 0


@given(pairs_of_laws())
@settings(max_examples=200, deadline=None)
def test_residual_is_a_law_outside_what_the_draft_covers(case):
    target, draft, support = case
    ids, probs = truncate_support(draft, support)
    residual = residual_probs(target, ids, probs)
    covered = _dense(ids, probs, target.shape[1]) >= target
    torch.testing.assert_close(residual.sum(dim=-1), torch.ones(len(target)), rtol=0.0, atol=1e-5)
    assert torch.all(residual >= 0.0)
    for row in range(len(target)):
        if covered[row].all():
            weights = residual_weights(target, ids, probs)
            assert torch.equal(weights[row], target[row]), "nothing can be rejected: the target itself"
        else:
            assert torch.all(residual[row][covered[row]] == 0.0)


@given(pairs_of_laws())
@settings(max_examples=150, deadline=None)
def test_one_token_of_a_round_has_the_targets_law(case):
    """The theorem at gamma = 1, for any vocabulary, in the float32 that is served."""
    target, draft, support = case
    ids, probs = truncate_support(draft, support)
    dense = _dense(ids, probs, target.shape[1])
    ratios = _all_ratios(target, ids, probs)
    accepted = dense * ratios.clamp_max(1.0)
    refused = 1.0 - accepted.sum(dim=-1, keepdim=True)
    law = accepted + refused * residual_probs(target, ids, probs)
    torch.testing.assert_close(law, target, rtol=0.0, atol=1e-5)


@given(pairs_of_laws())
@settings(max_examples=200, deadline=None)
def test_truncated_support_is_a_law_on_the_most_likely_tokens(case):
    _, draft, support = case
    ids, probs = truncate_support(draft, support)
    num_kept = min(support, draft.shape[1])
    assert ids.shape == probs.shape == (draft.shape[0], num_kept)
    torch.testing.assert_close(probs.sum(dim=-1), torch.ones(len(draft)), rtol=0.0, atol=1e-6)
    assert torch.all(probs >= 0.0)
    for row, row_ids in zip(draft, ids.tolist(), strict=True):
        assert len(set(row_ids)) == num_kept
        left_out = [row[token].item() for token in range(len(row)) if token not in row_ids]
        assert max(left_out, default=0.0) <= row[row_ids].min().item()
    assert torch.all((probs > 0.0) <= (draft.gather(1, ids) > 0.0))


@given(st.data(), st.integers(2, 50), st.sampled_from([torch.float32, torch.float64]))
@settings(max_examples=200, deadline=None)
def test_race_never_draws_an_index_of_weight_zero(data, vocab_size, dtype):
    weights = data.draw(weight_rows(vocab_size, 3, dtype))
    rng = np.random.default_rng(data.draw(SEED))
    extremes = rng.choice([SMALLEST_NOISE, 1.0, LARGEST_NOISE], size=(3, vocab_size))
    ordinary = rng.exponential(size=(3, vocab_size))
    noise = torch.from_numpy(np.where(rng.random((3, vocab_size)) < 0.5, extremes, ordinary)).float()
    winners = race(weights, noise)
    assert winners.dtype == torch.int64
    assert torch.all(weights.gather(1, winners.unsqueeze(1)) > 0.0)
    assert torch.equal(winners, (noise.to(dtype) / weights).argmin(dim=-1))


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_race_needs_no_normalised_weights(scale):
    weights = torch.tensor([[0.0, 0.2, 0.5, 0.3]]).expand(500, -1)
    noise = exponential_rows([(seed, 0) for seed in range(500)], Purpose.TARGET, 4)
    assert torch.equal(race(weights * scale, noise), race(weights, noise))


def test_race_is_the_argmax_of_log_weights_plus_gumbel_noise():
    weights = torch.softmax(torch.randn(500, 20, generator=torch.Generator().manual_seed(1)), dim=-1)
    noise = exponential_rows([(seed, 3) for seed in range(500)], Purpose.TARGET, 20)
    gumbel = -noise.double().log()
    assert torch.equal(race(weights, noise), (weights.double().log() + gumbel).argmax(dim=-1))


@given(pairs_of_laws())
@settings(max_examples=60, deadline=None)
def test_coupled_races_agree_at_least_as_often_as_the_bound_says(case):
    """Daliri et al. 2024: P(agree) >= (1 - d) / (1 + d) with d the total variation distance."""
    target, draft, _ = case
    q, p = draft[0].double().numpy(), target[0].double().numpy()
    joint = race_joint_law(q / q.sum(), p / p.sum())
    distance = np.abs(q / q.sum() - p / p.sum()).sum() / 2
    assert np.trace(joint) >= (1 - distance) / (1 + distance) - 1e-9


# The accept rule --------------------------------------------------------------------------------------------

TOKENS = st.lists(st.integers(0, 2), max_size=8)


@given(TOKENS, st.data(), st.sampled_from([VerificationMode.GREEDY, VerificationMode.COUPLED]))
def test_tokens_are_accepted_up_to_the_first_that_differs(draft_ids, data, mode):
    size = len(draft_ids) + 1
    chosen = data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    num_accepted = count_accepted(mode, draft_ids, chosen, [], [])
    assert draft_ids[:num_accepted] == chosen[:num_accepted]
    assert num_accepted == len(draft_ids) or draft_ids[num_accepted] != chosen[num_accepted]


@given(st.lists(st.tuples(st.floats(0.0, 2.0), st.floats(0.0, 1.0, exclude_max=True)), max_size=8))
def test_rejection_stops_at_the_first_draw_that_is_not_below_its_ratio(cells):
    ratios, uniforms = [ratio for ratio, _ in cells], [u for _, u in cells]
    draft_ids = [0] * len(cells)
    # The verdict's tokens agree with the draft: rejection must not look at them.
    num_accepted = count_accepted(
        VerificationMode.REJECTION, draft_ids, [0] * (len(cells) + 1), ratios, uniforms
    )
    assert all(u < ratio for u, ratio in zip(uniforms[:num_accepted], ratios, strict=False))
    assert num_accepted == len(cells) or uniforms[num_accepted] >= ratios[num_accepted]


@pytest.mark.parametrize("mode", list(VerificationMode))
def test_a_round_without_draft_accepts_nothing(mode):
    assert count_accepted(mode, (), (5,), (), ()) == 0


def _dense(ids: torch.Tensor, probs: torch.Tensor, vocab_size: int) -> torch.Tensor:
    return torch.zeros(ids.shape[0], vocab_size, dtype=probs.dtype).scatter(1, ids, probs)


def _all_ratios(target: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """Ratios of every token as if it had been drafted, [rows, vocab]."""
    num_rows, vocab_size = target.shape
    drafted = torch.arange(vocab_size).expand(num_rows, vocab_size)
    return torch.stack(
        [acceptance_ratios(target, drafted[:, t], ids, probs) for t in range(vocab_size)], dim=1
    )
