"""The HTTP API on a real server, seen by real clients and as raw bytes."""

from __future__ import annotations

import asyncio
import json
import time

import httpx
import openai
import pytest

import specdec
from specdec.errors import GenerationFailed, InvariantViolation, ServiceUnavailable, TooManyRequests
from specdec.gateway.http import build_http_app
from specdec.gateway.openai import ChatCompletionRequest, CompletionRequest
from tests.fakes import (
    EOS_ID,
    MODEL_NAME,
    VOCAB_SIZE,
    ScriptedBackend,
    byte_ids_of,
    eventually,
    in_thread,
    only,
    serving,
    token_ids_of,
    toy_service,
)

COLOURS = [*byte_ids_of("red green blue"), EOS_ID]
CHAT = {"messages": [{"role": "user", "content": "one"}]}
TEXT = {"prompt": "one"}
ROUTES = [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)]
EMOJI = "😀 👨‍👩‍👧 日本 мир"


def app_for(backend, **options):
    service = toy_service(backend, **options)
    return build_http_app(only(service))


def serving_backend(backend, **options):
    return serving(app_for(backend, **options))


async def post(url, path, body=None, **kwargs) -> httpx.Response:
    async with httpx.AsyncClient() as client:
        return await client.post(url + path, json=body, **kwargs)


async def get(url, path) -> httpx.Response:
    async with httpx.AsyncClient() as client:
        return await client.get(url + path)


def error_of(response: httpx.Response) -> dict:
    """The error of an answer whose body is nothing but the envelope."""
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in response.text
    return body["error"]


def events_of(response: httpx.Response) -> list[dict]:
    """Decode a stream, checking every byte of its framing."""
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert b"\r" not in response.content
    frames = response.content.decode().split("\n\n")
    assert frames.pop() == ""
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    assert frames.pop() == "data: [DONE]"
    events = [json.loads(frame.removeprefix("data: ")) for frame in frames]
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1
    return events


def text_of(choice: dict) -> str:
    if "message" in choice:
        return choice["message"]["content"]
    return choice["delta"].get("content", "") if "delta" in choice else choice["text"]


# Answers


@pytest.mark.parametrize("sizes", [(1,), (4,)])
async def test_chat_completion(sizes):
    async with serving_backend(ScriptedBackend(COLOURS, chunk_sizes=sizes)) as url:
        response = await post(url, "/v1/chat/completions", {**CHAT, "model": MODEL_NAME})
    body = response.json()
    assert response.status_code == 200
    assert body.pop("id").startswith("chatcmpl-")
    assert abs(body.pop("created") - time.time()) < 60
    prompt_tokens = body["usage"]["prompt_tokens"]
    assert body == {
        "object": "chat.completion",
        "model": MODEL_NAME,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "red green blue", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": len(COLOURS),
            "total_tokens": prompt_tokens + len(COLOURS),
        },
    }


