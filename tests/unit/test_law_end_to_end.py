"""Seeded chi-square tests of whole sequences through the real coordinator, draft and target worker.

Seeds are fixed, so every p-value below is the same on every run; it is printed. Hard invariants (a token of
probability 0 never appears) need no statistics and are checked in the same breath.
"""

from __future__ import annotations

import numpy as np
import pytest

from specdec.engine.simulated import ToyLaw
from specdec.types import SamplingParams, VerificationMode
from tests.laws import (
    MIN_P_VALUE,
    Generated,
    app_config,
    chi_square_p_value,
    conditional_levels,
    count_tuples,
    generate_all,
    generation,
    reference_law,
    tail_laws,
    toy_law,
    toy_next_token_law,
)

NUM_SEQUENCES = 20_000
NUM_COMPARED = 500
PROMPT = (1,)
"""A single token: the very first round drafts."""
REJECTION, COUPLED = VerificationMode.REJECTION, VerificationMode.COUPLED


def similar_draft(target: ToyLaw, scale: float) -> ToyLaw:
    """A draft that is mostly right: about 70 to 80 % of its tokens are accepted."""
    noise = toy_law("normal", target.vocab_size, 99)
    return ToyLaw(target._logits + noise._logits * scale)


async def generate(
    gamma,
    target,
    draft,
    num_sequences=NUM_SEQUENCES,
    *,
    draft_support=64,
    max_tokens=None,
    pipeline="serial",
    **fields,
):
    """``num_sequences`` outputs of distinct seeds, at least gamma + 3 tokens each."""
    max_tokens = max_tokens or gamma + 3
    requests = [
        generation(seed, SamplingParams(seed=seed, **fields), prompt=PROMPT, max_tokens=max_tokens)
        for seed in range(num_sequences)
    ]
    results = await generate_all(
        app_config(gamma, draft_support=draft_support, pipeline=pipeline), target, draft, requests
    )
    assert all(len(result.token_ids) == max_tokens for result in results)
    assert all(result.finish_reason == "length" for result in results)
    return results


def markov_windows(target: ToyLaw, params: SamplingParams, num_tokens: int):
    """Exact joint law of three tokens in a row, the last of them output tokens 1, 2, ..., ``num_tokens``."""
    vocab = range(target.vocab_size)
    step = np.array(
        [[reference_law(target.row([a, b]).tolist(), params, (), ()) for b in vocab] for a in vocab]
    )
    pair = np.zeros((len(vocab), len(vocab)))
    pair[0, PROMPT[-1]] = 1.0
    for _ in range(num_tokens):
        window = pair[:, :, None] * step
        yield window
        pair = window.sum(axis=0)


def assert_windows_follow(
    results: list[Generated], target: ToyLaw, params: SamplingParams, num_tokens: int
) -> None:
    """Every output token up to ``num_tokens``, with the two before it, against the exact law."""
    rows = np.array([(0, *PROMPT, *result.token_ids) for result in results])
    p_values = []
    for start, law in enumerate(markov_windows(target, params, num_tokens)):
        counts = count_tuples(rows[:, start : start + 3], target.vocab_size, 3)
        p_values.append(chi_square_p_value(counts, law))
    shown = " ".join(f"{p:.2g}" for p in p_values)
    print(f"\nN = {len(results)}, p-values at positions 1..{num_tokens}: {shown}")
    assert min(p_values) > MIN_P_VALUE


def acceptance(results: list[Generated]) -> float:
    return sum(r.num_accepted for r in results) / sum(r.num_drafted for r in results)


async def test_rejection_follows_the_target_with_one_draft_token_and_a_truncated_draft():
    target = toy_law("normal", 6, 1)
    results = await generate(1, target, similar_draft(target, 0.5), draft_support=3, mode=REJECTION)
    assert 0.5 < acceptance(results) < 0.9
    assert_windows_follow(results, target, SamplingParams(), num_tokens=3)


