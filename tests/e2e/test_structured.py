"""Grammars on real weights: outputs as asked, the same with and without drafts, and drafts are accepted."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pydantic
import pytest

from specdec.client import Client
from tests.chat_templates import HERMES, tool
from tests.e2e.conftest import run_server
from tests.e2e.harness import Server, wait_for
from tests.e2e.models import target_with_template

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

GAMMA = 6
NAME = {"type": "string", "maxLength": 20}
PERSON = {
    "type": "object",
    "properties": {
        "name": NAME,
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog", "fish"]}, "maxItems": 3},
    },
    "required": ["name", "age", "pets"],
    "additionalProperties": False,
}
CITY = {
    "type": "object",
    "properties": {
        "city": NAME,
        "country": NAME,
        "is_capital": {"type": "boolean"},
        "position": {
            "type": "object",
            "properties": {"north": {"type": "boolean"}, "side": {"enum": ["east", "west"]}},
            "required": ["north", "side"],
            "additionalProperties": False,
        },
    },
    "required": ["city", "country", "is_capital", "position"],
    "additionalProperties": False,
}
TINY = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
JSON_ASKS = [
    ("Describe a person as JSON with name, age and pets.", PERSON),
    ("Write JSON about the capital of France.", CITY),
    ("Tell me a story about a fox.", PERSON),
    ("Is water wet? Answer in JSON.", TINY),
    ("Name a colour.", {"enum": ["red", "green", "blue"]}),
]
OTHER_ASKS: list[tuple[str, dict[str, Any], Callable[[str], object]]] = [
    (
        "When did the war end?",
        {"regex": r"(19|20)\d{2}-[01]\d"},
        re.compile(r"(19|20)\d{2}-[01]\d").fullmatch,
    ),
    (
        "Is the sky blue?",
        {"choice": ["yes", "no", "nobody knows"]},
        ("yes", "no", "nobody knows").__contains__,
    ),
    (
        "What is 2 + 2?",
        {"grammar": 'start: NUMBER (" + " NUMBER){1,3}\nNUMBER: /[0-9]{1,2}/'},
        re.compile(r"\d{1,2}( \+ \d{1,2}){1,3}").fullmatch,
    ),
]
WEATHER = tool(
    "get_weather",
    {"city": NAME, "unit": {"enum": ["celsius", "fahrenheit"]}},
    description="Weather of a city.",
)
CLOCK = tool("clock", description="The time.")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The embedded target with a template that takes tools."""
    return target_with_template(tmp_path_factory.mktemp("target-with-tools"), HERMES)


@pytest.fixture(scope="module")
def server(target: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    args = {
        "target": {"model": target, "dtype": "float32"},
        "draft": {"model": "smollm2-draft", "dtype": "float32"},
        "served_model_name": "smollm2",
        "speculation": {"num_speculative_tokens": GAMMA},
        "coordinator": {"draft_timeout_s": 60.0},
    }
    yield from run_server(tmp_path_factory.mktemp("server-structured"), args)


def ask(server: Server, text: str, gamma: int = GAMMA, **fields: Any) -> dict[str, Any]:
    body = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 300,
        "speculative": {"num_speculative_tokens": gamma, "metrics": True},
        "temperature": 0,
        **fields,
    }
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=300)
    assert response.status_code == 200, response.text
    return dict(response.json())