async def test_completion():
    async with serving_backend(ScriptedBackend(COLOURS)) as url:
        body = (await post(url, "/v1/completions", {**TEXT, "max_tokens": 3})).json()
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": "red", "logprobs": None, "finish_reason": "length"}]
    assert body["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("sizes", [(1,), (5,)])
async def test_stream_says_what_the_whole_answer_says(path, body, sizes):
    backend = ScriptedBackend([*byte_ids_of(EMOJI), EOS_ID], chunk_sizes=sizes)
    async with serving_backend(backend) as url:
        whole = (await post(url, path, body)).json()["choices"][0]
        events = events_of(await post(url, path, {**body, "stream": True}))
    assert all(len(event["choices"]) == 1 and "usage" not in event for event in events)
    choices = [event["choices"][0] for event in events]
    assert "".join(text_of(choice) for choice in choices) == text_of(whole) == EMOJI
    assert all("\ufffd" not in text_of(choice) for choice in choices)
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] == "stop"
    assert text_of(choices[-1]) == ""
    if "chat" in path:
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert choices[-1]["delta"] == {}
        assert {event["object"] for event in events} == {"chat.completion.chunk"}


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_usage_chunk_only_when_asked_for(path, body):
    async with serving_backend(ScriptedBackend(COLOURS)) as url:
        for options in ({}, {"include_usage": False}, None):
            events = events_of(await post(url, path, {**body, "stream": True, "stream_options": options}))
            assert all(event["choices"] and "usage" not in event for event in events)
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
        *chunks, last = events_of(await post(url, path, asked))
    assert all(event["choices"] and event["usage"] is None for event in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len(COLOURS)
    assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + len(COLOURS)


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_metrics_when_asked_for(path, body):
    asked = {**body, "speculative": {"metrics": True}}
    async with serving_backend(ScriptedBackend(COLOURS, chunk_sizes=(3,))) as url:
        whole = (await post(url, path, asked)).json()
        usage_too = {**asked, "stream": True, "stream_options": {"include_usage": True}}
        *chunks, last, _ = events_of(await post(url, path, usage_too))
        plain = (await post(url, path, body)).json()
    assert whole["metrics"] == {
        "speculative_decoding": {
            "num_spec_steps": 5,
            "num_draft_tokens": 10,
            "num_accepted_draft_tokens": 5,
            "mean_acceptance_length": 2.0,
            "draft_acceptance_rate": 0.5,
            "acceptance_histogram": [0, 5, 0],
        }
    }
    assert last["metrics"] == whole["metrics"]
    assert last["choices"][0]["finish_reason"] == "stop"
    assert "metrics" not in plain
    assert all("metrics" not in chunk for chunk in chunks)


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("stop", ["een bl", ["een bl"], ["zzz", "een bl"]])
async def test_stop_string_is_cut_the_same_on_every_route(path, body, stop):
    backend = ScriptedBackend(COLOURS, chunk_sizes=(4,))
    async with serving_backend(backend) as url:
        whole = (await post(url, path, {**body, "stop": stop})).json()
        events = events_of(await post(url, path, {**body, "stop": stop, "stream": True}))
    assert text_of(whole["choices"][0]) == "red gr"
    assert whole["usage"]["completion_tokens"] == len("red green bl")
    assert "".join(text_of(event["choices"][0]) for event in events) == "red gr"
    assert backend.num_running == 0


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_every_optional_field_may_be_null(path, body):
    fields = (ChatCompletionRequest if "chat" in path else CompletionRequest).model_fields
    names = {name for name, field in fields.items() if not field.is_required()}
    assert len(names) > 25
    async with serving_backend(ScriptedBackend(COLOURS)) as url:
        response = await post(url, path, {**body, **dict.fromkeys(names)})
    assert response.status_code == 200
    assert text_of(response.json()["choices"][0]) == "red green blue"


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": []},
        {"stop": None},
        {"logprobs": False, "top_logprobs": 0},
        {"response_format": {"type": "text"}},
        {"tools": [], "tool_choice": "none", "parallel_tool_calls": True},
        {"tool_choice": "auto", "functions": []},
        {"n": 1, "user": "me", "store": True, "metadata": {"a": "b"}, "service_tier": "auto"},
        {"max_tokens": 20, "max_completion_tokens": 20},
        {"temperature": 1, "top_p": 1, "seed": 2**63 - 1, "logit_bias": {"5": -100, "6": 1.5}},
        {"speculative": {}},
        {"speculative": {"num_speculative_tokens": 0, "mode": "coupled", "metrics": False}},
    ],
)
async def test_neutral_fields_are_accepted_on_chat(fields):
    async with serving_backend(ScriptedBackend(COLOURS)) as url:
        response = await post(url, "/v1/chat/completions", {**CHAT, **fields})
    assert response.status_code == 200, response.text
    assert text_of(response.json()["choices"][0]) == "red green blue"


