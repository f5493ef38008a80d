"""LangChain's ChatOpenAI and OpenAI, as they are: answers, streams, tools, structured output, Responses."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip(
    "langchain_openai", reason="langchain-openai is not installed: pip install -e '.[clients]'"
)

import httpx
import openai
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

from tests.clients import asks
from tests.clients.asks import ANSWER, MODEL, PLAIN, QUESTION, Pet
from tests.e2e.harness import Server

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def options(base_url: str) -> dict[str, Any]:
    return {
        "model": MODEL, "base_url": base_url, "api_key": "unused", "temperature": 0, "max_tokens": 40,
        "max_retries": 0, "timeout": 120,
    }  # fmt: skip


@pytest.fixture
def chat(options: dict[str, Any]) -> ChatOpenAI:
    return ChatOpenAI(**options)


def text_of(message: AIMessage) -> str:
    return str(message.text)


def test_whole_streamed_sync_async_batched_and_plain_give_one_text(
    chat: ChatOpenAI, options: dict[str, Any]
) -> None:
    conversation = [SystemMessage("You are a helpful assistant."), HumanMessage(QUESTION)]
    answer = chat.invoke(conversation)
    text = text_of(answer)
    assert ANSWER in text
    assert answer.usage_metadata["output_tokens"] > 0
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.response_metadata["model_name"] == MODEL
    assert text_of(ChatOpenAI(**options, extra_body=PLAIN).invoke(conversation)) == text

    async def others() -> list[str]:
        whole = await chat.ainvoke(conversation)
        return [text_of(whole), "".join([text_of(piece) async for piece in chat.astream(conversation)])]

    assert asyncio.run(others()) == [text, text]
    pieces = list(chat.stream(conversation, stream_usage=True))
    assert len(pieces) > 3
    total = pieces[0]
    for piece in pieces[1:]:
        total += piece
    assert isinstance(total, AIMessageChunk)
    assert text_of(total) == text
    assert total.usage_metadata == answer.usage_metadata
    assert [text_of(each) for each in chat.batch([conversation] * 3)] == [text] * 3
    # An answer goes back as the object that came.
    assert text_of(chat.invoke([*conversation, answer, HumanMessage("And of Italy?")]))


def test_stop_seed_logprobs_and_choices(chat: ChatOpenAI, options: dict[str, Any]) -> None:
    few = {**options, "temperature": 1, "max_tokens": 24}
    sampled = ChatOpenAI(**few, seed=7, n=2, logprobs=True, top_logprobs=2)
    first, again = (sampled.generate([[HumanMessage(QUESTION)]]).generations[0] for _ in range(2))
    assert [each.text for each in first] == [each.text for each in again]
    assert first[0].text != first[1].text
    tokens = first[0].message.response_metadata["logprobs"]["content"]
    assert "".join(token["token"] for token in tokens).startswith(first[0].text)
    assert ANSWER not in text_of(chat.invoke(QUESTION, stop=[ANSWER]))


def test_a_call_its_result_and_the_answer(chat: ChatOpenAI) -> None:
    weather = tool(asks.get_weather)
    bound = chat.bind_tools(
        [weather], tool_choice="required", parallel_tool_calls=False, strict=True, max_tokens=100
    )
    question = HumanMessage("How warm is it in Oslo?")
    called = bound.invoke([question])
    (call,) = called.tool_calls
    assert call["name"] == "get_weather"
    streamed = None
    for piece in bound.stream([question]):
        streamed = piece if streamed is None else streamed + piece
    assert streamed is not None
    assert [each["args"] for each in streamed.tool_calls] == [call["args"]]
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage)
    assert text_of(chat.bind_tools([weather], tool_choice="none").invoke([question, called, result]))


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(options: dict[str, Any], method: str) -> None:
    chat = ChatOpenAI(**{**options, "max_tokens": 200})
    structured = chat.with_structured_output(Pet, method=method, strict=True)
    answer = structured.invoke("Invent a pet.")
    assert isinstance(answer, Pet)
    assert structured.invoke("Invent a pet.", extra_body=PLAIN) == answer
    assert list(structured.stream("Invent a pet."))[-1] == answer


def test_json_mode(server: Server, options: dict[str, Any]) -> None:
    # Left alone, a small model's object may be longer than any test; the bias makes it an empty one.
    (empty,) = httpx.post(f"{server.url}/tokenize", json={"prompt": "{}"}, timeout=60).json()["tokens"]
    chat = ChatOpenAI(**options, logit_bias={empty: 100})
    assert chat.with_structured_output(None, method="json_mode").invoke("A pet, as JSON.") == {}


def test_the_responses_api(options: dict[str, Any]) -> None:
    chat = ChatOpenAI(**{**options, "max_tokens": 100}, use_responses_api=True)
    answer = chat.invoke(QUESTION)
    assert ANSWER in text_of(answer)
    assert "".join(text_of(piece) for piece in chat.stream(QUESTION)) == text_of(answer)
    assert text_of(chat.invoke([HumanMessage(QUESTION), answer, HumanMessage("And of Italy?")]))
    assert isinstance(chat.with_structured_output(Pet).invoke("Invent a pet."), Pet)
    weather = tool(asks.get_weather)
    question = HumanMessage("How warm is it in Oslo?")
    forced = chat.bind_tools([weather], tool_choice="required", parallel_tool_calls=False, strict=True)
    called = forced.invoke([question])
    (call,) = called.tool_calls
    again = chat.bind_tools([weather], tool_choice="none").invoke([question, called, weather.invoke(call)])
    assert text_of(again)


def test_text_completions(options: dict[str, Any]) -> None:
    model = OpenAI(**{**options, "max_tokens": 8})
    prompt = "The capital of France is"
    text = model.invoke(prompt)
    assert ANSWER in text
    assert "".join(model.stream(prompt)) == text
    assert model.batch([prompt, prompt]) == [text, text]
    assert OpenAI(**{**options, "max_tokens": 8}, n=2, best_of=3).generate([prompt]).generations[0][0].text


def test_errors_are_openais_and_langchains(chat: ChatOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat.invoke(QUESTION, temperature=9)
    assert refused.value.param == "temperature"
    with pytest.raises(ContextOverflowError):
        chat.invoke("word " * 9000)
