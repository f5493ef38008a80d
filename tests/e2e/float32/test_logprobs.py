"""Log-probabilities, echo and several choices on a real server: the target's own values at every position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx
import openai
import pytest
import torch

from specdec.gateway.proto import generation_pb2 as pb
from specdec.models import load_tokenizer
from tests.e2e.harness import Server, chat
from tests.e2e.prompts import PROMPTS
from tests.e2e.reference import logprobs_behind, prompt_tokens

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

TOLERANCE = 1e-3
GAMMA = 4
NUM_TOP = 5
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


self_and_random = pytest.mark.parametrize("draft_kind", ["self", "random"], indirect=True, scope="package")
"""The one gives accepted and bonus tokens, the other recovered ones."""
one_server = pytest.mark.parametrize("draft_kind", ["self"], indirect=True, scope="package")
"""For what does not depend on the draft."""


def complete(server: Server, **body: Any) -> dict[str, Any]:
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    return dict(response.json())


def assert_are_the_targets(tokens: Sequence[pb.TokenLogprob], behind: torch.Tensor) -> None:
    """Values and likeliest tokens of consecutive positions, against [positions, vocabulary]."""
    assert len(tokens) == len(behind)
    for at, (token, expected) in enumerate(zip(tokens, behind, strict=True)):
        assert token.logprob == pytest.approx(float(expected[token.token_id]), abs=TOLERANCE), at
        likeliest = expected.topk(NUM_TOP).values.tolist()
        assert [top.logprob for top in token.top] == pytest.approx(likeliest, abs=TOLERANCE), at
        # Near ties may change places, so each is looked up by its id.
        own = [float(expected[top.token_id]) for top in token.top]
        assert [top.logprob for top in token.top] == pytest.approx(own, abs=TOLERANCE), at


@self_and_random
@pytest.mark.parametrize(
    ("law", "gamma"),
    [("greedy", GAMMA), ("greedy", 0), ("coupled", GAMMA), ("rejection", GAMMA), ("processed", GAMMA)],
)
def test_values_are_the_targets_log_softmax_at_every_position(
    server: Server, draft_kind: str, law: str, gamma: int
) -> None:
    prompt = PROMPTS[7]
    request = chat(prompt, gamma=gamma, max_tokens=24, ignore_eos=True)
    if law != "greedy":
        request.sampling.temperature = 0.8
        request.sampling.seed = 3
    if law == "rejection":
        request.speculative.mode = pb.VERIFICATION_MODE_REJECTION
    if law == "processed":
        # What the values are of is the raw law, whatever is done to it before a token is drawn.
        request.sampling.frequency_penalty = 1.0
        request.sampling.top_k = 20
        request.sampling.min_tokens = 5
        request.sampling.bad_words.append("dragon")
    request.logprobs = NUM_TOP
    request.prompt_logprobs = True
    answer = server.stub().Generate(request, timeout=120)
    (choice,) = answer.choices
    prompt_ids = prompt_tokens(prompt)
    behind = logprobs_behind([*prompt_ids, *choice.token_ids])
    assert [token.token_id for token in choice.logprobs] == list(choice.token_ids)
    assert [token.token_id for token in choice.prompt_logprobs] == prompt_ids
    assert not choice.prompt_logprobs[0].HasField("logprob")
    assert_are_the_targets(choice.prompt_logprobs[1:], behind[: len(prompt_ids) - 1])
    assert_are_the_targets(choice.logprobs, behind[len(prompt_ids) - 1 : -1])
    metrics = answer.speculative_metrics
    assert (metrics.num_draft_tokens > 0) == (gamma > 0)
    if gamma and draft_kind == "self" and law == "greedy":
        assert metrics.num_accepted_draft_tokens == metrics.num_draft_tokens
    if draft_kind == "random":
        assert metrics.num_accepted_draft_tokens <= 0.2 * metrics.num_draft_tokens
    if law == "processed":
        assert "dragon" not in choice.text


@one_server
def test_lm_evals_request_scores_every_token(server: Server) -> None:
    tokenizer = load_tokenizer("smollm2")
    texts = ["The capital of France is Paris.", "Two and two are four, and", "x"]
    contexts = [tokenizer.encode(text) for text in texts]
    body = complete(
        server,
        model="smollm2",
        prompt=contexts,
        temperature=0,
        max_tokens=1,
        logprobs=1,
        seed=1234,
        echo=True,
    )
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    for context, choice in zip(contexts, body["choices"], strict=True):
        scores = choice["logprobs"]
        assert [len(scores[name]) for name in LISTS] == [len(context) + 1] * 4
        assert "".join(scores["tokens"]) == choice["text"]
        assert scores["token_logprobs"][0] is None
        assert scores["top_logprobs"][0] is None
        behind = logprobs_behind(context)
        for at, token_id in enumerate(context[1:]):
            own, top = scores["token_logprobs"][at + 1], scores["top_logprobs"][at + 1]
            assert own == pytest.approx(float(behind[at, token_id]), abs=TOLERANCE)
            best, second = behind[at].topk(2).values.tolist()
            if best - second > TOLERANCE:
                assert (own == max(top.values())) == (int(behind[at].argmax()) == token_id)
        assert scores["token_logprobs"][-1] == max(scores["top_logprobs"][-1].values())


@one_server
def test_echo_alone_and_with_output(server: Server) -> None:
    prompt = "The capital of France is"
    plain = complete(server, prompt=prompt, temperature=0, max_tokens=8)["choices"][0]["text"]
    echoed = complete(server, prompt=prompt, temperature=0, max_tokens=8, echo=True, logprobs=2)
    nothing = complete(server, prompt=prompt, temperature=0, max_tokens=0, echo=True, logprobs=2)
    assert echoed["choices"][0]["text"] == prompt + plain
    assert nothing["choices"][0]["text"] == prompt
    assert nothing["usage"]["completion_tokens"] == 0
    size = nothing["usage"]["prompt_tokens"]
    own, alone = (body["choices"][0]["logprobs"]["token_logprobs"] for body in (echoed, nothing))
    assert len(alone) == size
    assert own[1:size] == pytest.approx(alone[1:], abs=TOLERANCE)


@one_server
def test_choices_of_a_seed_come_again_in_any_company(server: Server) -> None:
    asked = {"prompt": "Once upon a time", "n": 3, "seed": 11, "temperature": 1.2, "max_tokens": 16}
    texts = [[choice["text"] for choice in complete(server, **asked)["choices"]] for _ in range(2)]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 3
    one = complete(server, **{**asked, "n": 1})["choices"][0]["text"]
    assert one == texts[0][0]
    greedy = complete(server, prompt=["Once upon", "Two and"], n=2, temperature=0, max_tokens=8)
    words = [choice["text"] for choice in greedy["choices"]]
    assert words[0] == words[1] != words[2] == words[3]


@one_server
def test_the_official_client_reads_streamed_logprobs_of_every_choice(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)
    asked: dict[str, Any] = {
        "model": "smollm2", "messages": [{"role": "user", "content": PROMPTS[0]}], "n": 2, "seed": 5,
        "logprobs": True, "top_logprobs": 3, "max_tokens": 24, "stop": ["."],
    }  # fmt: skip
    whole = client.chat.completions.create(**asked)
    tokens: dict[int, list[Any]] = {}
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            tokens.setdefault(choice.index, []).extend(choice.logprobs.content if choice.logprobs else [])
    total = 0
    for choice in whole.choices:
        content = choice.logprobs.content
        total += len(content)
        assert [item.token for item in tokens[choice.index]] == [item.token for item in content]
        values = [item.logprob for item in tokens[choice.index]]
        assert values == pytest.approx([item.logprob for item in content], abs=TOLERANCE)
        text = bytes(byte for item in content for byte in item.bytes).decode()
        assert text.startswith(choice.message.content)
    assert total == whole.usage.completion_tokens