@pytest.mark.slow
async def test_rejection_follows_the_processed_target_with_three_draft_tokens():
    target = toy_law("normal", 4, 2)
    fields = {"temperature": 0.8, "logit_bias": ((1, 0.4),), "top_p": 0.95, "min_p": 0.05}
    results = await generate(3, target, similar_draft(target, 0.5), mode=REJECTION, **fields)
    assert 0.5 < acceptance(results) < 0.9
    assert_windows_follow(results, target, SamplingParams(**fields), num_tokens=5)


async def test_rejection_follows_a_law_that_depends_on_all_tokens_before():
    """Penalties count drafted tokens: joint law of the first three tokens."""
    target = toy_law("normal", 4, 12)
    fields = {"temperature": 0.9, "frequency_penalty": 0.8, "repetition_penalty": 1.3}
    results = await generate(
        3, target, similar_draft(target, 0.5), num_sequences=4_000, max_tokens=4, mode=REJECTION, **fields
    )
    next_token_law = toy_next_token_law(target, SamplingParams(**fields), PROMPT)
    law = tail_laws(conditional_levels(next_token_law, target.vocab_size, 3))[0]
    counts = count_tuples((result.token_ids[:3] for result in results), target.vocab_size, 3)
    p_value = chi_square_p_value(counts, law)
    print(f"\nN = {len(results)}, joint law of tokens 1..3 with penalties: p = {p_value:.2g}")
    assert p_value > MIN_P_VALUE


@pytest.mark.slow
async def test_rejection_follows_the_target_with_eight_draft_tokens():
    target = toy_law("normal", 5, 3)
    results = await generate(8, target, similar_draft(target, 0.25), mode=REJECTION)
    assert 0.5 < acceptance(results) < 0.9
    assert_windows_follow(results, target, SamplingParams(), num_tokens=10)


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", ["lookahead", "groups"])
@pytest.mark.parametrize("mode", [REJECTION, COUPLED])
async def test_overlapping_rounds_leave_the_law_and_in_coupled_mode_every_token(mode, pipeline):
    """Output tokens 1 to gamma + 2."""
    target = toy_law("normal", 5, 11)
    draft = similar_draft(target, 0.4)
    results = await generate(3, target, draft, 4_000, mode=mode, pipeline=pipeline)
    assert 0.5 < acceptance(results) < 0.9
    assert_windows_follow(results, target, SamplingParams(), num_tokens=5)
    if mode is COUPLED:
        serial = await generate(3, target, draft, NUM_COMPARED, mode=mode)
        assert [r.token_ids for r in serial] == [r.token_ids for r in results[:NUM_COMPARED]]


@pytest.mark.slow
async def test_coupled_follows_the_target_with_one_three_and_eight_draft_tokens():
    target = toy_law("normal", 5, 4)
    draft = similar_draft(target, 0.4)
    results = await generate(3, target, draft, mode=COUPLED)
    assert 0.5 < acceptance(results) < 0.9
    assert_windows_follow(results, target, SamplingParams(), num_tokens=5)
    # Other gammas and drafts give the same tokens for the same seeds, so they have the same law.
    for gamma, other_draft in ((1, draft), (8, draft), (8, toy_law("peaky", 5, 5))):
        others = await generate(gamma, target, other_draft, NUM_COMPARED, max_tokens=6, mode=COUPLED)
        assert [r.token_ids for r in others] == [r.token_ids for r in results[:NUM_COMPARED]]


async def test_an_unrelated_draft_changes_the_speed_and_not_the_law():
    target = toy_law("normal", 4, 6)
    results = await generate(2, target, toy_law("peaky", 4, 7), num_sequences=4_000, mode=REJECTION)
    assert 0.0 < acceptance(results) < 0.5
    assert_windows_follow(results, target, SamplingParams(), num_tokens=4)


async def test_the_targets_own_law_as_a_draft_is_accepted_whole():
    target = toy_law("normal", 5, 8)
    results = await generate(8, target, target, num_sequences=1_000, mode=REJECTION)
    assert sum(result.num_drafted for result in results) > 0
    assert all(result.num_accepted == result.num_drafted for result in results)
    assert_windows_follow(results, target, SamplingParams(), num_tokens=10)
