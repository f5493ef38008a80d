"""Several prompts and several choices in one request."""

from __future__ import annotations

import asyncio

import pytest

from specdec.errors import GenerationFailed
from specdec.gateway.interleave import interleaved
from tests.fakes import (
    EOS_ID,
    ScriptedBackend,
    byte_ids_of,
    eventually,
    logprob_of,
    token_ids_of,
)
from tests.unit.http_calls import answer, by_index, client_of, refusal, stream

COLOURS = [*byte_ids_of("red green blue"), EOS_ID]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "one"}]}


def by_seed(request):
    """A text that tells the seed."""
    return [*byte_ids_of(f"{request.sampling.seed}"), EOS_ID]


def by_prompt(request):
    """A text that tells the prompt, of a length that differs."""
    return [*byte_ids_of("x" * request.prompt_ids[0]), EOS_ID]


def texts_of(body):
    assert [choice["index"] for choice in body["choices"]] == list(range(len(body["choices"])))
    return [
        choice["text"] if "text" in choice else choice["message"]["content"] for choice in body["choices"]
    ]


def text_of(parts):
    return "".join(part["text"] if "text" in part else part["delta"].get("content", "") for part in parts)


@pytest.mark.parametrize(("path", "body"), [(CHAT, HELLO), (TEXT, {"prompt": "one"})])
async def test_choices_of_a_seed_differ_and_come_again(path, body):
    async with client_of(ScriptedBackend(script_of=by_seed)) as client:
        first = await answer(client, path, {**body, "n": 4, "seed": 7})
        again = await answer(client, path, {**body, "n": 4, "seed": 7})
        fewer = await answer(client, path, {**body, "n": 2, "seed": 7})
        other = await answer(client, path, {**body, "n": 4, "seed": 8})
        chunks = by_index(await stream(client, path, {**body, "n": 4, "seed": 7}))
    texts = texts_of(first)
    assert texts[0] == "7"
    assert len(set(texts)) == 4
    assert texts_of(again) == texts
    assert texts_of(fewer) == texts[:2]
    assert not set(texts_of(other)) & set(texts)
    assert [text_of(chunks[index]) for index in range(4)] == texts


async def test_choices_without_a_seed_differ():
    async with client_of(ScriptedBackend(script_of=by_seed)) as client:
        body = await answer(client, TEXT, {"prompt": ["one", "one"], "n": 3})
    assert len(set(texts_of(body))) == 6


async def test_greedy_choices_are_one_sequence_and_identical():
    backend = ScriptedBackend(script_of=by_seed)
    async with client_of(backend) as client:
        body = await answer(client, TEXT, {"prompt": "one", "n": 3, "temperature": 0})
        chunks = await stream(client, TEXT, {"prompt": "one", "n": 3, "temperature": 0, "seed": 5})
    assert len(set(texts_of(body))) == 1
    assert body["usage"]["completion_tokens"] == 3 * (len(body["choices"][0]["text"]) + 1)
    assert [text_of(parts) for _, parts in sorted(by_index(chunks).items())] == ["5"] * 3
    assert len(backend.requests) == 2