async def test_sampling_fields_reach_the_backend():
    backend = ScriptedBackend(COLOURS)
    fields = {
        "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "presence_penalty": 1.0,
        "frequency_penalty": -1, "repetition_penalty": 1.1, "logit_bias": {"5": -1, "3": 2.5}, "seed": 7,
        "max_completion_tokens": 9, "stop_token_ids": [11], "ignore_eos": True,
        "speculative": {"num_speculative_tokens": 3, "mode": "rejection", "pipeline": "lookahead"},
    }  # fmt: skip
    async with serving_backend(backend) as url:
        assert (await post(url, "/v1/chat/completions", {**CHAT, **fields})).status_code == 200
    (request,) = backend.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.7, 0.9, 40, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.0, -1.0)
    assert (sampling.repetition_penalty, sampling.seed, sampling.mode) == (1.1, 7, "rejection")
    assert dict(sampling.logit_bias) == {5: -1.0, 3: 2.5}
    assert request.stop.max_tokens == 9
    assert request.stop.stop_token_ids == {11}
    assert request.max_draft_tokens == 3
    assert request.pipeline == "lookahead"


@pytest.mark.parametrize(
    "prompt", ["red green", ["red green"], token_ids_of("red green"), [token_ids_of("red green")]]
)
async def test_every_form_of_one_prompt(prompt):
    backend = ScriptedBackend(COLOURS)
    async with serving_backend(backend) as url:
        response = await post(url, "/v1/completions", {"prompt": prompt})
    assert response.status_code == 200, response.text
    assert backend.requests[0].prompt_ids == tuple(token_ids_of("red green"))


@pytest.mark.parametrize(
    "messages",
    [
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ],
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        [{"role": "user", "content": "a", "type": "text"}],  # as lm-eval sends it
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "refusal": None}],
        [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": "a", "name": "me"},
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
                ],
            },
            {"role": "tool", "content": "2", "tool_call_id": "1"},
        ],
        [
            {
                "role": "user",
                "content": "paired \ud83d\ude00 and \x00".encode("utf-16", "surrogatepass").decode("utf-16"),
            }
        ],
    ],
)
async def test_conversations(messages):
    async with serving_backend(ScriptedBackend(COLOURS)) as url:
        response = await post(url, "/v1/chat/completions", {"messages": messages})
    assert response.status_code == 200, response.text


# Errors

BOTH = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": 1e6}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": "0.7"}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 9}, "presence_penalty"),
    ({"frequency_penalty": -9}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"2147483648": 1}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"5": "much"}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias"),
    ({"seed": -1}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 1e30}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "x"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"n": 17}, "n"),
    ({"n": 0}, "n"),
    ({"n": 10**7}, "n"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a", 5]}, "stop[1]"),
    ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
    ({"stream": "yes"}, "stream"),
    ({"speculative": {"num_speculative_tokens": 33}}, "speculative.num_speculative_tokens"),
    ({"speculative": {"num_speculative_tokens": -1}}, "speculative.num_speculative_tokens"),
    ({"speculative": {"num_speculative_tokens": "x"}}, "speculative.num_speculative_tokens"),
    ({"speculative": {"mode": "greedy"}}, "speculative.mode"),
    ({"speculative": {"gamma": 3}}, "speculative.gamma"),
    ({"speculative": {"pipeline": "groups"}}, "speculative.pipeline"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 4, "max_tokens": 3}, "min_tokens"),
    ({"min_tokens": 256}, "min_tokens"),
    ({"min_tokens": 10**400}, "min_tokens"),
    ({"bad_words": [""]}, "bad_words"),
    ({"bad_words": ["x"] * 65}, "bad_words"),
    ({"bad_words": ["x" * 257]}, "bad_words"),
    ({"bad_words": ["half \ud83d"]}, "bad_words"),
    ({"bad_words": {"x": 1}}, "bad_words"),
    ({"return_token_ids": True}, "return_token_ids"),
    ({"include_stop_str_in_output": True}, "include_stop_str_in_output"),
    ({"stream": True, "stream_options": {"continuous_usage_stats": True}},
     "stream_options.continuous_usage_stats"),
    ({"guided_json": {}}, "guided_json"),
    ({"model": 5}, "model"),
]  # fmt: skip

