"""What a request may ask for, and what the backend is then asked for."""

from __future__ import annotations

import math

import pytest

from specdec.errors import ContextLengthExceeded, InvalidRequest
from specdec.gateway.request_shape import check_shape
from specdec.gateway.requests import (
    ChatPrompt,
    ClientRequest,
    SamplingOptions,
    SpeculativeOptions,
    TextPrompt,
)
from specdec.gateway.validation import MAX_STOP_STRING_CHARS, build_generation_request
from specdec.types import ModelInfo, VerificationMode
from tests.fakes import EOS_ID, VOCAB_SIZE, toy_config

INFO = ModelInfo(max_context=100, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({EOS_ID, 0}))
CONFIG = toy_config(max_stop_strings=4)


def build(prompt_len=10, prompt=None, speculative=None, **options):
    prompt = prompt or TextPrompt(text="x")
    request = ClientRequest(
        request_id="cmpl-1",
        prompts=(prompt,),
        sampling=SamplingOptions(**options),
        speculative=SpeculativeOptions(**(speculative or {})),
    )
    check_shape(request, CONFIG)
    prompt_ids = tuple(range(3, 3 + prompt_len))
    return build_generation_request(request, prompt, prompt_ids, config=CONFIG, model_info=INFO)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 1e6),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", -1.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -2),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", math.nan),
        ("presence_penalty", 9.0),
        ("presence_penalty", -math.inf),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", math.nan),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 2.1),
        ("repetition_penalty", math.nan),
        ("logit_bias", ((VOCAB_SIZE, 1.0),)),
        ("logit_bias", ((-1, 1.0),)),
        ("logit_bias", ((2**31, 1.0),)),
        ("logit_bias", ((5, 100.5),)),
        ("logit_bias", ((5, math.nan),)),
        ("logit_bias", ((5, 1.0), (5, 2.0))),
        ("seed", -1),
        ("seed", 2**63),
        ("seed", 10**30),
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("stop", ("",)),
        ("stop", ("a", "b", "c", "d", "e")),
        ("stop", ("x" * (MAX_STOP_STRING_CHARS + 1),)),
        ("stop", ("\ud83d",)),
        ("stop_token_ids", (VOCAB_SIZE,)),
        ("stop_token_ids", (-1,)),
    ],
)
def test_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(InvalidRequest) as caught:
        build(**{name: value})
    assert caught.value.param == name
    assert name in caught.value.message


@pytest.mark.parametrize("value", [-1, 33, 64])
def test_draft_length_out_of_range_names_the_range(value):
    with pytest.raises(InvalidRequest, match=r"\[0, 32\]") as caught:
        build(speculative={"num_speculative_tokens": value})
    assert caught.value.param == "speculative.num_speculative_tokens"


@pytest.mark.parametrize("value", [None, 0, 1, 8])
def test_draft_length_in_range_is_passed_on(value):
    assert build(speculative={"num_speculative_tokens": value}).max_draft_tokens == value


def test_defaults():
    request = build()
    assert request.sequence_id == "cmpl-1-0"
    assert request.max_draft_tokens is None
    assert request.stop.max_tokens == 90  # the rest of the context
    assert request.stop.stop_token_ids == {EOS_ID, 0}
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0, 0, 1)
    assert sampling.logit_bias == ()


def test_extremes_of_every_range_are_allowed():
    request = build(
        temperature=2.0, top_p=1.0, top_k=-1, min_p=1.0, presence_penalty=-2.0, frequency_penalty=2.0,
        repetition_penalty=2.0, logit_bias=((0, -100.0), (VOCAB_SIZE - 1, 100.0)), seed=2**63 - 1,
        max_tokens=90,
        stop=("a", "b", "c", "d" * MAX_STOP_STRING_CHARS), stop_token_ids=(VOCAB_SIZE - 1,),
    )  # fmt: skip
    assert request.sampling.top_k == 0
    assert request.sampling.seed == 2**63 - 1
    assert request.stop.max_tokens == 90


def test_top_k_beyond_the_vocabulary_keeps_all():
    assert build(top_k=10**30).sampling.top_k == 0
    assert build(top_k=VOCAB_SIZE - 1).sampling.top_k == VOCAB_SIZE - 1


def test_ignore_eos_drops_every_eos_but_not_the_clients_own():
    assert build(ignore_eos=True).stop.stop_token_ids == frozenset()
    assert build(ignore_eos=True, stop_token_ids=(7,)).stop.stop_token_ids == {7}
    assert build(stop_token_ids=(7,)).stop.stop_token_ids == {7, EOS_ID, 0}


GREEDY, REJECTION, COUPLED = VerificationMode.GREEDY, VerificationMode.REJECTION, VerificationMode.COUPLED


@pytest.mark.parametrize(
    ("temperature", "seed", "mode", "expected"),
    [
        (0.0, None, None, GREEDY),
        (1e-6, 7, COUPLED, GREEDY),
        (0.7, None, None, REJECTION),
        (0.7, 7, None, COUPLED),
        (0.7, 7, REJECTION, REJECTION),
        (0.7, None, COUPLED, COUPLED),
        (0.7, 0, None, COUPLED),
    ],
)
def test_verification_mode(temperature, seed, mode, expected):
    sampling = build(temperature=temperature, seed=seed, speculative={"mode": mode}).sampling
    assert sampling.mode is expected
    if seed is not None:
        assert sampling.seed == seed


def test_seeds_not_given_are_drawn():
    seeds = {build().sampling.seed for _ in range(20)}
    assert len(seeds) == 20  # two alike: 2^-55
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("prompt_len", [100, 101, 5000])
def test_prompt_that_leaves_no_room_is_refused_with_both_counts(prompt_len):
    # Clients tell this error by these words.
    words = (
        f"prompt is too long: it has {prompt_len} tokens.* this model's maximum context length is 100 tokens"
    )
    with pytest.raises(ContextLengthExceeded, match=words) as caught:
        build(prompt_len=prompt_len)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "prompt"


def test_explicit_max_tokens_beyond_the_context_is_refused_with_the_counts():
    with pytest.raises(ContextLengthExceeded, match=r"10 tokens.*91.*100.*90") as caught:
        build(max_tokens=91, prompt=ChatPrompt(messages=()))
    assert caught.value.param == "max_tokens"


def test_prompt_one_short_of_the_context_gets_one_token():
    assert build(prompt_len=99).stop.max_tokens == 1