async def test_prompts_times_n_by_index_and_the_usage():
    backend = ScriptedBackend(script_of=by_prompt)
    async with client_of(backend) as client:
        body = await answer(client, TEXT, {"prompt": [[3], [5, 9], [4]], "n": 2})
        chunks = await stream(
            client, TEXT, {"prompt": [[3], [5, 9], [4]], "n": 2, "stream_options": {"include_usage": True}}
        )
    expected = ["xxx", "xxx", "xxxxx", "xxxxx", "xxxx", "xxxx"]
    assert texts_of(body) == expected
    usage = {"prompt_tokens": 4, "completion_tokens": 2 * (4 + 6 + 5), "total_tokens": 34}
    assert body["usage"] == usage
    choices = by_index(chunks)
    assert [text_of(choices[index]) for index in range(6)] == expected
    for parts in choices.values():
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["stop"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == usage
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert len({request.sequence_id for request in backend.requests}) == len(backend.requests)


@pytest.mark.parametrize(
    "prompt", [["red", "green"], [token_ids_of("red"), token_ids_of("green")]], ids=["texts", "ids"]
)
async def test_forms_of_several_prompts(prompt):
    backend = ScriptedBackend(COLOURS)
    async with client_of(backend) as client:
        assert len((await answer(client, TEXT, {"prompt": prompt}))["choices"]) == 2
    assert [request.prompt_ids for request in backend.requests] == [
        tuple(token_ids_of("red")),
        tuple(token_ids_of("green")),
    ]


async def test_every_choice_of_a_chat_begins_with_its_role():
    async with client_of(ScriptedBackend(script_of=by_seed)) as client:
        chunks = await stream(client, CHAT, {**HELLO, "n": 3})
    for parts in by_index(chunks).values():
        assert parts[0]["delta"] == {"role": "assistant", "content": ""}
        assert parts[-1]["delta"] == {}
        assert parts[-1]["finish_reason"] == "stop"


async def test_metrics_are_of_all_choices_and_come_once():
    async with client_of(ScriptedBackend(COLOURS, chunk_sizes=(5,))) as client:
        asked = {"prompt": "one", "n": 2, "speculative": {"metrics": True}}
        whole = await answer(client, TEXT, asked)
        chunks = await stream(client, TEXT, asked)
    assert whole["metrics"]["speculative_decoding"]["num_draft_tokens"] == 2 * 3 * 2
    assert [chunk["metrics"] for chunk in chunks if "metrics" in chunk] == [whole["metrics"]]
    assert "metrics" in chunks[-1]


async def test_choices_run_at_the_same_time():
    backend = ScriptedBackend(COLOURS, block_after=1)
    async with client_of(backend) as client:
        call = asyncio.create_task(answer(client, TEXT, {"prompt": ["a", "b"], "n": 2}))
        await eventually(lambda: backend.num_running == 4)
        call.cancel()
        await eventually(lambda: backend.num_running == 0)
    assert backend.num_closed == 4


async def test_leaving_a_stream_closes_every_choice():
    backend = ScriptedBackend(COLOURS, block_after=2)
    async with client_of(backend) as client:
        body = {"prompt": "one", "n": 3, "stream": True}
        async with client.stream("POST", TEXT, json=body) as response:
            await anext(response.aiter_lines())
            await eventually(lambda: backend.num_running == 3)
        await eventually(lambda: backend.num_running == 0)
    assert backend.num_closed == 3


class OneFails(ScriptedBackend):
    """The second sequence fails once all are running; the others never end."""

    async def generate(self, request, not_before):
        is_second = request.sequence_id.endswith("-1")
        async for batch in super().generate(request, not_before):
            yield batch
            if is_second:
                await eventually(lambda: self.num_running == 3)
                raise GenerationFailed("the target was lost")


async def test_one_failing_choice_fails_the_request_and_ends_the_others():
    backend = OneFails(COLOURS, block_after=1)
    async with client_of(backend) as client:
        response = await client.post(TEXT, json={"prompt": "one", "n": 3})
        assert response.status_code == 503
        assert response.json()["error"]["message"] == "the target was lost"
        await eventually(lambda: backend.num_running == 0)
        streamed = await client.post(TEXT, json={"prompt": "one", "n": 3, "stream": True})
        assert b'"error":' in streamed.content
        assert b"[DONE]" not in streamed.content
        await eventually(lambda: backend.num_running == 0)


def by_mean(request):
    """Candidates of different mean log-probabilities: the later, the likelier; the last but one is short."""
    number = int(request.sequence_id.rsplit("-", 1)[1])
    return [100 - number, 100 - number, EOS_ID] if number != 2 else [EOS_ID]


async def test_best_of_returns_the_likeliest_by_the_mean_and_counts_all():
    backend = ScriptedBackend(script_of=by_mean)
    async with client_of(backend) as client:
        body = await answer(client, TEXT, {"prompt": "one", "best_of": 4, "n": 2})
        scored = await answer(client, TEXT, {"prompt": "one", "best_of": 4, "n": 2, "logprobs": 0})
        greedy = await answer(client, TEXT, {"prompt": "one", "best_of": 4, "temperature": 0})
    values = [choice["logprobs"]["token_logprobs"] for choice in scored["choices"]]
    # Means, not sums: the short one first, then 97 97 EOS.
    assert values == [[logprob_of(EOS_ID)], [logprob_of(97), logprob_of(97), logprob_of(EOS_ID)]]
    assert texts_of(body) == texts_of(scored)
    assert [choice["logprobs"] for choice in body["choices"]] == [None, None]
    assert body["usage"]["completion_tokens"] == 3 + 3 + 1 + 3
    assert len(greedy["choices"]) == 1
    assert all(request.num_logprobs == 0 for request in backend.requests)


async def test_best_of_equal_to_n_is_n_also_in_a_stream():
    async with client_of(ScriptedBackend(script_of=by_seed)) as client:
        whole = await answer(client, TEXT, {"prompt": "one", "n": 2, "best_of": 2, "seed": 1})
        chunks = by_index(await stream(client, TEXT, {"prompt": "one", "n": 2, "best_of": 2, "seed": 1}))
    assert [text_of(chunks[index]) for index in range(2)] == texts_of(whole)


async def test_limits_are_the_deployments():
    async with client_of(ScriptedBackend(COLOURS), max_choices=2, max_prompts=2, max_logprobs=1) as client:
        assert await refusal(client, TEXT, {"prompt": "one", "n": 3}) == "n"
        assert await refusal(client, TEXT, {"prompt": "one", "best_of": 3}) == "best_of"
        assert await refusal(client, TEXT, {"prompt": ["a", "b", "c"]}) == "prompt"
        assert await refusal(client, TEXT, {"prompt": "one", "logprobs": 2}) == "logprobs"
        await answer(client, TEXT, {"prompt": ["a", "b"], "n": 2, "logprobs": 1})


async def test_bad_words_reach_the_backend_with_and_without_a_space():
    backend = ScriptedBackend(COLOURS)
    async with client_of(backend) as client:
        await answer(client, TEXT, {"prompt": "one", "bad_words": ["green", "red"], "min_tokens": 2})
    (request,) = backend.requests
    words = ["green", " green", "red", " red"]
    assert request.sampling.bad_words == tuple(tuple(token_ids_of(word)) for word in words)
    assert request.sampling.min_tokens == 2


async def test_stop_strings_wait_for_min_tokens():
    async with client_of(ScriptedBackend(COLOURS, chunk_sizes=(4,))) as client:
        for least, expected in [(0, "r"), (1, "r"), (2, "red gr"), (9, "red green blu")]:
            body = {"prompt": "one", "stop": "e", "min_tokens": least}
            assert texts_of(await answer(client, TEXT, body)) == [expected]
            parts = by_index(await stream(client, TEXT, body))[0]
            assert text_of(parts) == expected


async def count_to(number, closed=None, error=None):
    try:
        for value in range(number):
            await asyncio.sleep(0)
            yield value
        if error is not None:
            raise error
    finally:
        if closed is not None:
            closed.append(number)


async def test_interleaved_keeps_each_sources_order():
    items = [item async for item in interleaved([count_to(3), count_to(50), count_to(0)])]
    assert sorted(items) == sorted([*range(3), *range(50)])


async def test_interleaved_ends_all_sources_with_the_first_error_or_when_closed():
    closed = []
    with pytest.raises(ValueError, match="broken"):
        async for _ in interleaved([count_to(10**9, closed), count_to(2, closed, ValueError("broken"))]):
            pass
    assert sorted(closed) == [2, 10**9]
    events = interleaved([count_to(10**9, closed), count_to(10**8, closed)])
    await anext(events)
    await events.aclose()
    assert sorted(closed) == [2, 10**8, 10**9, 10**9]


async def test_interleaved_ends_with_a_source_that_somebody_cancelled():
    with pytest.raises(asyncio.CancelledError):
        async for _ in interleaved([count_to(10**9), count_to(2, error=asyncio.CancelledError())]):
            pass


async def test_interleaved_waits_for_its_reader():
    num_made = 0

    async def endless():
        nonlocal num_made
        while True:
            num_made += 1
            yield num_made

    events = interleaved([endless(), endless()])
    await anext(events)
    await asyncio.sleep(0.02)
    assert num_made <= 5
    await events.aclose()
