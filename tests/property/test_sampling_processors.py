"""Processors against the plain reference of `tests.laws`, and what must hold for any parameters at all."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.sampling.processors import mask_padding, process_logits, target_law
from specdec.sampling.rows import RowContext
from specdec.types import SamplingParams, VerificationMode
from tests.laws import reference_law

SEED = st.integers(0, 10_000)
MODES = st.sampled_from(list(VerificationMode))
TINY_TEMPERATURES = (1e-5, 1e-30, 5e-324)
SMALLEST_PROB = 1e-290
"""Below it numpy and torch disagree on what is 0."""


def logits_of(seed: int, vocab_size: int, *, scale: float = 2.0, hidden: float = 0.0) -> torch.Tensor:
    """[1, vocab] float64 normal logits, a share of them ``-inf`` but never all."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=vocab_size) * scale
    token = np.arange(vocab_size)
    logits[(rng.random(vocab_size) < hidden) & (token != rng.integers(vocab_size))] = -np.inf
    return torch.from_numpy(logits).unsqueeze(0)


def row_context(params: SamplingParams, prompt=(0,), output=(), tokens_to_come=(0, 1, 1)) -> RowContext:
    """A row's context whose list of tokens is longer than what it is conditioned on."""
    return RowContext(
        params=params,
        token_ids=[*prompt, *output, *tokens_to_come],
        prompt_len=len(prompt),
        length=len(prompt) + len(output),
    )


@st.composite
def params_for(draw, vocab_size: int, *, mode=None) -> SamplingParams:
    """Anything a client may ask for."""
    biased = draw(st.lists(st.integers(0, vocab_size - 1), unique=True, max_size=3))
    words = st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=2).map(tuple)
    return SamplingParams(
        mode=draw(MODES) if mode is None else mode,
        temperature=draw(st.sampled_from([1.0, 0.3, 0.7, 1.5, 2.0])),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 5, vocab_size, vocab_size + 7])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.95, 0.75, 0.5, 1e-9, 5e-324])),
        min_p=draw(st.sampled_from([0.0, 0.0, 1e-3, 0.2, 0.5, 1.0, 5e-324])),
        presence_penalty=draw(st.sampled_from([0.0, 0.6, 2.0, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.4, 2.0, -2.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 2.0, 0.5])),
        logit_bias=tuple((token, draw(st.sampled_from([-100.0, -1.0, 2.5, 100.0]))) for token in biased),
        bad_words=tuple(draw(st.lists(words, max_size=2))),
    )


@st.composite
def cases(draw, vocab_size: int | None = None):
    """Logits, parameters, prompt and output tokens."""
    vocab_size = vocab_size or draw(st.integers(2, 50))
    logits = logits_of(draw(SEED), vocab_size, hidden=draw(st.sampled_from([0.0, 0.5])))
    tokens = st.lists(st.integers(0, vocab_size - 1), max_size=8)
    return logits, draw(params_for(vocab_size)), [0, *draw(tokens)], draw(tokens)


@given(cases())
@settings(max_examples=400, deadline=None)
def test_processed_law_is_the_references(case):
    logits, params, prompt, output = case
    context = row_context(params, prompt, output)
    expected = reference_law(logits[0].tolist(), params, prompt, output)
    if params.is_greedy:
        assert process_logits(logits, [context]).argmax().item() == expected.argmax()
    else:
        law = target_law(logits, [context])[0].numpy()
        np.testing.assert_allclose(law, expected, rtol=0.0, atol=1e-12)
        assert ((law > SMALLEST_PROB) == (expected > SMALLEST_PROB)).all()


@given(cases())
@settings(max_examples=100, deadline=None)
def test_logits_are_left_as_they_were(case):
    logits, params, prompt, output = case
    before = logits.clone()
    process_logits(mask_padding(logits, logits.shape[1]), [row_context(params, prompt, output)])
    assert torch.equal(logits, before)


@given(st.integers(2, 50).flatmap(lambda vocab_size: st.lists(cases(vocab_size), min_size=2, max_size=6)))
@settings(max_examples=150, deadline=None)
def test_each_row_comes_out_as_if_it_were_alone(rows):
    """Bit for bit, in the float32 that is served: a text must not depend on its neighbours in the batch."""
    batch = torch.cat([logits for logits, *_ in rows]).float()
    contexts = [row_context(*of_row) for _, *of_row in rows]
    together = process_logits(batch, contexts)
    alone = [process_logits(batch[i : i + 1], [context]) for i, context in enumerate(contexts)]
    assert torch.equal(together, torch.cat(alone))
    law = torch.softmax(together, dim=-1)
    assert torch.equal(law, torch.cat([torch.softmax(row, dim=-1) for row in alone]))


