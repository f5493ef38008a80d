"""``POST /v1/responses``, as openai's own client and types see it."""

from __future__ import annotations

import json
from typing import Literal

import httpx
import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from specdec.errors import GenerationFailed
from specdec.gateway.http import build_http_app
from tests.chat_templates import (
    HERMES,
    PLAIN,
    THINKING,
    RandomFollower,
    call_text,
    service_with,
    tokenizer_with,
)
from tests.fakes import EOS_ID, MODEL_NAME, ScriptedBackend, byte_ids_of, in_thread, logprob_of, only, serving

CLOCK = {
    "type": "function",
    "name": "clock",
    "description": None,
    "strict": True,
    "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
}
TEXT = "red green 😀 blue"
LOGPROBS = ["message.output_text.logprobs"]
EVENT: pydantic.TypeAdapter[ResponseStreamEvent] = pydantic.TypeAdapter(ResponseStreamEvent)


def app_of(backend, template=HERMES, **options):
    service = service_with(backend, template, **options)
    return build_http_app(only(service))


def scripted(text, **options):
    return ScriptedBackend([*byte_ids_of(text), EOS_ID], chunk_sizes=(3,), **options)


def client_of(url, kind=openai.OpenAI):
    return kind(base_url=f"{url}/v1", api_key="unused", max_retries=0)


async def post(url, body):
    async with httpx.AsyncClient(timeout=30) as client:
        return await client.post(f"{url}/v1/responses", json=body)


def strict(response):
    """Check an answer against openai's own types, which their client does not do."""
    assert response.status_code == 200, response.text
    return Response.model_validate_json(response.content)


def events_of(response):
    """Decode a stream, checking framing, numbers, types and names."""
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = response.content.decode().split("\n\n")
    assert frames.pop() == ""
    events = []
    for number, frame in enumerate(frames):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        EVENT.validate_python(event)
        events.append(event)
    return events


async def test_a_text_answer_has_openais_form():
    async with serving(app_of(scripted(TEXT))) as url:
        raw = await post(url, {"input": "one", "instructions": "be brief", "metadata": {"a": "b"}})
    response = strict(raw)
    assert response.id.startswith("resp_")
    assert (response.object, response.status, response.model) == ("response", "completed", MODEL_NAME)
    assert response.output_text == TEXT
    (item,) = response.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    assert response.usage.output_tokens == len(TEXT.encode()) + 1
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert (response.instructions, response.metadata, response.tools) == ("be brief", {"a": "b"}, [])
    assert raw.json()["store"] is False


async def test_the_cap_leaves_it_incomplete():
    async with serving(app_of(scripted(TEXT))) as url:
        response = strict(await post(url, {"input": "one", "max_output_tokens": 3}))
        stream = events_of(await post(url, {"input": "one", "max_output_tokens": 3, "stream": True}))
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (response.output_text, response.output[0].status) == ("red", "incomplete")
    assert stream[-1]["type"] == "response.incomplete"


SYSTEM = "<|im_start|>system\n"


