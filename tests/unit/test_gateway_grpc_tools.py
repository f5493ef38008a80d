"""Tools over gRPC: the same calls, choices and refusals as over HTTP, and reasoning apart from the answer."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager

import grpc
import httpx
import jsonschema
import pytest
from google.rpc import error_details_pb2, status_pb2

from specdec.gateway.http import build_http_app
from specdec.gateway.proto import generation_pb2 as pb
from specdec.gateway.proto import generation_pb2_grpc as pb_grpc
from tests.chat_templates import (
    CLOCK,
    HERMES,
    LLAMA3,
    PLAIN,
    THINKING,
    WEATHER,
    RandomFollower,
    call_text,
    service_with,
    tokenizer_with,
    tool,
)
from tests.fakes import EOS_ID, ScriptedBackend, byte_ids_of, only, serving
from tests.grpc_calls import channel_to

USER = pb.ChatMessage(role="user", content="one")
SCHEMAS = {each["function"]["name"]: each["function"]["parameters"] for each in (WEATHER, CLOCK)}
TEXT = f"Let me see.\n{call_text('get_weather', {'city': 'Oslo', 'days': 2})}\n{call_text('clock', {})}"


@asynccontextmanager
async def stub_to(backend, template=HERMES):
    async with channel_to(service_with(backend, template)) as channel:
        yield pb_grpc.GenerationServiceStub(channel)


def message_of(spec) -> pb.Tool:
    """An HTTP tool as a message."""
    function = spec["function"]
    parameters = function.get("parameters")
    return pb.Tool(
        name=function["name"],
        description=function.get("description", ""),
        parameters=None if parameters is None else json.dumps(parameters),
        strict=function.get("strict", False),
    )


TOOLS = [message_of(WEATHER), message_of(CLOCK)]


def ask(*messages, tools=TOOLS, choice=None, **fields) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        messages=pb.ChatMessages(messages=messages or [USER]), tools=tools, tool_choice=choice, **fields
    )


def scripted(text, size=3):
    return ScriptedBackend([*byte_ids_of(text), EOS_ID], chunk_sizes=(size,))


def joined(messages):
    """Text, reasoning and calls of a stream, as a client puts them together."""
    calls = {}
    for delta in (delta for message in messages for delta in message.tool_calls):
        if delta.HasField("id"):
            assert delta.index == len(calls)
            calls[delta.index] = pb.ToolCall(id=delta.id, name=delta.name)
        calls[delta.index].arguments += delta.arguments
    return (
        "".join(message.text for message in messages),
        "".join(message.reasoning_content for message in messages),
        [(call.name, call.arguments) for call in calls.values()],
    )


@pytest.mark.parametrize(
    ("text", "answer", "reasoning", "names", "reason"),
    [
        (TEXT, "Let me see.", "", ["get_weather", "clock"], pb.FINISH_REASON_TOOL_CALLS),
        (f"<think>\nhm\n</think>\n\n{TEXT}", "Let me see.", "hm", ["get_weather", "clock"],
         pb.FINISH_REASON_TOOL_CALLS),
        ("<think>hm</think>red", "red", "hm", [], pb.FINISH_REASON_STOP),
        ("red <tool_call>no</tool_call>", "red <tool_call>no</tool_call>", "", [], pb.FINISH_REASON_STOP),
    ],
)  # fmt: skip
@pytest.mark.parametrize("size", [1, 7])
async def test_whole_and_streamed_calls_text_and_reasoning(text, answer, reasoning, names, reason, size):
    async with stub_to(scripted(text, size), THINKING) as stub:
        whole = await stub.Generate(ask())
        stream = [message async for message in stub.GenerateStream(ask())]
    (choice,) = whole.choices
    assert (choice.text, choice.reasoning_content) == (answer, reasoning)
    assert [call.name for call in choice.tool_calls] == names
    assert len({call.id for call in choice.tool_calls if call.id.startswith("call_")}) == len(names)
    for call in choice.tool_calls:
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    assert (choice.finish_reason, stream[-1].finish_reason) == (reason, reason)
    assert joined(stream) == (answer, reasoning, [(call.name, call.arguments) for call in choice.tool_calls])
    assert [token for message in stream for token in message.token_ids] == list(choice.token_ids)
    assert choice.token_ids[-1] == EOS_ID


async def test_a_text_prompt_is_not_taken_apart():
    async with stub_to(scripted(TEXT)) as stub:
        (choice,) = (await stub.Generate(pb.GenerateRequest(text="one"))).choices
    assert (choice.text, list(choice.tool_calls)) == (TEXT, [])


async def test_a_call_that_the_cap_cuts_off_ends_with_length():
    async with stub_to(scripted(call_text("get_weather", {"city": "Oslo"}))) as stub:
        request = ask(sampling=pb.SamplingOptions(max_tokens=60))
        (choice,) = (await stub.Generate(request)).choices
    assert choice.finish_reason == pb.FINISH_REASON_LENGTH
    assert [call.name for call in choice.tool_calls] == ["get_weather"]


@pytest.mark.parametrize("template", [HERMES, LLAMA3])
@pytest.mark.parametrize(
    ("choice", "is_parallel"),
    [
        (pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_REQUIRED), None),
        (pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_REQUIRED), False),
        (pb.ToolChoice(name="get_weather"), None),
    ],
)
async def test_forced_calls_are_valid_whatever_the_model(template, choice, is_parallel):
    backend = ScriptedBackend(script_of=RandomFollower(tokenizer_with(template)))
    request = ask(
        choice=choice, parallel_tool_calls=is_parallel, sampling=pb.SamplingOptions(max_tokens=3000)
    )
    async with stub_to(backend, template) as stub:
        for _ in range(5):
            (answer,) = (await stub.Generate(request)).choices
            assert (answer.text, answer.finish_reason) == ("", pb.FINISH_REASON_TOOL_CALLS)
            assert len(answer.tool_calls) == 1 if choice.name or is_parallel is False else answer.tool_calls
            for call in answer.tool_calls:
                assert choice.name in ("", call.name)
                jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


def strict(spec):
    return {**spec, "function": {**spec["function"], "strict": True}}


CALL = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
HTTP_HISTORY = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "I need the time."},
    {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
]
HISTORY = [
    USER,
    pb.ChatMessage(
        role="assistant",
        tool_calls=[pb.ToolCall(id="call_1", name="clock", arguments="{}")],
        reasoning_content="I need the time.",
    ),
    pb.ChatMessage(role="tool", tool_call_id="call_1", content="noon"),
]


@pytest.mark.parametrize(
    ("http", "message"),
    [
        ({"tools": [WEATHER, CLOCK]}, ask(*HISTORY)),
        ({"tools": [strict(WEATHER)]}, ask(*HISTORY, tools=[message_of(strict(WEATHER))])),
        (
            {"tools": [WEATHER], "tool_choice": "none"},
            ask(*HISTORY, tools=TOOLS[:1], choice=pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_NONE)),
        ),
        (
            {"tools": [CLOCK], "tool_choice": "auto", "parallel_tool_calls": True},
            ask(
                *HISTORY,
                tools=TOOLS[1:],
                choice=pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_AUTO),
                parallel_tool_calls=True,
            ),
        ),
        (
            {"tools": [WEATHER, CLOCK], "tool_choice": {"type": "function", "function": {"name": "clock"}}},
            ask(*HISTORY, choice=pb.ToolChoice(name="clock")),
        ),
    ],
)
async def test_a_request_is_the_same_over_both_protocols(http, message):
    backend = scripted("x")
    service = service_with(backend, THINKING)
    async with serving(build_http_app(only(service))) as url, httpx.AsyncClient() as client:
        response = await client.post(
            f"{url}/v1/chat/completions", json={"messages": HTTP_HISTORY, **http}, timeout=30
        )
        assert response.status_code == 200, response.text
    async with stub_to(backend, THINKING) as stub:
        await stub.Generate(message)
    over_http, over_grpc = backend.requests
    assert over_grpc.prompt_ids == over_http.prompt_ids
    assert over_grpc.sampling.grammar == over_http.sampling.grammar
    prompt = tokenizer_with(THINKING).decode(over_grpc.prompt_ids)
    assert "<think>\nI need the time.\n</think>" in prompt
    assert '"name": "clock", "arguments": {}' in prompt
    assert "noon" in prompt


def odd(name, **function):
    return message_of(tool(name, {"x": {"type": "nonsense"}}, **function))


REQUIRED = pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_REQUIRED)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (ask(tools=[*TOOLS, TOOLS[0]]), "tools"),
        (ask(tools=[TOOLS[0], pb.Tool(name="a b")]), "tools[1].name"),
        (ask(tools=[pb.Tool()]), "tools[0].name"),
        (ask(tools=[pb.Tool(name=f"f{idx}") for idx in range(129)]), "tools"),
        (ask(tools=[pb.Tool(name="f", parameters="{")]), "tools[0].parameters"),
        (ask(tools=[pb.Tool(name="f", parameters="")]), "tools[0].parameters"),
        (ask(tools=[pb.Tool(name="f", parameters="[]")]), "tools[0].parameters"),
        (ask(tools=[pb.Tool(name="f", parameters="[" * 10_000)]), "tools[0].parameters"),
        (ask(tools=[pb.Tool(name="f", parameters='{"type": "array"}')]), "tools[0].parameters"),
        (ask(tools=[TOOLS[0], odd("f")], choice=REQUIRED), "tools[1].parameters"),
        (ask(tools=[odd("f"), odd("g", strict=True)]), "tools[1].parameters"),
        (ask(tools=[], choice=REQUIRED), "tool_choice"),
        (ask(choice=pb.ToolChoice(name="unknown")), "tool_choice"),
        (ask(choice=pb.ToolChoice(name="")), "tool_choice"),
        (ask(choice=pb.ToolChoice(mode=77)), "tool_choice.mode"),
        (ask(choice=REQUIRED, sampling=pb.SamplingOptions(ignore_eos=True)), "ignore_eos"),
        (pb.GenerateRequest(text="one", tools=TOOLS), "tools"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]), tools=TOOLS), "tools"),
        (pb.GenerateRequest(text="one", tool_choice=REQUIRED), "tool_choice"),
    ],
)
async def test_malformed_tools_are_invalid_argument_naming_the_field(request_, field):
    backend = scripted("x")
    async with stub_to(backend) as stub:
        for call in (stub.Generate(request_), stub.GenerateStream(request_)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call if isinstance(call, grpc.aio.UnaryUnaryCall) else [each async for each in call]
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT, caught.value.details()
            metadata = dict(caught.value.trailing_metadata())
            assert metadata["specdec-error-param"] == field
            bad_request = error_details_pb2.BadRequest()
            status = status_pb2.Status.FromString(metadata["grpc-status-details-bin"])
            assert status.details[0].Unpack(bad_request)
            assert [violation.field for violation in bad_request.field_violations] == [field]
    assert not backend.requests


async def test_a_template_that_ignores_tools_is_refused():
    async with stub_to(scripted("x"), PLAIN) as stub:
        with pytest.raises(grpc.aio.AioRpcError, match="template takes none"):
            await stub.Generate(ask())