def test_a_tie_at_the_top_k_threshold_does_not_depend_on_the_neighbours():
    """Taking the maximum off a row of temperature 1 would round both small logits to the same value."""
    row = torch.tensor([[10.0, 2e-8, 1e-8, -3.0]])
    hot = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    contexts = [row_context(SamplingParams(top_k=2)), row_context(SamplingParams(temperature=0.7))]
    together = process_logits(torch.cat([row, hot]), contexts)
    assert torch.equal(together[0], torch.tensor([10.0, 2e-8, -torch.inf, -torch.inf]))


# Truncation -------------------------------------------------------------------------------------------------

TRUNCATIONS = st.one_of(
    st.integers(1, 60).map(lambda k: {"top_k": k}),
    st.floats(0.0, 1.0, exclude_min=True).map(lambda p: {"top_p": p}),
    st.floats(0.0, 1.0).map(lambda p: {"min_p": p}),
    st.builds(
        lambda k, p, m: {"top_k": k, "top_p": p, "min_p": m},
        st.integers(1, 60),
        st.floats(0.0, 1.0, exclude_min=True),
        st.floats(0.0, 1.0),
    ),
)


@given(SEED, st.integers(2, 50), TRUNCATIONS, st.sampled_from([0.0, 1e-3, 2.0, 50.0]))
@settings(max_examples=300, deadline=None)
def test_truncation_keeps_the_most_likely_token_and_only_ever_removes(seed, vocab_size, fields, scale):
    logits = logits_of(seed, vocab_size, scale=scale, hidden=0.3).float()
    law = target_law(logits, [row_context(SamplingParams(**fields))])[0]
    plain = torch.softmax(logits, dim=-1)[0]
    assert law[logits.argmax()] > 0.0
    assert law.sum().item() == pytest.approx(1.0, abs=1e-5)
    assert torch.all((law > 0.0) <= (plain > 0.0))
    kept = law > 0.0
    # What is kept keeps its proportions.
    torch.testing.assert_close(law[kept], plain[kept] / plain[kept].sum(), rtol=1e-4, atol=1e-7)


@given(SEED, st.integers(2, 50), st.integers(1, 60))
@settings(max_examples=100, deadline=None)
def test_top_k_keeps_k_tokens_when_none_are_tied(seed, vocab_size, k):
    logits = logits_of(seed, vocab_size)
    kept = torch.isfinite(process_logits(logits, [row_context(SamplingParams(top_k=k))]))
    assert kept.sum().item() == min(k, vocab_size)
    assert torch.equal(kept[0], logits[0] >= logits[0].sort(descending=True).values[min(k, vocab_size) - 1])


@given(SEED, st.integers(2, 50), st.floats(0.01, 0.99))
@settings(max_examples=100, deadline=None)
def test_top_p_keeps_the_smallest_nucleus_of_that_mass(seed, vocab_size, top_p):
    logits = logits_of(seed, vocab_size)
    kept = torch.isfinite(process_logits(logits, [row_context(SamplingParams(top_p=top_p))]))[0]
    probs = torch.softmax(logits, dim=-1)[0]
    mass = probs[kept].sum().item()
    assert mass >= top_p - 1e-12
    assert mass - probs[kept].min().item() < top_p
    assert probs[~kept].max().item() <= probs[kept].min().item() if (~kept).any() else True


@given(SEED, st.integers(2, 50), st.floats(0.01, 1.0))
@settings(max_examples=100, deadline=None)
def test_min_p_drops_what_is_less_likely_than_that_fraction_of_the_best(seed, vocab_size, min_p):
    logits = logits_of(seed, vocab_size)
    kept = torch.isfinite(process_logits(logits, [row_context(SamplingParams(min_p=min_p))]))[0]
    probs = torch.softmax(logits, dim=-1)[0]
    assert torch.all(probs[kept] >= min_p * probs.max() * (1 - 1e-12))
    assert torch.all(probs[~kept] < min_p * probs.max() * (1 + 1e-12))


@pytest.mark.parametrize(("top_p", "num_kept"), [(0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3), (0.76, 4)])
def test_top_p_reached_exactly_needs_no_further_token(top_p, num_kept):
    kept = torch.isfinite(process_logits(torch.zeros(1, 4), [row_context(SamplingParams(top_p=top_p))]))
    assert kept.tolist() == [[token < num_kept for token in range(4)]]


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"top_p": 0.75, "min_p": 0.5}, [0, 1, 2]),  # min-p first would leave 0.4 + 0.3 of 0.9: enough
        ({"top_k": 3, "top_p": 0.75}, [0, 1]),  # top-p first would need the third token
        ({"top_k": 3, "top_p": 0.8}, [0, 1, 2]),
        ({"top_k": 2, "min_p": 0.2}, [0, 1]),
    ],
)
def test_truncations_are_applied_in_the_stated_order(fields, kept):
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64).log()
    law = target_law(logits, [row_context(SamplingParams(**fields))])
    assert law[0].nonzero().flatten().tolist() == kept


@pytest.mark.parametrize("fields", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}], ids=str)
def test_ties_for_the_best_token_leave_at_least_one(fields):
    law = target_law(torch.zeros(1, 5), [row_context(SamplingParams(**fields))])
    assert law.sum().item() == pytest.approx(1.0)
    assert torch.isfinite(law).all()