def together(server: Server, requests: list[tuple[str, int, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Send all at once; they are decoded as one batch."""
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(lambda request: ask(server, request[0], request[1], **request[2]), requests))


def content(answer: dict[str, Any]) -> str:
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop", choice
    return str(choice["message"]["content"])


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def assert_accepted(answers: list[dict[str, Any]], what: str) -> None:
    metrics = [answer["metrics"]["speculative_decoding"] for answer in answers]
    drafted = sum(each["num_draft_tokens"] for each in metrics)
    accepted = sum(each["num_accepted_draft_tokens"] for each in metrics)
    print(f"{what}: accepted {accepted} of {drafted} draft tokens ({accepted / drafted:.0%})")
    assert accepted / drafted > 0.05


def test_greedy_json_validates_equals_plain_decoding_and_drafts_are_accepted(server: Server) -> None:
    requests = [(text, schema_format(schema)) for text, schema in JSON_ASKS]
    plain = together(server, [(text, 0, fields) for text, fields in requests])
    drafted = together(server, [(text, GAMMA, fields) for text, fields in requests])
    assert [content(answer) for answer in drafted] == [content(answer) for answer in plain]
    for (_, schema), answer in zip(JSON_ASKS, drafted, strict=True):
        jsonschema.validate(json.loads(content(answer)), schema)
    assert_accepted(drafted, "greedy JSON")


def test_sampled_json_validates_and_a_seed_gives_one_text_with_and_without_drafts(server: Server) -> None:
    asks = [(text, schema, seed) for seed in range(2) for text, schema in JSON_ASKS]
    fields = [{**schema_format(schema), "temperature": 1, "seed": seed} for _, schema, seed in asks]
    drafted = together(server, [(text, GAMMA, f) for (text, _, _), f in zip(asks, fields, strict=True)])
    plain = together(server, [(text, 0, f) for (text, _, _), f in zip(asks, fields, strict=True)])
    unseeded = together(
        server, [(text, GAMMA, {**schema_format(schema), "temperature": 1}) for text, schema, _ in asks]
    )
    assert [content(answer) for answer in drafted] == [content(answer) for answer in plain]
    for (_, schema, _), *answers in zip(asks, drafted, unseeded, strict=True):
        for answer in answers:
            jsonschema.validate(json.loads(content(answer)), schema)
    assert_accepted(drafted, "JSON, coupled, temperature 1")
    assert_accepted(unseeded, "JSON, rejection, temperature 1")


@pytest.mark.parametrize(("text", "outputs", "is_right"), OTHER_ASKS)
def test_other_grammars_are_followed(
    server: Server, text: str, outputs: dict[str, Any], is_right: Callable[[str], object]
) -> None:
    fields = {"structured_outputs": outputs}
    sampled = {**fields, "temperature": 1}
    answers = together(server, [(text, GAMMA, fields), (text, 0, fields), *[(text, GAMMA, sampled)] * 8])
    texts = [content(answer) for answer in answers]
    assert texts[0] == texts[1]
    assert all(is_right(text) for text in texts), texts


def test_grammars_that_end_at_once_end_every_one_of_60_calls(server: Server) -> None:
    fields = {**schema_format(TINY), "temperature": 1}
    answers = together(server, [(f"Question {idx}?", GAMMA, fields) for idx in range(60)])
    assert all(isinstance(json.loads(content(answer))["a"], bool) for answer in answers)
    wait_for(server.is_idle, 30.0, "idle")


@pytest.mark.parametrize(
    "fields",
    [
        schema_format({"type": "nonsense"}),
        {"structured_outputs": {"regex": "a(b"}},
        {
            "structured_outputs": {
                "grammar": "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(4000))])
            }
        },
    ],
)
def test_what_cannot_be_followed_is_refused_and_the_server_goes_on(
    server: Server, fields: dict[str, Any]
) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 400, response.text
    assert content(ask(server, "Hi", max_tokens=200, **schema_format(TINY)))


def test_forced_calls_are_valid_and_equal_plain_decoding(server: Server) -> None:
    schemas = {each["function"]["name"]: each["function"]["parameters"] for each in (WEATHER, CLOCK)}
    named = {"type": "function", "function": {"name": "get_weather"}}
    requests = [
        ("How warm is it in Oslo?", {"tool_choice": "required"}),
        ("What time is it?", {"tool_choice": "required", "parallel_tool_calls": False}),
        ("Tell me about Rome.", {"tool_choice": named}),
        ("Tell me about Rome.", {"tool_choice": named, "temperature": 1, "seed": 3}),
    ]
    tools = {"tools": [WEATHER, CLOCK], "max_tokens": 800}
    drafted = together(server, [(text, GAMMA, {**tools, **fields}) for text, fields in requests])
    plain = together(server, [(text, 0, {**tools, **fields}) for text, fields in requests])
    for answer, reference in zip(drafted, plain, strict=True):
        (choice,), (plain_choice,) = answer["choices"], reference["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        functions = [call["function"] for call in choice["message"]["tool_calls"]]
        assert functions == [call["function"] for call in plain_choice["message"]["tool_calls"]]
        for function in functions:
            jsonschema.validate(json.loads(function["arguments"]), schemas[function["name"]])
    assert [len(answer["choices"][0]["message"]["tool_calls"]) for answer in drafted[1:]] == [1, 1, 1]
    assert_accepted(drafted, "forced calls")


def test_auto_answers_one_way_or_the_other(server: Server) -> None:
    (choice,) = ask(server, "How warm is it in Oslo?", tools=[WEATHER, CLOCK], max_tokens=60)["choices"]
    assert choice["finish_reason"] in ("stop", "length", "tool_calls")
    assert choice["message"]["content"] is not None or choice["message"]["tool_calls"]


def earlier_calls() -> list[dict[str, Any]]:
    """Turns in which calls were made as the template writes them: a small model goes on like this."""
    turns: list[dict[str, Any]] = []
    for number, city in enumerate(("Rome", "Paris")):
        call = {"name": "get_weather", "arguments": json.dumps({"city": city, "unit": "celsius"})}
        turns += [
            {"role": "user", "content": f"How warm is it in {city}?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": f"call_{number}", "type": "function", "function": call}],
            },
            {"role": "tool", "tool_call_id": f"call_{number}", "content": "20 degrees"},
            {"role": "assistant", "content": f"It is 20 degrees in {city}."},
        ]
    return turns


def test_calls_of_the_models_own_follow_a_strict_schema_and_equal_plain_decoding(server: Server) -> None:
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    schema = WEATHER["function"]["parameters"]  # type: ignore[index]
    asks = ["How warm is it in Oslo?", "How warm is it in Berlin?", "Is it cold in Tokyo?", "Thanks!"]
    fields = {"tools": [strict, CLOCK], "max_tokens": 120}
    options: list[dict[str, Any]] = [
        {},
        {"parallel_tool_calls": False},
        *({"temperature": 1, "seed": seed} for seed in range(4)),
    ]
    requests = [
        (text, {**fields, **each, "messages": [*earlier_calls(), {"role": "user", "content": text}]})
        for text in asks
        for each in options
    ]
    drafted = together(server, [(text, GAMMA, each) for text, each in requests])
    plain = together(server, [(text, 0, each) for text, each in requests])
    num_calls = num_texts = 0
    for answer, reference in zip(drafted, plain, strict=True):
        (choice,), (plain_choice,) = answer["choices"], reference["choices"]
        message, plain_message = choice["message"], plain_choice["message"]
        functions, plain_functions = (
            [call["function"] for call in each.get("tool_calls", ())] for each in (message, plain_message)
        )
        assert (functions, message["content"], choice["finish_reason"]) == (
            plain_functions,
            plain_message["content"],
            plain_choice["finish_reason"],
        )
        num_texts += not functions
        for function in functions if choice["finish_reason"] == "tool_calls" else ():
            num_calls += 1
            if function["name"] == "get_weather":
                jsonschema.validate(json.loads(function["arguments"]), schema)
    print(f"{num_calls} calls, {num_texts} answers without")
    assert num_calls > 0
    assert_accepted(drafted, "strict calls of the model's own")


def test_tools_over_grpc_answer_as_over_http(server: Server) -> None:
    tools = [WEATHER, CLOCK]
    messages = [{"role": "user", "content": "How warm is it in Oslo?"}]
    options: Any = {
        "tools": tools,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 300,
        "temperature": 0.0,
    }
    answers = []
    for url in (server.url, f"grpc://{server.grpc_address}"):
        with Client(url, timeout_s=300) as client:
            whole = client.chat(messages, **options)
            *_, last = client.stream(messages, **options)
        assert whole.finish_reason == last.finish_reason == "tool_calls"
        calls = [
            [(call.name, call.arguments) for call in each] for each in (whole.tool_calls, last.tool_calls)
        ]
        assert calls[0] == calls[1]
        answers.append(calls[0])
    assert answers[0] == answers[1]
    ((name, arguments),) = answers[0]
    schemas = {each["function"]["name"]: each["function"]["parameters"] for each in tools}  # type: ignore[index]
    jsonschema.validate(json.loads(arguments), schemas[name])


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    kind: Literal["cat", "dog"]


def clients(server: Server) -> tuple[openai.OpenAI, openai.AsyncOpenAI]:
    options = {"base_url": f"{server.url}/v1", "api_key": "unused", "max_retries": 0}
    return openai.OpenAI(**options), openai.AsyncOpenAI(**options)


def test_openais_responses_sync_async_and_streamed(server: Server) -> None:
    sync, asynchronous = clients(server)
    ask = {"model": "smollm2", "input": "Name an animal.", "temperature": 0, "max_output_tokens": 40}
    created = sync.responses.create(**ask)
    assert created.output_text
    assert created.usage is not None
    assert created.usage.output_tokens > 0
    assert asyncio.run(asynchronous.responses.create(**ask)).output_text == created.output_text
    deltas = [
        event.delta
        for event in sync.responses.create(**ask, stream=True)
        if event.type == "response.output_text.delta"
    ]
    assert len(deltas) > 1
    assert "".join(deltas) == created.output_text
    parse = {**ask, "text_format": Person, "max_output_tokens": 200}
    parsed = sync.responses.parse(**parse).output_parsed
    assert isinstance(parsed, Person)
    with sync.responses.stream(**parse) as stream:
        assert stream.get_final_response().output_parsed == parsed
    scored: Any = {**ask, "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    (part,) = sync.responses.create(**scored).output[0].content
    assert "".join(entry.token for entry in part.logprobs) == created.output_text
    # Greedy: every token is the likeliest.
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in part.logprobs)
    streamed = [
        entry.logprob
        for event in sync.responses.create(**scored, stream=True)
        if event.type == "response.output_text.delta"
        for entry in event.logprobs
    ]
    assert streamed == [entry.logprob for entry in part.logprobs]
    called = sync.responses.create(
        **{**ask, "max_output_tokens": 300},
        tools=[{"type": "function", **WEATHER["function"]}],  # type: ignore[dict-item]
        tool_choice="required",
        parallel_tool_calls=False,
    )
    (call,) = called.output
    assert call.type == "function_call"
    jsonschema.validate(json.loads(call.arguments), WEATHER["function"]["parameters"])


def test_openais_chat_parse(server: Server) -> None:
    sync, _ = clients(server)
    messages: Any = [{"role": "user", "content": "Invent a pet."}]
    for chat in (sync.chat, sync.beta.chat):
        answer = chat.completions.parse(
            model="smollm2", messages=messages, response_format=Person, max_tokens=200, temperature=0
        )
        assert isinstance(answer.choices[0].message.parsed, Person)