CHAT_ONLY = [
    ({"messages": {}}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "color": 1}]}, "messages[0].color"),
    ({"messages": [{"role": "user", "content": "x", "type": "image_url"}]}, "messages[0].type"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),  # refused by the template
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 10**9}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"echo": True}, "echo"),
    ({"best_of": 2}, "best_of"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"prompt": "x"}, "prompt"),
]

TEXT_ONLY = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": [[5], []]}, "prompt"),
    ({"prompt": ["a"] * 129}, "prompt"),
    ({"prompt": ["a"] * 128, "n": 3}, "n"),
    ({"prompt": ["a"] * 128, "best_of": 3}, "best_of"),
    ({"prompt": ["a", [5]]}, "prompt"),
    ({"prompt": [[5], 5]}, "prompt"),
    ({"prompt": [5, "a"]}, "prompt"),
    ({"prompt": ["a", 5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [[[5]]]}, "prompt"),
    ({"prompt": [5.0]}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": [VOCAB_SIZE]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [2**31]}, "prompt"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"max_tokens": -1, "echo": True}, "max_tokens"),
    ({"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"),
    ({"best_of": 10**6}, "best_of"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"suffix": "end"}, "suffix"),
    ({"messages": []}, "messages"),
]

WRONG = [
    *[(path, {**body, **fields}, param) for path, body in ROUTES for fields, param in BOTH],
    *[("/v1/chat/completions", {**CHAT, **fields}, param) for fields, param in CHAT_ONLY],
    *[("/v1/completions", {**TEXT, **fields}, param) for fields, param in TEXT_ONLY],
    ("/v1/chat/completions", {}, "messages"),
    ("/v1/completions", {}, "prompt"),
]


async def test_wrong_fields_get_400_naming_the_field_streamed_or_not():
    backend = ScriptedBackend(COLOURS)
    async with serving_backend(backend) as url, httpx.AsyncClient() as client:
        for path, body, param in WRONG:
            for stream in [None] if "stream" in body or "stream_options" in body else [None, True]:
                content = json.dumps({**body, "stream": stream} if stream else body)
                response = await client.post(
                    url + path, content=content, headers={"Content-Type": "application/json"}
                )
                error = error_of(response)
                assert (response.status_code, error["param"]) == (400, param), (body, error)
                assert error["type"] == "invalid_request_error"
                assert param.split("[")[0].split(".")[-1] in error["message"]
        assert backend.requests == []
        assert (await client.post(url + "/v1/completions", json=TEXT)).status_code == 200  # still alive


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b'{"prompt": "x", "temperature": NaN%s}', 400),
        (b'{"prompt": "x", "top_p": Infinity%s}', 400),
        (b'{"prompt": "x", "top_p": 1e999%s}', 400),
        (b'{"prompt": "x"%s', 400),
        (b'{"prompt": "\xff"%s}', 400),
        (b'{"prompt": "half \\ud83d"%s}', 400),
        (b'{"prompt": "x", "stop": "half \\ud83d"%s}', 400),
        (b'{"prompt": "x", "half \\ud83d": 1%s}', 400),
        (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"%s}", 400),
        (b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"%s}", 400),
        (b'["prompt"]', 400),
        (b'"prompt"', 400),
        (b"null", 400),
        (b"", 400),
        (b'{"prompt": "paired \\ud83d\\ude00 and \\u0000"%s}', 200),
    ],
)
async def test_odd_bodies(content, status, stream):
    content = content.replace(b"%s", b', "stream": true' if stream else b"")
    async with serving_backend(ScriptedBackend(COLOURS)) as url:
        response = await post(
            url, "/v1/completions", content=content, headers={"Content-Type": "application/json"}
        )
        assert response.status_code == status, response.text
        if status != 200:
            assert error_of(response)["type"] == "invalid_request_error"
        assert (await post(url, "/v1/completions", TEXT)).status_code == 200  # still alive


