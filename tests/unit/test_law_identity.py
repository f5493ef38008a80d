"""Greedy and coupled texts do not depend on the draft, gamma, the batch or where a sequence was cut.

The reference is decoded here, one token at a time, from the plain processors of `tests.laws`; for sampled
modes it draws from the stated noise by hand. Drafts are SELF (the target's own law: all accepted), MIX (a
similar law) and ADV (an unrelated one).
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from specdec.engine.simulated import ToyLaw
from specdec.types import GenerationRequest, SamplingParams, SequenceId, VerificationMode
from tests.laws import Generated, app_config, generate_all, generation, plain_ids, toy_law, toy_next_token_law

GREEDY, COUPLED, REJECTION = VerificationMode.GREEDY, VerificationMode.COUPLED, VerificationMode.REJECTION
VOCAB_SIZE = 8
NUM_TOKENS = 20
TARGET = toy_law("normal", VOCAB_SIZE, 21)
DRAFTS = {
    "SELF": TARGET,
    "MIX": ToyLaw(TARGET._logits + 0.5 * toy_law("normal", VOCAB_SIZE, 22)._logits),
    "ADV": toy_law("peaky", VOCAB_SIZE, 23),
}

FIELDS = {
    "plain": {},
    "frequency penalty": {"frequency_penalty": 0.6},
    "strong frequency penalty": {"frequency_penalty": 2.0},
    "presence penalty": {"presence_penalty": 1.0},
    "repetition penalty": {"repetition_penalty": 1.8},
    "bias": {"logit_bias": ((2, 1.0), (5, -100.0))},
    "top-p": {"top_p": 0.7, "temperature": 1.3},
    "min-p": {"min_p": 0.2, "temperature": 0.8},
    "top-k": {"top_k": 3},
    "bad words": {"bad_words": ((2,), (3, 1), (0, 0, 4), (6, 6))},
    "everything": {
        "temperature": 1.2,
        "top_k": 6,
        "top_p": 0.9,
        "min_p": 0.05,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "logit_bias": ((1, -0.5),),
        "bad_words": ((7, 3), (4,)),
    },
}
PROMPTS = ((3, 1), (0,), (5, 6, 7, 0, 2, 4, 4, 4, 1, 2))


def requests_of(*modes: VerificationMode, num_tokens: int = NUM_TOKENS) -> list[GenerationRequest]:
    """Every mode with every set of fields, prompts of several lengths: one mixed batch."""
    cases = [(mode, name, fields) for mode in modes for name, fields in FIELDS.items()]
    return [
        generation(
            f"{mode} {name}",
            SamplingParams(mode=mode, seed=100 + i, **fields),
            prompt=PROMPTS[i % len(PROMPTS)],
            max_tokens=num_tokens,
        )
        for i, (mode, name, fields) in enumerate(cases)
    ]


def reference_ids(request: GenerationRequest) -> tuple[int, ...]:
    return plain_ids(TARGET, request)


def ids(results: list[Generated]) -> list[tuple[int, ...]]:
    return [result.token_ids for result in results]


@pytest.mark.parametrize(("gamma", "draft"), [(0, "SELF"), *itertools.product((1, 2, 5, 8), DRAFTS)])
async def test_text_is_the_targets_own_for_any_draft_and_gamma(gamma, draft):
    requests = requests_of(GREEDY, COUPLED)
    results = await generate_all(app_config(gamma), TARGET, DRAFTS[draft], requests)
    for request, result in zip(requests, results, strict=True):
        assert result.token_ids == reference_ids(request), request.sequence_id
        assert result.finish_reason == "length"
        assert (result.num_drafted > 0) == (gamma > 0)
        if draft == "SELF":
            assert result.num_accepted == result.num_drafted
        elif draft == "ADV" and gamma:
            assert result.num_accepted < result.num_drafted


@pytest.mark.parametrize(("pipeline", "draft"), [*itertools.product(("lookahead", "groups", "auto"), DRAFTS)])
async def test_text_is_the_same_however_rounds_overlap(pipeline, draft):
    requests = requests_of(GREEDY, COUPLED)
    results = await generate_all(app_config(3, pipeline=pipeline), TARGET, DRAFTS[draft], requests)
    for request, result in zip(requests, results, strict=True):
        assert result.token_ids == reference_ids(request), request.sequence_id
        assert result.num_drafted > 0


async def test_serving_without_a_draft_gives_the_same_text():
    requests = requests_of(GREEDY, COUPLED)
    results = await generate_all(app_config(5), TARGET, None, requests)
    assert ids(results) == [reference_ids(request) for request in requests]
    assert sum(result.num_drafted for result in results) == 0


@pytest.mark.parametrize(
    ("mode", "without_effect"), [(GREEDY, {"plain", "top-p", "min-p", "top-k"}), (COUPLED, {"plain"})]
)
def test_the_parameters_under_test_change_the_text(mode, without_effect):
    """Otherwise the equalities above would hold for processors that do nothing (A71)."""
    unchanged = set()
    for name, request in zip(FIELDS, requests_of(mode), strict=True):
        plain = SamplingParams(mode=mode, seed=request.sampling.seed)
        without = generation("plain", plain, prompt=request.prompt_ids, max_tokens=NUM_TOKENS)
        if reference_ids(request) == reference_ids(without):
            unchanged.add(name)
    assert unchanged == without_effect


@pytest.mark.parametrize("draft", ["MIX", "ADV"])
async def test_a_sequence_in_a_mixed_batch_says_what_it_says_alone(draft):
    requests = requests_of(GREEDY, COUPLED, REJECTION, num_tokens=12)
    together = await generate_all(app_config(3), TARGET, DRAFTS[draft], requests)
    for request, result in zip(requests, together, strict=True):
        (alone,) = await generate_all(app_config(3, max_num_seqs=1), TARGET, DRAFTS[draft], [request])
        assert alone.token_ids == result.token_ids, request.sequence_id
        assert alone.chunks == result.chunks


@pytest.mark.parametrize("pipeline", ["serial", "lookahead"])
@pytest.mark.parametrize("mode", [GREEDY, COUPLED])
@pytest.mark.parametrize("draft", DRAFTS)
async def test_a_stop_token_anywhere_in_a_block_is_the_last_token_of_the_text(draft, mode, pipeline):
    """A29, A104: nothing of the rest of an accepted block is given or counted."""
    requests, expected = [], []
    for seed in range(30):
        asked = generation(
            f"s{seed}", SamplingParams(mode=mode, seed=seed), prompt=(seed % 8,), max_tokens=12
        )
        whole = reference_ids(asked)
        for place in range(6):
            if whole.index(whole[place]) == place:
                stop = replace(asked.stop, stop_token_ids=frozenset({whole[place]}))
                requests.append(replace(asked, sequence_id=SequenceId(f"s{seed}-{place}"), stop=stop))
                expected.append(whole[: place + 1])
    assert {len(ids) for ids in expected} >= ({1, 2, 3, 4, 5, 6} if mode is COUPLED else {1, 2, 3})
    results = await generate_all(app_config(5, pipeline=pipeline), TARGET, DRAFTS[draft], requests)
    assert ids(results) == expected
    assert {result.finish_reason for result in results} == {"stop"}
    assert sum(result.num_drafted for result in results) > 0


async def test_a_draft_with_the_targets_law_is_accepted_in_every_round():
    """A12: also behind fully accepted rounds, in every mode, for long. The first round fills the target."""
    requests = [
        generation(f"{mode} {seed}", SamplingParams(mode=mode, seed=seed), max_tokens=256)
        for mode in VerificationMode
        for seed in range(6)
    ]
    for result in await generate_all(app_config(5), TARGET, DRAFTS["SELF"], requests):
        assert all(chunk.num_accepted == chunk.num_drafted for chunk in result.chunks)
        assert [chunk.num_drafted for chunk in result.chunks] == [0] + [5] * 42 + [2]


@pytest.mark.parametrize("mode", list(VerificationMode))
async def test_acceptance_does_not_decay_over_a_long_sequence(mode):
    """A13: a draft cache cut too far, or not far enough, makes later drafts worse."""
    seeds = range(12)
    requests = [
        generation(seed, SamplingParams(mode=mode, seed=seed), prompt=(seed % 8, seed % 5), max_tokens=400)
        for seed in seeds
    ]
    results = await generate_all(app_config(4), TARGET, DRAFTS["MIX"], requests)
    rounds = [chunk for result in results for chunk in result.chunks[:10]]
    late_rounds = [chunk for result in results for chunk in result.chunks[-60:-1]]
    early, late = (
        sum(chunk.num_accepted for chunk in some) / sum(chunk.num_drafted for chunk in some)
        for some in (rounds, late_rounds)
    )
    assert late > 0.8 * early


# Where sequences end ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", ["SELF", "ADV"])
@pytest.mark.parametrize("mode", list(VerificationMode))
async def test_a_stop_token_ends_the_text_at_its_first_appearance(mode, draft):
    """A29: wherever in a block it falls; the text before it is that of a sequence without stops."""
    sampling = SamplingParams(mode=mode, seed=5, frequency_penalty=0.4)
    (whole,) = await generate_all(
        app_config(5), TARGET, DRAFTS[draft], [generation("whole", sampling, max_tokens=60)]
    )
    requests = [
        generation(token, sampling, max_tokens=60, stop_token_ids=[token]) for token in range(VOCAB_SIZE)
    ]
    results = await generate_all(app_config(5), TARGET, DRAFTS[draft], requests)
    places = set()
    for token, result in enumerate(results):
        if token in whole.token_ids:
            place = whole.token_ids.index(token)
            assert result.token_ids == whole.token_ids[: place + 1]
            assert result.finish_reason == "stop"
            places.add(len(result.chunks[-1].token_ids))
        else:
            assert result.finish_reason == "length"
    assert len(places) > 1 or draft == "ADV", "the stops should fall at different places of their blocks"


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("mode", [GREEDY, COUPLED])
async def test_max_tokens_cuts_the_same_text_anywhere(mode, draft):
    sampling = SamplingParams(mode=mode, seed=6)
    expected = reference_ids(generation("whole", sampling, max_tokens=20))
    requests = [generation(n, sampling, max_tokens=n) for n in range(1, 21)]
    for n, result in enumerate(await generate_all(app_config(4), TARGET, DRAFTS[draft], requests), start=1):
        assert (result.token_ids, result.finish_reason) == (expected[:n], "length")


# Limits that change the rounds and not the text -------------------------------------------------------------


@pytest.mark.parametrize("prefill_chunk_tokens", [1, 2, 3, 7])
async def test_chunked_prefill_gives_the_same_text(prefill_chunk_tokens):
    requests = requests_of(GREEDY, COUPLED, num_tokens=12)
    config = app_config(3, prefill_chunk_tokens=prefill_chunk_tokens)
    results = await generate_all(config, TARGET, DRAFTS["MIX"], requests)
    assert ids(results) == [reference_ids(request) for request in requests]
    assert sum(result.num_drafted for result in results) > 0


@pytest.mark.parametrize("draft_context", [1, 4, 12, 25])
async def test_a_draft_of_shorter_context_drafts_as_far_as_it_can(draft_context):
    requests = requests_of(GREEDY, COUPLED)
    results = await generate_all(app_config(4), TARGET, DRAFTS["SELF"], requests, draft_context=draft_context)
    assert ids(results) == [reference_ids(request) for request in requests]
    for request, result in zip(requests, results, strict=True):
        num_before = len(request.prompt_ids) + len(result.chunks[0].token_ids)
        for chunk in result.chunks[1:-1]:
            assert (chunk.num_drafted > 0) == (num_before <= draft_context)
            num_before += len(chunk.token_ids)


@pytest.mark.parametrize("max_draft_tokens", [0, 1, 2])
async def test_a_requests_own_cap_on_draft_tokens_is_kept(max_draft_tokens):
    sampling = SamplingParams(mode=COUPLED, seed=8)
    request = generation("capped", sampling, max_tokens=30, max_draft_tokens=max_draft_tokens)
    (result,) = await generate_all(app_config(5), TARGET, DRAFTS["MIX"], [request])
    assert result.token_ids == reference_ids(request)
    assert max(chunk.num_drafted for chunk in result.chunks) == max_draft_tokens


@pytest.mark.parametrize("draft_support", [1, 2, 5])
async def test_the_drafts_support_changes_no_coupled_text(draft_support):
    requests = requests_of(COUPLED)
    config = app_config(4, draft_support=draft_support)
    results = await generate_all(config, TARGET, DRAFTS["MIX"], requests)
    assert ids(results) == [reference_ids(request) for request in requests]


# Bias -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("mode", list(VerificationMode))
async def test_a_forbidden_token_never_appears_and_a_forced_one_always(mode, draft):
    """A75, in law as well: bias and truncation reach drafted, recovered and bonus tokens alike."""
    forbidden = [
        generation(
            f"without {token}",
            SamplingParams(mode=mode, seed=token, logit_bias=((token, -100.0),)),
            prompt=(token, token),
            max_tokens=100,
        )
        for token in range(VOCAB_SIZE)
    ]
    forced = [
        generation(
            f"only {token}",
            SamplingParams(mode=mode, seed=token, logit_bias=((token, 100.0),), frequency_penalty=0.5),
            max_tokens=100,
        )
        for token in range(VOCAB_SIZE)
    ]
    results = await generate_all(app_config(8), TARGET, DRAFTS[draft], [*forbidden, *forced])
    for token in range(VOCAB_SIZE):
        assert token not in results[token].token_ids
        assert set(results[VOCAB_SIZE + token].token_ids) == {token}
        assert results[token].num_drafted > 0


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("mode", [COUPLED, REJECTION])
async def test_tokens_outside_the_top_k_never_appear(mode, draft):
    params = SamplingParams(mode=mode, top_k=2, temperature=2.0)
    requests = [
        generation(seed, SamplingParams(mode=mode, seed=seed, top_k=2, temperature=2.0), max_tokens=50)
        for seed in range(20)
    ]
    law = toy_next_token_law(TARGET, params, ())
    for request, result in zip(
        requests, await generate_all(app_config(5), TARGET, DRAFTS[draft], requests), strict=True
    ):
        context = request.prompt_ids
        for token in result.token_ids:
            assert law(context[-2:])[token] > 0.0
            context += (token,)


# Exclusions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("mode", list(VerificationMode))
async def test_bad_words_never_appear_and_their_parts_do(mode, draft):
    words = ((2,), (3, 1), (6, 6, 0))
    requests = [
        generation(
            seed, SamplingParams(mode=mode, seed=seed, bad_words=words, temperature=2.0), max_tokens=99
        )
        for seed in range(6)
    ]
    said = []
    for result in await generate_all(app_config(5), TARGET, DRAFTS[draft], requests):
        assert result.num_drafted > 0
        text = result.token_ids
        said += text
        for word in words:
            assert word not in [text[i : i + len(word)] for i in range(len(text))]
    assert mode is GREEDY or {3, 1, 6, 0} <= set(said)


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("mode", list(VerificationMode))
async def test_no_stop_token_before_min_tokens(mode, draft):
    """A34: whatever part of a block the stop would fall into."""
    stops = (0, 3, 4, 5)
    requests = [
        generation(
            f"{least} {seed}",
            SamplingParams(mode=mode, seed=seed, min_tokens=least),
            max_tokens=40,
            stop_token_ids=stops,
        )
        for least in (0, 1, 5, 9, 40)
        for seed in range(6)
    ]
    results = await generate_all(app_config(4), TARGET, DRAFTS[draft], requests)
    for request, result in zip(requests, results, strict=True):
        *before, last = result.token_ids
        assert not set(before).intersection(stops)
        assert len(result.token_ids) > request.sampling.min_tokens or len(result.token_ids) == 40
        assert (last in stops) == (result.finish_reason == "stop")
        if mode is not REJECTION:
            assert result.token_ids == reference_ids(request)
    lengths = {len(result.token_ids) for result in results}
    assert 40 in lengths
    assert len(lengths) > (2 if mode is GREEDY else 4)


async def test_a_token_is_said_even_if_every_one_is_excluded():
    words = tuple((token,) for token in range(VOCAB_SIZE))
    request = generation("all", SamplingParams(mode=GREEDY, bad_words=words), max_tokens=5)
    (result,) = await generate_all(app_config(2), TARGET, TARGET, [request])
    plain = generation("plain", SamplingParams(mode=GREEDY), max_tokens=5)
    assert result.token_ids == reference_ids(plain)


# Seeds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [COUPLED, REJECTION])
async def test_the_same_seed_repeats_a_text_and_another_one_changes_it(mode):
    """A55, A56: seeds up to the largest 64 bits hold."""
    seeds = [0, 1, 2, 2**31, 2**63 - 1, 2**64 - 1]
    requests = [
        generation(f"{seed} {copy}", SamplingParams(mode=mode, seed=seed, temperature=1.5), max_tokens=30)
        for seed in seeds
        for copy in range(2)
    ]
    results = await generate_all(app_config(3), TARGET, DRAFTS["MIX"], requests)
    assert ids(results[0::2]) == ids(results[1::2])
    assert len(set(ids(results))) == len(seeds)
