"""Gateway and coordinator together, with a toy target: what one promises is what the other gives."""

from __future__ import annotations

import asyncio
import gc
from contextlib import aclosing, asynccontextmanager

import httpx
import pytest
import torch

from specdec.engine.simulated import ToyLaw
from specdec.gateway.events import collect
from specdec.gateway.http import build_http_app
from specdec.gateway.requests import ClientRequest, SamplingOptions, TokenPrompt
from tests.fakes import EOS_ID, VOCAB_SIZE, only, serving, token_ids_of, toy_service
from tests.laws import app_config, toy_system
from tests.unit.http_calls import answer, by_index, stream

TEXT = "/v1/completions"
PROMPT = token_ids_of("one two three")
GAMMA = 3


def _random_law(seed: int) -> torch.Tensor:
    return 2.0 * torch.randn(997, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


TARGET = ToyLaw(_random_law(1))
DRAFT = ToyLaw(_random_law(1) + 0.3 * _random_law(2))


class LocalBackend:
    """The coordinator of this process."""

    def __init__(self, system) -> None:
        self._system = system

    def is_ready(self):
        return True

    def statuses(self):
        return ()

    async def generate(self, request, not_before):
        async with aclosing(self._system.client.generate(request)) as chunks:
            async for chunk in chunks:
                yield (chunk,)


@asynccontextmanager
async def client_of_pair(gamma=GAMMA):
    async with toy_system(app_config(gamma), TARGET, DRAFT) as system:
        service = toy_service(LocalBackend(system))
        app = build_http_app(only(service))
        async with serving(app) as url, httpx.AsyncClient(base_url=url, timeout=30.0) as client:
            yield client


def logprobs_behind(token_ids):
    """[vocabulary] for each of the tokens."""
    return [torch.log_softmax(TARGET.row(token_ids[: end + 1]).double(), -1) for end in range(len(token_ids))]


async def test_lm_evals_request():
    contexts = [PROMPT, [EOS_ID, 7], [9]]
    asked = {"prompt": contexts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    async with client_of_pair() as client:
        body = await answer(client, TEXT, asked)
    for choice, context in zip(body["choices"], contexts, strict=True):
        scores = choice["logprobs"]
        assert len(scores["token_logprobs"]) == len(context) + 1
        behind = logprobs_behind(context)
        for at, token_id in enumerate(context[1:], start=1):
            own = scores["token_logprobs"][at]
            assert own == pytest.approx(float(behind[at - 1][token_id]), abs=1e-5)
            is_greedy = own == max(scores["top_logprobs"][at].values())
            assert is_greedy == (int(behind[at - 1].argmax()) == token_id)
        # The token generated is the likeliest: an own computation would differ in its last bits.
        own, top = scores["token_logprobs"][-1], scores["top_logprobs"][-1]
        assert own == max(top.values()) == pytest.approx(float(behind[-1].max()), abs=1e-5)


@pytest.mark.parametrize("law", [{"temperature": 0}, {"seed": 5}, {"seed": 5, "frequency_penalty": 1.5}])
async def test_values_of_several_choices_streamed_or_not(law):
    prompts = [PROMPT, PROMPT[:2]]
    asked = {"prompt": prompts, "n": 2, "logprobs": 2, "max_tokens": 24, "ignore_eos": True, **law}
    async with client_of_pair() as client:
        body = await answer(client, TEXT, {**asked, "echo": True, "speculative": {"metrics": True}})
        chunks = by_index(await stream(client, TEXT, {**asked, "echo": True}))
        again = await answer(client, TEXT, asked)
    counters = body["metrics"]["speculative_decoding"]
    assert 0 < counters["num_accepted_draft_tokens"] < counters["num_draft_tokens"]
    values = {}
    for choice in body["choices"]:
        scores = choice["logprobs"]
        prompt = prompts[choice["index"] // 2]
        assert len(scores["tokens"]) == len(prompt) + 24
        streamed = [part["logprobs"] for part in chunks[choice["index"]] if part["logprobs"]]
        assert [value for part in streamed for value in part["token_logprobs"]] == scores["token_logprobs"]
        assert [text for part in streamed for text in part["tokens"]] == scores["tokens"]
        values[choice["index"]] = scores["token_logprobs"][len(prompt) :]
    for choice in again["choices"]:
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(values[choice["index"]], abs=1e-6)
    if "seed" in law:
        assert values[0] != values[1]
    else:
        assert body["choices"][0] == {**body["choices"][1], "index": 0}


async def test_five_hundred_requests_leave_no_objects_behind():
    """A89: in gateway, coordinator and workers alike; what is kept for good is made by the first requests."""

    async def ask(service, number):
        request = ClientRequest(
            request_id=f"r{number}",
            prompts=(TokenPrompt(token_ids=(7, number % 50)),),
            sampling=SamplingOptions(seed=number, max_tokens=3),
        )
        assert (await collect(service.generate(request))).totals.usage.completion_tokens > 0

    async with toy_system(app_config(GAMMA), TARGET, DRAFT) as system:
        service = toy_service(LocalBackend(system))
        counts = []
        for start in (0, 250, 500):
            for number in range(start, start + 250):
                await ask(service, number)
            gc.collect()
            counts.append(len(gc.get_objects()))
        await asyncio.gather(*(ask(service, number) for number in range(50)))
    # One object a request would be 250.
    assert counts[2] - counts[1] < 125


async def test_values_are_the_targets_own_for_accepted_recovered_and_bonus_tokens():
    """Asked of the service itself: token ids are in no HTTP answer."""
    request = ClientRequest(
        request_id="r",
        prompts=(TokenPrompt(token_ids=tuple(PROMPT)),),
        num_logprobs=3,
        sampling=SamplingOptions(seed=3, max_tokens=60, ignore_eos=True, top_k=50),
    )
    async with toy_system(app_config(GAMMA), TARGET, DRAFT) as system:
        completion = await collect(toy_service(LocalBackend(system)).generate(request))
    (choice,) = completion.choices
    assert completion.totals.stats.acceptance_histogram[GAMMA] > 0  # blocks with a bonus token
    assert completion.totals.stats.acceptance_histogram[0] > 0
    behind = logprobs_behind([*PROMPT, *choice.token_ids])
    for at, token in enumerate(choice.tokens):
        law = behind[len(PROMPT) + at - 1]
        assert token.logprob == pytest.approx(float(law[token.token_id]), abs=1e-5)
        assert [top.logprob for top in token.top] == pytest.approx(law.topk(3).values.tolist(), abs=1e-5)


async def test_min_tokens_and_bad_words_hold_in_speculation_and_in_plain_decoding():
    asked = {"prompt": PROMPT, "seed": 1, "max_tokens": 40, "temperature": 1.5, "logprobs": 0}
    async with client_of_pair() as client, client_of_pair(0) as plain_client:
        free = await answer(client, TEXT, {**asked, "ignore_eos": True})
        word = next(token for token in free["choices"][0]["logprobs"]["tokens"][5:] if token.isalpha())
        bounded = {**asked, "stop_token_ids": list(range(3, VOCAB_SIZE)), "min_tokens": 6}
        short = [await answer(each, TEXT, bounded) for each in (client, plain_client)]
        clean = [
            await answer(each, TEXT, {**asked, "ignore_eos": True, "bad_words": [word]})
            for each in (client, plain_client)
        ]
    # Only ids 0 to 2 may come before the seventh token, which any other ends.
    assert [body["usage"]["completion_tokens"] >= 7 for body in short] == [True, True]
    assert short[0]["choices"][0]["text"] == short[1]["choices"][0]["text"]
    assert [body["choices"][0]["text"] for body in clean] == [clean[0]["choices"][0]["text"]] * 2
    assert word not in clean[0]["choices"][0]["logprobs"]["tokens"]


async def test_best_of_returns_the_candidate_with_the_highest_mean():
    asked = {"prompt": PROMPT, "seed": 2, "max_tokens": 12, "logprobs": 0, "ignore_eos": True}
    async with client_of_pair() as client:
        candidates = (await answer(client, TEXT, {**asked, "n": 5}))["choices"]
        best = await answer(client, TEXT, {**asked, "best_of": 5})
    means = [sum(choice["logprobs"]["token_logprobs"]) / 12 for choice in candidates]
    winner = candidates[means.index(max(means))]
    assert best["choices"] == [{**winner, "index": 0}]
    assert best["usage"]["completion_tokens"] == 60