# Extremes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", TINY_TEMPERATURES)
@given(seed=SEED, vocab_size=st.integers(2, 50), hidden=st.sampled_from([0.0, 0.5]))
@settings(max_examples=30, deadline=None)
def test_a_tiny_temperature_gives_the_argmax(dtype, temperature, seed, vocab_size, hidden):
    logits = logits_of(seed, vocab_size, scale=5.0, hidden=hidden).to(dtype)
    best = logits.argmax(dim=-1)
    logits[0, best] += 0.01
    law = target_law(logits, [row_context(SamplingParams(temperature=temperature))])
    assert torch.equal(law, torch.nn.functional.one_hot(best, vocab_size).to(dtype))


@pytest.mark.parametrize("temperature", [*TINY_TEMPERATURES, 0.5, 1.0, 2.0])
@given(seed=SEED, scale=st.sampled_from([1e4, 1e10, 1e30, 3e37]), data=st.data())
@settings(max_examples=30, deadline=None)
def test_huge_logits_give_a_law_without_nan(temperature, seed, scale, data):
    vocab_size = 8
    logits = logits_of(seed, vocab_size, scale=scale, hidden=0.2).float()
    params = data.draw(params_for(vocab_size, mode=VerificationMode.REJECTION))
    fields = {name: getattr(params, name) for name in params.__slots__} | {"temperature": temperature}
    law = target_law(logits, [row_context(SamplingParams(**fields), output=(1, 2, 2))])
    assert torch.all(law >= 0.0)
    assert law.sum().item() == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("repetition_penalty", [1e-300, 1e-39, 1e-30])
def test_a_tiny_repetition_penalty_gives_a_law_without_nan(repetition_penalty, temperature):
    logits = torch.tensor([[20.0, 19.0, -torch.inf, -1.0]])
    params = SamplingParams(repetition_penalty=repetition_penalty, temperature=temperature, min_p=0.1)
    law = target_law(logits, [row_context(params, prompt=(0, 2, 3))])
    torch.testing.assert_close(law, torch.tensor([[1.0, 0.0, 0.0, 0.0]]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_padded_ids_are_cut_off(dtype):
    logits = torch.tensor([[1.0, 2.0, 99.0, 99.0], [0.5, -torch.inf, 99.0, 99.0]], dtype=dtype)
    kept = mask_padding(logits, 2)
    assert kept.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert kept.tolist() == [[1.0, 2.0], [0.5, -math.inf]]


@given(SEED, MODES)
@settings(max_examples=50, deadline=None)
def test_masked_tokens_stay_masked(seed, mode):
    logits = logits_of(seed, 12, hidden=0.6)
    params = SamplingParams(
        mode=mode,
        temperature=0.6,
        top_k=11,
        top_p=0.99,
        min_p=0.01,
        presence_penalty=-2.0,
        frequency_penalty=-2.0,
        repetition_penalty=0.1,
        logit_bias=tuple((token, 100.0) for token in range(12)),
    )
    law = target_law(logits, [row_context(params, prompt=range(12), output=range(12))])
    assert torch.all(law[torch.isinf(logits)] == 0.0)


# History ----------------------------------------------------------------------------------------------------


def test_presence_and_frequency_count_output_tokens_only():
    params = SamplingParams(presence_penalty=1.0, frequency_penalty=0.25)
    processed = process_logits(torch.zeros(1, 4), [row_context(params, prompt=(0, 1), output=(1, 2, 2))])
    assert processed.tolist() == [[0.0, -1.25, -1.5, 0.0]]


def test_repetition_penalty_counts_prompt_and_output_once():
    logits = torch.tensor([[1.0, -1.0, 1.0, 1.0]])
    context = row_context(SamplingParams(repetition_penalty=2.0), prompt=(0, 1, 0), output=(2, 2))
    assert process_logits(logits, [context]).tolist() == [[0.5, -2.0, 0.5, 1.0]]


def test_tokens_behind_the_row_are_not_part_of_its_history():
    params = SamplingParams(presence_penalty=1.0, repetition_penalty=2.0)
    context = RowContext(params=params, token_ids=[0, 1, 2, 3], prompt_len=1, length=2)
    assert process_logits(torch.ones(1, 4), [context]).tolist() == [[0.5, -0.5, 1.0, 1.0]]


def test_greedy_rows_get_penalties_and_bias_and_nothing_else():
    params = SamplingParams(
        mode=VerificationMode.GREEDY,
        temperature=0.5,
        top_k=1,
        top_p=0.1,
        min_p=0.9,
        presence_penalty=1.0,
        logit_bias=((3, 0.5),),
    )
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0]])
    processed = process_logits(logits, [row_context(params, output=(1,))])
    assert processed.tolist() == [[4.0, 2.0, 2.0, 1.5]]