async def test_nan_is_refused_by_name():
    async with serving_backend(ScriptedBackend(COLOURS)) as url:
        response = await post(
            url, "/v1/completions", content='{"prompt": "x", "top_p": NaN}',
            headers={"Content-Type": "application/json"},
        )  # fmt: skip
    assert error_of(response)["param"] == "top_p"


@pytest.mark.parametrize(
    "headers", [{"Content-Type": "application/x-www-form-urlencoded"}, {"Content-Type": "text/plain"}, {}]
)
async def test_a_body_not_declared_json_gets_415(headers):
    async with serving_backend(ScriptedBackend(COLOURS)) as url:
        response = await post(url, "/v1/completions", content=b'{"prompt": "x"}', headers=headers)
    assert response.status_code == 415
    assert error_of(response)["code"] == "unsupported_media_type"


@pytest.mark.parametrize("size", [1001, 3000, 20_000])
@pytest.mark.parametrize("is_chunked", [True, False])
async def test_a_body_over_the_limit_gets_413(size, is_chunked):
    async def pieces():
        for _ in range(size // 500):
            yield b"x" * 500
        yield b"x" * (size % 500)

    content = pieces() if is_chunked else b"x" * size
    async with serving_backend(ScriptedBackend(COLOURS), max_body_bytes=1000) as url:
        response = await post(url, "/v1/completions", content=content)
        assert response.status_code == 413
        assert "1000 bytes" in error_of(response)["message"]
        assert (await post(url, "/v1/completions", TEXT)).status_code == 200  # still alive


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("POST", "/v1/v1/chat/completions", 404),
        ("POST", "/v1/chat/completions/", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
        ("GET", "/v1/models/", 404),
    ],
)
async def test_unknown_paths_and_methods_get_the_envelope(method, path, status):
    async with serving_backend(ScriptedBackend(COLOURS)) as url, httpx.AsyncClient() as client:
        response = await client.request(method, url + path)
    assert response.status_code == status
    assert error_of(response)["type"] == "invalid_request_error"


async def test_unknown_model():
    async with serving_backend(ScriptedBackend(COLOURS)) as url:
        for path, body in ROUTES:
            response = await post(url, path, {**body, "model": "no-such"})
            assert response.status_code == 404
            assert (error_of(response)["code"], error_of(response)["param"]) == ("model_not_found", "model")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fields", [{"prompt": [5] * 300}, {"prompt": [5] * 256}, {"prompt": [5], "max_tokens": 256}]
)
async def test_too_long_is_400_before_any_byte_of_a_stream(stream, fields):
    async with serving_backend(ScriptedBackend(COLOURS)) as url:
        response = await post(url, "/v1/completions", {**fields, "stream": stream})
    error = error_of(response)
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["type"] == "invalid_request_error"
    assert str(len(fields["prompt"])) in error["message"]
    assert "256" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (TooManyRequests("the queue is full"), 429, "rate_limit_error"),
        (ServiceUnavailable("no target"), 503, "service_unavailable"),
        (InvariantViolation("secret detail"), 500, "server_error"),
    ],
)
async def test_errors_before_the_first_token_are_statuses(stream, error, status, kind):
    async with serving_backend(ScriptedBackend(COLOURS, error=error)) as url:
        response = await post(url, "/v1/completions", {**TEXT, "stream": stream})
    assert response.status_code == status
    assert error_of(response)["type"] == kind
    assert response.headers.get("retry-after") == ("1" if status in (429, 503) else None)
    assert "secret" not in response.text


