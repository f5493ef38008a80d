"""LiteLLM as it is, by its provider `openai/`: answers, streams, tools, schemas, text completions, errors."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

pytest.importorskip("litellm", reason="litellm is not installed: pip install -e '.[clients]'")

import litellm

from tests.clients.asks import ANSWER, MODEL, PLAIN, QUESTION, WEATHER, Pet, get_weather

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def options(base_url: str) -> dict[str, Any]:
    return {
        "model": f"openai/{MODEL}", "api_base": base_url, "api_key": "unused", "temperature": 0,
        "max_tokens": 40, "num_retries": 0, "timeout": 120,
    }  # fmt: skip


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_whole_streamed_sync_async_and_plain_give_one_text(options: dict[str, Any]) -> None:
    ask = {**options, "messages": user(QUESTION)}
    answer = litellm.completion(**ask)
    text = answer.choices[0].message.content
    assert ANSWER in text
    assert answer.choices[0].finish_reason == "stop"
    assert litellm.completion(**ask, extra_body=PLAIN).choices[0].message.content == text
    chunks = list(litellm.completion(**ask, stream=True, stream_options={"include_usage": True}))
    rebuilt = litellm.stream_chunk_builder(chunks)
    assert rebuilt.choices[0].message.content == text
    assert rebuilt.usage.completion_tokens == answer.usage.completion_tokens
    # Without usage asked for, too: no chunk without a choice may come.
    pieces = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**ask, stream=True)]
    assert "".join(pieces) == text

    async def others() -> list[str]:
        whole = await litellm.acompletion(**ask)
        stream = await litellm.acompletion(**ask, stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        return [whole.choices[0].message.content, "".join(pieces)]

    assert asyncio.run(others()) == [text, text]
    # An answer goes back as the object that came.
    further = [*ask["messages"], answer.choices[0].message, *user("And of Italy?")]
    assert litellm.completion(**{**ask, "messages": further}).choices[0].message.content


def test_choices_seed_stop_and_logprobs(options: dict[str, Any]) -> None:
    ask = {**options, "messages": user(QUESTION), "temperature": 1, "max_tokens": 24, "seed": 7, "n": 2}
    first, again = (litellm.completion(**ask, logprobs=True, top_logprobs=2).choices for _ in range(2))
    texts = [choice.message.content for choice in first]
    assert texts == [choice.message.content for choice in again]
    assert texts[0] != texts[1]
    assert "".join(token.token for token in first[0].logprobs.content).startswith(texts[0])
    stopped = litellm.completion(**options, messages=user(QUESTION), stop=ANSWER)
    assert ANSWER not in stopped.choices[0].message.content


def test_a_call_its_result_and_the_answer(options: dict[str, Any]) -> None:
    messages = user("How warm is it in Oslo?")
    ask = {**options, "messages": messages, "tools": [WEATHER], "max_tokens": 100}
    forced = {**ask, "tool_choice": "required", "parallel_tool_calls": False}
    message = litellm.completion(**forced).choices[0].message
    (call,) = message.tool_calls
    rebuilt = litellm.stream_chunk_builder(list(litellm.completion(**forced, stream=True)))
    (streamed,) = rebuilt.choices[0].message.tool_calls
    assert streamed.function.arguments == call.function.arguments
    result = get_weather(**json.loads(call.function.arguments))
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    assert litellm.completion(**ask, tool_choice="none").choices[0].message.content


def test_a_pydantic_response_format(options: dict[str, Any]) -> None:
    ask = {**options, "messages": user("Invent a pet."), "max_tokens": 200, "response_format": Pet}
    text = litellm.completion(**ask).choices[0].message.content
    Pet.model_validate_json(text)
    assert litellm.completion(**ask, extra_body=PLAIN).choices[0].message.content == text


def test_text_completions(options: dict[str, Any]) -> None:
    ask = {**options, "model": f"text-completion-openai/{MODEL}", "max_tokens": 8}
    prompt = "The capital of France is"
    answer = litellm.text_completion(**ask, prompt=prompt, logprobs=2)
    text = answer.choices[0].text
    assert ANSWER in text
    assert "".join(answer.choices[0].logprobs.tokens) == text
    pieces = [
        chunk.choices[0].text or "" for chunk in litellm.text_completion(**ask, prompt=prompt, stream=True)
    ]
    assert "".join(pieces) == text
    several = litellm.text_completion(**ask, prompt=[prompt, prompt])
    assert [choice.text for choice in several.choices] == [text, text]


def test_the_responses_api(options: dict[str, Any]) -> None:
    ask = {name: options[name] for name in ("model", "api_base", "api_key", "temperature")}
    answer = litellm.responses(**ask, input=QUESTION, max_output_tokens=60)
    (message,) = answer.output
    assert ANSWER in message.content[0].text
    events = litellm.responses(**ask, input=QUESTION, max_output_tokens=60, stream=True)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == message.content[0].text


def test_errors_are_litellms_own(options: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**{**options, "temperature": 9}, messages=user(QUESTION))
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**options, "model": "openai/no-such"}, messages=user(QUESTION))
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**options, messages=user("word " * 9000))
