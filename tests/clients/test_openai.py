"""OpenAI's own client where tests/e2e does not show it: async streams, helpers, tools there and back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.clients.asks import ANSWER, MODEL, PLAIN, QUESTION, WEATHER, Pet, get_weather

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

ASK: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": QUESTION}],
    "temperature": 0,
    "max_tokens": 40,
}


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="unused", max_retries=0, timeout=120) as client:
        yield client


def asynchronous(client: openai.OpenAI) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=client.base_url, api_key="unused", max_retries=0, timeout=120)


def test_sync_async_streamed_plain_and_raw_give_one_text(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**ASK)
    text = whole.choices[0].message.content
    assert ANSWER in text

    async def others() -> list[str]:
        async with asynchronous(client) as other:
            answer = await other.chat.completions.create(**ASK)
            stream = await other.chat.completions.create(**ASK, stream=True)
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
            return [answer.choices[0].message.content or "", "".join(pieces)]

    assert asyncio.run(others()) == [text, text]
    assert client.chat.completions.create(**ASK, extra_body=PLAIN).choices[0].message.content == text
    raw = client.chat.completions.with_raw_response.create(**ASK)
    assert raw.headers["content-type"].startswith("application/json")
    assert raw.parse().usage == whole.usage


def test_the_stream_helper_parses_what_it_collected(client: openai.OpenAI) -> None:
    ask = {**ASK, "messages": [{"role": "user", "content": "Invent a pet."}], "max_tokens": 120}
    with client.chat.completions.stream(**ask, response_format=Pet) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    parsed = final.choices[0].message.parsed
    assert isinstance(parsed, Pet)
    whole = client.chat.completions.parse(**ask, response_format=Pet)
    assert whole.choices[0].message.parsed == parsed


def test_a_call_streamed_or_whole_its_result_and_the_answer(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "How warm is it in Oslo?"}]
    ask = {**ASK, "messages": messages, "tools": [WEATHER], "max_tokens": 100, "parallel_tool_calls": False}
    whole = client.chat.completions.create(**ask, tool_choice="required").choices[0]
    assert whole.finish_reason == "tool_calls"
    (call,) = whole.message.tool_calls
    with client.chat.completions.stream(**ask, tool_choice="required") as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == "tool_calls"
    (streamed_call,) = streamed.message.tool_calls
    assert (streamed_call.function.name, streamed_call.function.arguments) == (
        call.function.name,
        call.function.arguments,
    )
    result = get_weather(**json.loads(call.function.arguments))
    # The message goes back as the object that came.
    messages += [whole.message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    answer = client.chat.completions.create(**ask, tool_choice="none").choices[0]
    assert answer.message.content
    assert not answer.message.tool_calls


def test_responses_async_streamed_and_a_call_there_and_back(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 100}

    async def streamed() -> tuple[str, str]:
        async with asynchronous(client) as other, other.responses.stream(**ask, input=QUESTION) as stream:
            deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            return "".join(deltas), (await stream.get_final_response()).output_text

    deltas, final = asyncio.run(streamed())
    assert deltas == final == client.responses.create(**ask, input=QUESTION).output_text
    tools: Any = [{"type": "function", **WEATHER["function"]}]
    items: list[Any] = [{"role": "user", "content": "How warm is it in Oslo?"}]
    called = client.responses.create(
        **ask, input=items, tools=tools, tool_choice="required", parallel_tool_calls=False
    )
    (call,) = called.output
    items += called.output
    output = get_weather(**json.loads(call.arguments))
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
    assert client.responses.create(**ask, input=items, tools=tools, tool_choice="none").output_text


def test_text_completions_async_streamed_with_logprobs(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {
        "model": MODEL, "prompt": ["The capital of France is", "Two and two are"], "temperature": 0,
        "max_tokens": 8, "logprobs": 2,
    }  # fmt: skip
    whole = client.completions.create(**ask)
    assert ANSWER in whole.choices[0].text

    async def streamed() -> dict[int, list[Any]]:
        found: dict[int, list[Any]] = {0: [], 1: []}
        async with asynchronous(client) as other:
            async for chunk in await other.completions.create(**ask, stream=True):
                for choice in chunk.choices:
                    found[choice.index].append(choice)
        return found

    for index, chunks in asyncio.run(streamed()).items():
        choice = whole.choices[index]
        assert "".join(chunk.text for chunk in chunks) == choice.text
        tokens = [token for chunk in chunks if chunk.logprobs for token in chunk.logprobs.tokens]
        assert tokens == choice.logprobs.tokens


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**{**ASK, "temperature": 9})
    assert refused.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**{**ASK, "temperature": 9}, stream=True)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.models.retrieve("no-such")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt="word " * 9000, max_tokens=1)
    assert long.value.code == "context_length_exceeded"