async def test_an_unexpected_exception_is_a_plain_500():
    class BrokenBackend(ScriptedBackend):
        def generate(self, request):
            raise ZeroDivisionError("secret detail")

    async with serving_backend(BrokenBackend()) as url:
        response = await post(url, "/v1/completions", TEXT)
    assert response.status_code == 500
    assert error_of(response)["message"] == "internal error"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (GenerationFailed("the target was lost"), "the target was lost"),
        (ValueError("secret"), "internal error"),
    ],
)
async def test_an_error_in_mid_stream_is_one_frame_and_the_end(error, message):
    async with serving_backend(ScriptedBackend(COLOURS, error=error, error_after=3)) as url:
        response = await post(url, "/v1/completions", {**TEXT, "stream": True})
    frames = response.content.decode().split("\n\n")
    assert frames.pop() == ""
    assert response.status_code == 200
    assert json.loads(frames.pop().removeprefix("data: "))["error"]["message"] == message
    assert "".join(text_of(json.loads(frame[6:])["choices"][0]) for frame in frames) == "red"


async def test_deadline():
    async with serving_backend(ScriptedBackend(COLOURS, block_after=0), request_timeout_s=0.1) as url:
        response = await post(url, "/v1/completions", TEXT)
    assert (response.status_code, error_of(response)["code"]) == (504, "deadline_exceeded")


# Other endpoints


async def test_models():
    async with serving_backend(ScriptedBackend(COLOURS)) as url:
        card = {"id": MODEL_NAME, "object": "model", "created": 1_700_000_000, "owned_by": "specdec"}
        assert (await get(url, "/v1/models")).json() == {"object": "list", "data": [card]}
        assert (await get(url, f"/v1/models/{MODEL_NAME}")).json() == card  # its id holds a slash
        response = await get(url, "/v1/models/no-such")
    assert response.status_code == 404
    assert error_of(response)["code"] == "model_not_found"


async def test_health_follows_readiness():
    backend = ScriptedBackend(COLOURS, is_open=False)
    async with serving_backend(backend) as url:
        for path in ("/health", "/v1/models"):
            response = await get(url, path)
            assert response.status_code == 503
            assert error_of(response)["code"] == "service_unavailable"
            assert response.headers["retry-after"] == "1"
        backend.is_open = True
        assert (await get(url, "/health")).status_code == 200
        assert (await get(url, "/v1/models")).status_code == 200


async def test_version():
    async with serving_backend(ScriptedBackend()) as url:
        assert (await get(url, "/version")).json() == {"version": specdec.__version__}


async def test_before_there_is_a_service_everything_is_unavailable():
    async with serving(build_http_app(lambda: None)) as url:
        for response in (await get(url, "/health"), await post(url, "/v1/completions", TEXT)):
            assert response.status_code == 503
            assert error_of(response)["type"] == "service_unavailable"


# Clients that leave


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("block_after", [3, 10_000])
async def test_disconnect_in_mid_stream_closes_the_backend(path, body, block_after):
    backend = ScriptedBackend(byte_ids_of("ab"), block_after=block_after, delay_s=0.001)
    async with serving_backend(backend, max_context=100_000) as url, httpx.AsyncClient() as client:
        async with client.stream("POST", url + path, json={**body, "stream": True}) as response:
            async for line in response.aiter_lines():
                if "a" in line:
                    break
            assert backend.num_running == 1
        await eventually(lambda: backend.num_running == 0)
    assert backend.num_closed == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_disconnect_before_the_first_token_closes_the_backend(stream):
    backend = ScriptedBackend(COLOURS, block_after=0)
    async with serving_backend(backend) as url:
        call = asyncio.create_task(post(url, "/v1/completions", {**TEXT, "stream": stream}))
        await eventually(lambda: backend.num_running == 1)
        call.cancel()
        await eventually(lambda: backend.num_running == 0)
    assert backend.num_closed == 1