@pytest.mark.parametrize(
    ("fields", "rendered"),
    [
        ({"input": "hi"}, "<|im_start|>user\nhi<|im_end|>\n"),
        ({"input": "hi", "instructions": "go"}, f"{SYSTEM}go<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"),
        (
            {"input": [{"role": "developer", "content": "go"}, {"role": "user", "content": "hi"}]},
            f"{SYSTEM}go<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n",
        ),
        (
            {
                "input": [
                    {"type": "message", "role": "user", "content": [
                        {"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
                    {"id": "rs_1", "type": "reasoning", "summary": [], "status": "completed",
                     "content": [{"type": "reasoning_text", "text": "hm"}]},
                    {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed",
                     "content": [{"type": "output_text", "text": "c", "annotations": [], "logprobs": []}]},
                    {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "clock",
                     "arguments": "{}", "status": "completed"},
                    {"type": "function_call", "call_id": "call_2", "name": "clock", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "call_1", "output": "noon"},
                    {"type": "function_call_output", "call_id": "call_2",
                     "output": [{"type": "input_text", "text": "night"}]},
                ]
            },
            "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n\nc"
            + call_text("clock", {}) * 2
            + "<|im_end|>\n<|im_start|>tool\nnoon<|im_end|>\n<|im_start|>tool\nnight<|im_end|>\n",
        ),
    ],
)  # fmt: skip
async def test_items_are_the_conversation(fields, rendered):
    backend = scripted("x")
    async with serving(app_of(backend, THINKING)) as url:
        strict(await post(url, fields))
    prompt = tokenizer_with(THINKING).decode(backend.requests[0].prompt_ids)
    assert prompt == f"{rendered}<|im_start|>assistant\n"


async def test_a_stream_tells_what_the_whole_answer_tells():
    async with serving(app_of(scripted(TEXT))) as url:
        whole = (await post(url, {"input": "one"})).json()
        events = events_of(await post(url, {"input": "one", "stream": True}))
    names = [event["type"].removeprefix("response.") for event in events]
    assert names[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert names[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert set(names[4:-4]) == {"output_text.delta"}
    assert "".join(event["delta"] for event in events[4:-4]) == TEXT
    final = events[-1]["response"]

    def without_ids(response):
        output = [{**item, "id": "", "call_id": ""} for item in response["output"]]
        return {**response, "id": "", "created_at": 0, "output": output}

    assert without_ids(final) == without_ids(whole)


async def test_reasoning_text_and_calls_are_items_of_their_own_in_the_stream():
    text = f"<think>hm</think>Let me see. {call_text('clock', {})}{call_text('clock', {'a': 1})}"
    body = {"input": "one", "tools": [CLOCK]}
    async with serving(app_of(scripted(text), THINKING)) as url:
        response = strict(await post(url, body))
        events = events_of(await post(url, {**body, "stream": True}))
    for output in (response.model_dump()["output"], events[-1]["response"]["output"]):
        assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "function_call"]
        assert output[0]["content"][0]["text"] == "hm"
        assert output[1]["content"][0]["text"] == "Let me see."
        assert [item["arguments"] for item in output[2:]] == ["{}", '{"a": 1}']
        assert output[2]["call_id"] != output[3]["call_id"]
    added = [event for event in events if event["type"] == "response.output_item.added"]
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert (
        [event["output_index"] for event in added]
        == [event["output_index"] for event in done]
        == [0, 1, 2, 3]
    )
    assert [event["item"]["id"] for event in added] == [event["item"]["id"] for event in done]
    assert [event["item"] for event in done] == events[-1]["response"]["output"]
    for index, item in enumerate(events[-1]["response"]["output"]):
        told = "".join(
            event["delta"] for event in events if "delta" in event and event["output_index"] == index
        )
        assert told == (item["arguments"] if "arguments" in item else item["content"][0]["text"])


async def test_a_call_that_turns_out_malformed_is_text_and_its_item_incomplete():
    text = '<tool_call>{"name": "clock", "arguments": {nope}}</tool_call>'
    body = {"input": "one", "tools": [CLOCK]}
    async with serving(app_of(scripted(text))) as url:
        events = events_of(await post(url, {**body, "stream": True}))
    output = events[-1]["response"]["output"]
    assert [(item["type"], item["status"]) for item in output] == [
        ("function_call", "incomplete"),
        ("message", "completed"),
    ]
    assert output[1]["content"][0]["text"] == text


class Person(pydantic.BaseModel):
    name: str
    kind: Literal["cat", "dog"]


@pytest.mark.parametrize("top_logprobs", [None, 0, 3])
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize(
    ("text", "content"),
    [(TEXT, TEXT), (f"<think>hm</think>{TEXT}\n{call_text('clock', {})}", TEXT)],
)
async def test_log_probabilities_are_those_of_the_text_whole_and_streamed(text, content, size, top_logprobs):
    backend = ScriptedBackend([*byte_ids_of(text), EOS_ID], chunk_sizes=(size,))
    body = {"input": "one", "include": LOGPROBS, "top_logprobs": top_logprobs, "tools": [CLOCK]}
    async with serving(app_of(backend, THINKING)) as url:
        raw = await post(url, body)
        events = events_of(await post(url, {**body, "stream": True}))
    response = strict(raw)
    assert response.top_logprobs == (top_logprobs or 0)
    message = next(item for item in response.output if item.type == "message")
    (part,) = message.content
    assert part.text == content
    assert bytes(byte for entry in part.logprobs for byte in entry.bytes).decode() == content
    expected = [logprob_of(token_id) for token_id in byte_ids_of(content)]
    assert [entry.logprob for entry in part.logprobs] == pytest.approx(expected)
    assert {len(entry.top_logprobs) for entry in part.logprobs} == {top_logprobs or 0}
    whole = next(item for item in raw.json()["output"] if item["type"] == "message")["content"][0]["logprobs"]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [entry for event in deltas for entry in event["logprobs"]] == whole
    for event in deltas:
        # A token may reach into what a later event tells, never into an earlier one.
        told = bytes(byte for entry in event["logprobs"] for byte in entry["bytes"])
        assert event["delta"].encode().startswith(told) or told.startswith(event["delta"].encode())
    done = next(event for event in events if event["type"] == "response.output_text.done")
    assert done["logprobs"] == whole
    (part_done,) = [
        event["part"]
        for event in events
        if event["type"] == "response.content_part.done" and event["part"]["type"] == "output_text"
    ]
    assert part_done["logprobs"] == whole
    assert events[-1]["response"]["output"][-1 if text is TEXT else 1]["content"][0]["logprobs"] == whole


async def test_openais_client_reads_log_probabilities():
    async with serving(app_of(scripted(TEXT), PLAIN)) as url:
        client = client_of(url)
        ask = {"model": MODEL_NAME, "input": "one", "include": LOGPROBS, "top_logprobs": 2}
        created = await in_thread(lambda: client.responses.create(**ask))
        events = await in_thread(lambda: list(client.responses.create(**ask, stream=True)))
    entries = created.output[0].content[0].logprobs
    assert "".join(entry.token for entry in entries[:10]) == TEXT[:10]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [e.logprob for event in deltas for e in event.logprobs] == [entry.logprob for entry in entries]
    assert all(len(entry.top_logprobs) == 2 for event in deltas for entry in event.logprobs)


async def test_without_include_there_are_no_log_probabilities():
    backend = scripted(TEXT)
    async with serving(app_of(backend)) as url:
        for fields in ({}, {"include": []}, {"include": None, "top_logprobs": 0}):
            response = strict(await post(url, {"input": "one", **fields}))
            assert response.output[0].content[0].logprobs == []
    assert {request.num_logprobs for request in backend.requests} == {None}


async def test_openais_client_creates_parses_and_streams_sync_and_async():
    follower = RandomFollower(tokenizer_with(PLAIN))
    async with serving(app_of(ScriptedBackend(script_of=follower, chunk_sizes=(1, 4)), PLAIN)) as url:
        sync, asynchronous = client_of(url), client_of(url, openai.AsyncOpenAI)
        ask = {"model": MODEL_NAME, "input": "one", "text_format": Person, "max_output_tokens": 3000}
        parsed = await in_thread(lambda: sync.responses.parse(**ask))
        assert isinstance(parsed.output_parsed, Person)
        assert isinstance((await asynchronous.responses.parse(**ask)).output_parsed, Person)

        def stream():
            with sync.responses.stream(**ask) as events:
                list(events)
                return events.get_final_response()

        assert isinstance((await in_thread(stream)).output_parsed, Person)
        async with asynchronous.responses.stream(**ask) as events:
            async for _ in events:
                pass
            assert isinstance((await events.get_final_response()).output_parsed, Person)

    async with serving(app_of(scripted(TEXT))) as url:
        sync, asynchronous = client_of(url), client_of(url, openai.AsyncOpenAI)
        ask = {"model": MODEL_NAME, "input": "one"}
        assert (await in_thread(lambda: sync.responses.create(**ask))).output_text == TEXT
        assert (await asynchronous.responses.create(**ask)).output_text == TEXT
        created = await in_thread(lambda: list(sync.responses.create(**ask, stream=True)))
        assert created[-1].response.output_text == TEXT


async def test_a_forced_call_is_one_and_is_echoed():
    follower = RandomFollower(tokenizer_with(HERMES))
    body = {"input": "one", "tools": [CLOCK], "tool_choice": {"type": "function", "name": "clock"}}
    async with serving(app_of(ScriptedBackend(script_of=follower))) as url:
        response = strict(await post(url, body))
    (call,) = response.output
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "clock", {})
    assert response.tool_choice.name == "clock"
    assert response.tools[0].name == "clock"


async def test_a_failure_in_mid_stream_is_told_in_both_ways_clients_know():
    backend = scripted(TEXT, error=GenerationFailed("worker lost"), error_after=2)
    async with serving(app_of(backend)) as url:
        raw = await post(url, {"input": "one", "stream": True})
        client = client_of(url)
        with pytest.raises(openai.APIError, match="worker lost"):
            await in_thread(lambda: list(client.responses.create(model=MODEL_NAME, input="one", stream=True)))
    error = json.loads(raw.text.strip().split("data: ")[-1])
    assert error["type"] == "error"
    assert error["message"] == error["error"]["message"] == "worker lost"
    assert error["code"] == "service_unavailable"
    assert "[DONE]" not in raw.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": "half \ud83d"}, "input"),
        ({"input": "x" * 10_000}, "input"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
         "input[0].content[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"include": "message.output_text.logprobs"}, "include"),
        ({"include": LOGPROBS, "top_logprobs": 21}, "top_logprobs"),
        ({"include": LOGPROBS, "top_logprobs": -1}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"truncation": "auto"}, "truncation"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"n": 2}, "n"),
        ({"messages": []}, "messages"),
        ({"temperature": 3}, "temperature"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nonsense"}}}},
         "text.format"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [CLOCK, CLOCK]}, "tools"),
        ({"tools": [{**CLOCK, "name": "a b"}]}, "tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "clock"}}}, "tool_choice"),
        ({"stream_options": {"include_usage": True}, "stream": True}, "stream_options.include_usage"),
        ({"stream_options": {}}, "stream_options"),
    ],
)  # fmt: skip
async def test_what_is_not_there_is_refused_by_name(fields, param):
    backend = scripted(TEXT)
    # Escaped by hand: the client's own encoder refuses surrogates.
    content, headers = json.dumps({"input": "one", **fields}), {"Content-Type": "application/json"}
    async with serving(app_of(backend)) as url, httpx.AsyncClient() as client:
        response = await client.post(f"{url}/v1/responses", content=content, headers=headers)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert not backend.requests


async def test_null_and_fields_without_effect_are_fine():
    fields = dict.fromkeys(("instructions", "tools", "tool_choice", "text", "previous_response_id"))
    harmless = {"store": True, "truncation": "disabled", "background": False, "include": [], "user": "u"}
    async with serving(app_of(scripted(TEXT))) as url:
        response = strict(
            await post(url, {"input": "one", **fields, **harmless, "parallel_tool_calls": False})
        )
    assert response.output_text == TEXT
    assert response.parallel_tool_calls is False
