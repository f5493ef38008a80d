"""Log-probabilities are the target's own, of its raw law, for accepted, recovered and bonus tokens alike."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from specdec.engine.simulated import ToyLaw
from specdec.types import SamplingParams, TokenLogprob, VerificationMode
from tests.laws import app_config, generate_all, generation, toy_law

VOCAB_SIZE = 8
TARGET = toy_law("normal", VOCAB_SIZE, 31)
DRAFTS = {
    "SELF": TARGET,
    "MIX": ToyLaw(TARGET._logits + 0.5 * toy_law("normal", VOCAB_SIZE, 32)._logits),
    "ADV": toy_law("peaky", VOCAB_SIZE, 33),
}
PROMPTS = ((3, 1), (0,), (5, 6, 7, 0, 2, 4, 4, 4, 1, 2))
PROCESSED = {
    "temperature": 0.7,
    "top_k": 5,
    "frequency_penalty": 0.5,
    "logit_bias": ((1, 1.0),),
    "bad_words": ((6,),),
}
"""None of it may show in log-probabilities."""


def expected(tokens: tuple[int, ...], position: int) -> list[float]:
    """Log-softmax of the target's raw row that predicts the token at a position."""
    return torch.log_softmax(TARGET.row(list(tokens[:position])).double(), dim=-1).tolist()


def check(tokens: tuple[int, ...], start: int, told: list[TokenLogprob], num_top: int) -> None:
    for position, entry in enumerate(told, start=start):
        law = expected(tokens, position)
        assert entry.token_id == tokens[position]
        assert entry.logprob == pytest.approx(law[entry.token_id], abs=1e-5)
        likeliest = sorted(range(VOCAB_SIZE), key=lambda token: -law[token])[:num_top]
        assert [token for token, _ in entry.top] == likeliest
        assert [value for _, value in entry.top] == pytest.approx([law[t] for t in likeliest], abs=1e-5)
        # Clients compare the two for equality to tell whether a token was the likeliest (B11).
        assert dict(entry.top).get(entry.token_id, entry.logprob) == entry.logprob


@pytest.mark.parametrize(("gamma", "draft"), [(0, "SELF"), *itertools.product((1, 4), DRAFTS)])
@pytest.mark.parametrize("mode", list(VerificationMode))
async def test_each_token_comes_with_the_targets_own_opinion(mode, gamma, draft):
    requests = [
        replace(
            generation(
                f"{prompt} {num_top}",
                SamplingParams(mode=mode, seed=7 + num_top, **PROCESSED),
                prompt=prompt,
                max_tokens=25,
            ),
            num_logprobs=num_top,
        )
        for prompt in PROMPTS
        for num_top in (0, 3, VOCAB_SIZE)
    ]
    results = await generate_all(app_config(gamma), TARGET, DRAFTS[draft], requests)
    for request, result in zip(requests, results, strict=True):
        told = [entry for chunk in result.chunks for entry in chunk.logprobs]
        assert len(told) == len(result.token_ids) == 25
        check(
            (*request.prompt_ids, *result.token_ids),
            len(request.prompt_ids),
            told,
            request.num_logprobs,
        )
        assert (result.num_drafted > 0) == (gamma > 0)
    num_accepted = sum(result.num_accepted for result in results)
    num_drafted = sum(result.num_drafted for result in results)
    assert num_accepted == num_drafted if draft == "SELF" else 0 < num_accepted < num_drafted


@pytest.mark.parametrize("chunk", [1, 3, 4096])
async def test_the_prompts_tokens_are_scored_however_it_is_cut(chunk):
    prompt = (5, 6, 7, 0, 2, 4, 4, 4, 1, 2)
    for length in (1, 2, 4, 10):
        request = replace(
            generation("scored", SamplingParams(mode=VerificationMode.GREEDY), prompt=prompt[:length]),
            num_logprobs=2,
            wants_prompt_logprobs=True,
        )
        config = app_config(3, prefill_chunk_tokens=chunk)
        (result,) = await generate_all(config, TARGET, DRAFTS["MIX"], [request])
        first, *others = result.chunks
        assert len(first.prompt_logprobs) == length - 1
        check(request.prompt_ids, 1, list(first.prompt_logprobs), 2)
        assert not any(chunk.prompt_logprobs for chunk in others)


async def test_a_prompt_that_is_shared_is_scored_anew():
    """What a cache holds has no rows to tell of."""
    prompt = (5, 6, 7, 0, 2, 4, 4, 4, 1, 2) * 8
    plain = generation("plain", SamplingParams(mode=VerificationMode.GREEDY), prompt=prompt)
    scored = replace(plain, sequence_id="scored", num_logprobs=0, wants_prompt_logprobs=True)
    unscored, result = await generate_all(app_config(2), TARGET, DRAFTS["MIX"], [plain, scored])
    assert len(result.chunks[0].prompt_logprobs) == len(prompt) - 1
    check(prompt, 1, list(result.chunks[0].prompt_logprobs), 0)
    assert result.token_ids == unscored.token_ids
    assert not any(chunk.logprobs or chunk.prompt_logprobs for chunk in unscored.chunks)


async def test_a_sequence_that_goes_on_from_elsewhere_tells_of_its_new_tokens_alone():
    whole = replace(
        generation("whole", SamplingParams(mode=VerificationMode.GREEDY), prompt=(5, 6, 7), max_tokens=20),
        num_logprobs=1,
        wants_prompt_logprobs=True,
    )
    (result,) = await generate_all(app_config(3), TARGET, DRAFTS["MIX"], [whole])
    rest = replace(whole, sequence_id="rest", output_ids=result.token_ids[:8])
    (resumed,) = await generate_all(app_config(3), TARGET, DRAFTS["MIX"], [rest])
    assert resumed.token_ids == result.token_ids[8:]
    told = [entry for chunk in resumed.chunks for entry in chunk.logprobs]
    check((*whole.prompt_ids, *result.token_ids), len(whole.prompt_ids) + 8, told, 1)
    assert not any(chunk.prompt_logprobs for chunk in resumed.chunks)