async def test_a_client_that_does_not_read_is_dropped_at_the_deadline():
    backend = ScriptedBackend(byte_ids_of("x"), chunk_sizes=(1000,))
    async with serving_backend(backend, max_context=10**7, request_timeout_s=0.3) as url:
        _, port = url.rsplit(":", 1)
        _, writer = await asyncio.open_connection("127.0.0.1", int(port), limit=1)
        body = json.dumps({**TEXT, "stream": True})
        head = ("POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json")
        writer.write("\r\n".join([*head, f"Content-Length: {len(body)}", "", body]).encode())
        await eventually(lambda: backend.num_running == 1)
        await eventually(lambda: backend.num_running == 0, timeout_s=2.0)
        writer.close()


async def test_many_streams_some_dropped_leave_the_others_right():
    backend = ScriptedBackend(COLOURS, delay_s=0.002)

    async def read(client, url, num_lines):
        text = ""
        async with client.stream("POST", url + "/v1/completions", json={**TEXT, "stream": True}) as response:
            lines = 0
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    text += text_of(json.loads(line[6:])["choices"][0])
                lines += 1
                if lines == num_lines:
                    break
        return text

    async with serving_backend(backend) as url, httpx.AsyncClient(limits=httpx.Limits()) as client:
        texts = await asyncio.gather(*(read(client, url, 6 if idx % 2 else None) for idx in range(40)))
        await eventually(lambda: backend.num_running == 0)
    assert set(texts[::2]) == {"red green blue"}
    assert all("red green blue".startswith(text) for text in texts)


# The official client


def async_client(url) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url + "/v1", api_key="any", max_retries=0)


async def test_openai_client_async():
    backend = ScriptedBackend(COLOURS, chunk_sizes=(2,))
    async with serving_backend(backend) as url, async_client(url) as client:
        chat = await client.chat.completions.create(model=MODEL_NAME, messages=CHAT["messages"])
        assert chat.choices[0].message.content == "red green blue"
        again = [*CHAT["messages"], chat.choices[0].message, {"role": "user", "content": "go on"}]
        stream = await client.chat.completions.create(
            model=MODEL_NAME, messages=again, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "red green blue"
        assert chunks[-1].usage.completion_tokens == len(COLOURS)
        assert [model.id async for model in client.models.list()] == [MODEL_NAME]
        assert (await client.models.retrieve(MODEL_NAME)).id == MODEL_NAME
        with pytest.raises(openai.NotFoundError) as caught:
            await client.completions.create(model="no-such", prompt="x")
        assert caught.value.code == "model_not_found"


async def test_openai_client_sync():
    def use(url):
        with openai.OpenAI(base_url=url + "/v1", api_key="any", max_retries=0) as client:
            done = client.completions.create(
                model=MODEL_NAME, prompt="one", extra_body={"speculative": {"metrics": True}}
            )
            assert done.choices[0].text == "red green blue"
            assert done.metrics["speculative_decoding"]["num_draft_tokens"] > 0
            with client.completions.create(model=MODEL_NAME, prompt="one", stream=True) as stream:
                assert "".join(chunk.choices[0].text for chunk in stream) == "red green blue"
            with pytest.raises(openai.BadRequestError) as caught:
                client.completions.create(model=MODEL_NAME, prompt="one", temperature=9)
            assert caught.value.param == "temperature"

    async with serving_backend(ScriptedBackend(COLOURS)) as url:
        await in_thread(lambda: use(url))


async def test_openai_client_raises_on_an_error_in_mid_stream():
    backend = ScriptedBackend(COLOURS, error=GenerationFailed("the target was lost"), error_after=2)
    async with serving_backend(backend) as url, async_client(url) as client:
        stream = await client.completions.create(model=MODEL_NAME, prompt="one", stream=True)
        with pytest.raises(openai.APIError, match="the target was lost"):
            async for _ in stream:
                pass
