"""What an output must look like: grammars out of requests, and those that cannot be followed."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Literal

import httpx
import jsonschema
import openai
import pydantic
import pytest
from llguidance import LLMatcher

from specdec.errors import InvalidRequest
from specdec.gateway import structured
from specdec.gateway.events import collect
from specdec.gateway.grammar_check import GrammarChecker
from specdec.gateway.grpc_messages import to_client_request
from specdec.gateway.http import build_http_app
from specdec.gateway.proto import generation_pb2 as pb
from specdec.gateway.service import GenerationService
from specdec.models.simulated import simulated_info, simulated_tokenizer
from tests.chat_templates import PLAIN, RandomFollower, service_with, tokenizer_with
from tests.fakes import EOS_ID, ScriptedBackend, byte_ids_of, in_thread, only, serving, toy_config

CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "one"}]})
TEXT = ("/v1/completions", {"prompt": "one"})
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
LARK = 'start: NAME ("," NAME)*\nNAME: /[ab]{1,3}/'


def app_of(backend):
    service = service_with(backend, PLAIN)
    return build_http_app(only(service))


def random_backend(seed=0):
    return ScriptedBackend(script_of=RandomFollower(tokenizer_with(PLAIN), seed=seed), chunk_sizes=(1, 4))


async def post(url, path, body):
    async with httpx.AsyncClient(timeout=30) as client:
        return await client.post(url + path, json=body)


def text_of(response):
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    assert choice["finish_reason"] == "stop"
    return choice["message"]["content"] if "message" in choice else choice["text"]


def is_valid(text, schema):
    jsonschema.validate(json.loads(text), schema)
    return True


def schema_format(schema, **fields):
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **fields}}
    }


ASKS = [
    (schema_format(SCHEMA, strict=True, description="d"), lambda text: is_valid(text, SCHEMA)),
    ({"response_format": {"type": "json_object"}}, lambda text: isinstance(json.loads(text), dict)),
    ({"structured_outputs": {"json": SCHEMA}}, lambda text: is_valid(text, SCHEMA)),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, lambda text: is_valid(text, SCHEMA)),
    ({"structured_outputs": {"json_object": True}}, lambda text: isinstance(json.loads(text), dict)),
    (
        {"structured_outputs": {"regex": r"[ab/]{2}|\d{3}"}},
        lambda text: re.fullmatch(r"[ab/]{2}|\d{3}", text),
    ),
    ({"structured_outputs": {"grammar": LARK}}, lambda text: re.fullmatch("[ab]{1,3}(,[ab]{1,3})*", text)),
    (
        {"structured_outputs": {"choice": ["a", "ab", 'q"\\', "\n"]}},
        lambda text: text in ("a", "ab", 'q"\\', "\n"),
    ),
]


@pytest.mark.parametrize(("fields", "is_right"), ASKS)
async def test_whatever_the_model_writes_the_output_is_as_asked(fields, is_right):
    route, body = TEXT if "structured_outputs" in fields else CHAT
    async with serving(app_of(random_backend())) as url:
        for _ in range(20):
            assert is_right(text_of(await post(url, route, {**body, **fields, "max_tokens": 3000})))


async def test_nothing_asked_for_is_no_grammar():
    backend = ScriptedBackend([*byte_ids_of("red"), EOS_ID])
    async with serving(app_of(backend)) as url:
        for fields in ({}, {"response_format": {"type": "text"}}, {"response_format": None}):
            assert text_of(await post(url, CHAT[0], {**CHAT[1], **fields})) == "red"
    assert {request.sampling.grammar for request in backend.requests} == {""}


class Person(pydantic.BaseModel):
    name: str
    kind: Literal["cat", "dog"]
    age: int | None


@pytest.mark.parametrize("is_beta", [False, True])
async def test_openais_parse_gives_a_pydantic_model(is_beta):
    async with serving(app_of(random_backend())) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
        chat = client.beta.chat if is_beta else client.chat
        answer = await in_thread(
            lambda: chat.completions.parse(
                model="org/toy-model", messages=CHAT[1]["messages"], response_format=Person, max_tokens=3000
            )
        )
    assert isinstance(answer.choices[0].message.parsed, Person)


async def test_openais_streaming_parse_gives_a_pydantic_model():
    async with serving(app_of(random_backend())) as url:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
        async with client.chat.completions.stream(
            model="org/toy-model", messages=CHAT[1]["messages"], response_format=Person, max_tokens=3000
        ) as stream:
            answer = await stream.get_final_completion()
    assert isinstance(answer.choices[0].message.parsed, Person)


DEEP = {"type": "object"}
for _ in range(200):
    DEEP = {"type": "object", "properties": {"a": DEEP}}
CHAINED = "\n".join(["start: r0", *(f"r{idx}: r{idx + 1}" for idx in range(5000)), 'r5000: "a"'])

REFUSED = [
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
    ({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}}, "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
     "response_format.json_schema.schema"),
    (schema_format({"type": "objekt"}), "response_format"),
    (schema_format({"type": "array", "uniqueItems": True}), "response_format"),
    (schema_format({"$ref": "#/nowhere"}), "response_format"),
    (schema_format({"$ref": "https://example.com/schema"}), "response_format"),
    (schema_format({"type": "string", "pattern": "a(?=b)"}), "response_format"),
    (schema_format({"type": "integer", "minimum": 2, "maximum": 1}), "response_format"),
    (schema_format({"type": "string", "description": "x" * 200_000}), "response_format"),
    (schema_format({"type": "string", "const": "\ud83d"}), "response_format"),
    (schema_format(DEEP), "response_format"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a(b"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a"] * 2000}}, "structured_outputs.choice"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json"),
    ({"structured_outputs": {"grammar": "start: nowhere"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"grammar": "begin: /a/"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"grammar": ""}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"grammar": "start: <|no_such_token|>"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"grammar": "start: " + "(" * 50_000}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"grammar": CHAINED}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"backend": "x"}}, "structured_outputs.backend"),
    ({"structured_outputs": {"regex": "a"}, **schema_format(SCHEMA)}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
    ({"structured_outputs": {"regex": "a"}, "min_tokens": 3}, "min_tokens"),
    ({"guided_json": SCHEMA}, "guided_json"),
]  # fmt: skip


async def test_what_cannot_be_followed_is_refused_by_name_and_the_gateway_goes_on():
    backend = ScriptedBackend([*byte_ids_of("red"), EOS_ID])
    async with serving(app_of(backend)) as url, httpx.AsyncClient(timeout=30) as client:
        for fields, param in REFUSED:
            for stream in (False, True):
                # Escaped by hand: the client's own encoder refuses surrogates.
                content = json.dumps({**CHAT[1], **fields, "stream": stream})
                response = await client.post(
                    url + CHAT[0], content=content, headers={"Content-Type": "application/json"}
                )
                assert response.status_code == 400, (fields, response.text)
                error = response.json()["error"]
                assert error["param"] == param, (str(fields)[:200], error)
                assert error["message"]
        assert not backend.requests
        assert text_of(await post(url, *CHAT)) == "red"


async def test_a_tokenizer_that_no_grammar_can_be_followed_with_is_told():
    backend = ScriptedBackend([1])
    info = simulated_info(1000, 256)
    service = GenerationService(backend, simulated_tokenizer(1000), toy_config(), info)
    async with serving(build_http_app(only(service))) as url:
        response = await post(url, CHAT[0], {**CHAT[1], "response_format": {"type": "json_object"}})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "response_format"
    assert "no end-of-sequence token" in response.json()["error"]["message"]


# gRPC


@pytest.mark.parametrize(
    ("constraint", "is_right"),
    [
        ({"json_schema": json.dumps(SCHEMA)}, lambda text: is_valid(text, SCHEMA)),
        ({"regex": r"\d{3}"}, lambda text: re.fullmatch("[0-9]{3}", text)),
        ({"grammar": LARK}, lambda text: re.fullmatch("[ab]{1,3}(,[ab]{1,3})*", text)),
        ({"choice": pb.Texts(texts=["a", "ab"])}, lambda text: text in ("a", "ab")),
    ],
)
async def test_grpc_has_the_same(constraint, is_right):
    request = pb.GenerateRequest(text="one", sampling=pb.SamplingOptions(max_tokens=3000, **constraint))
    completion = await collect(
        service_with(random_backend(), PLAIN).generate(to_client_request(request, "r", None))
    )
    assert is_right(completion.choices[0].text)


@pytest.mark.parametrize(
    ("constraint", "param"),
    [
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": '{"type": "nonsense"}'}, "json_schema"),
        ({"regex": "a(b"}, "regex"),
        ({"grammar": ""}, "grammar"),
        ({"choice": pb.Texts()}, "choice"),
    ],
)
async def test_grpc_names_the_field_that_cannot_be_followed(constraint, param):
    request = pb.GenerateRequest(text="one", sampling=pb.SamplingOptions(**constraint))
    with pytest.raises(InvalidRequest) as caught:
        await collect(service_with(random_backend(), PLAIN).generate(to_client_request(request, "r", None)))
    assert caught.value.param == param


# Checking


def lark(text):
    return json.dumps({"grammars": [{"lark_grammar": text}]})


async def test_faults_are_found_and_remembered():
    checker = GrammarChecker()
    assert await checker.fault_of(lark('start: "a"')) == ""
    assert "unclosed group" in await checker.fault_of(lark("start: /a(b/"))
    checker._child.kill()
    checker._child._process.wait()
    assert "unclosed group" in await checker.fault_of(lark("start: /a(b/"))


async def test_a_child_that_somebody_ended_is_replaced_and_no_grammar_blamed():
    checker = GrammarChecker()
    assert await checker.fault_of(lark('start: "a"')) == ""
    checker._child.kill()
    checker._child._process.wait()
    assert await checker.fault_of(lark('start: "b"')) == ""


async def test_a_grammar_that_ends_the_checking_process_ends_nothing_else():
    checker = GrammarChecker()
    assert await checker.fault_of(lark('start: "a"')) == ""
    assert "too complex" in await checker.fault_of(lark(CHAINED))
    assert await checker.fault_of(lark('start: "b"')) == ""


async def test_a_request_that_leaves_ends_its_check_and_the_next_one_is_answered():
    checker = GrammarChecker()
    properties = {f"v{idx}": {"type": "string"} for idx in range(3000)}
    slow = json.dumps({"grammars": [{"json_schema": {"type": "object", "properties": properties}}]})
    check = asyncio.create_task(checker.fault_of(slow))
    await asyncio.sleep(0.15)
    check.cancel()
    await asyncio.wait([check])
    assert await checker.fault_of(lark("start: nowhere")) != ""


async def test_checks_that_come_together_are_answered_each_with_its_own():
    checker = GrammarChecker()
    grammars = [lark(f"start: nowhere{idx}") for idx in range(20)]
    faults = await asyncio.gather(*(checker.fault_of(grammar) for grammar in grammars))
    assert all(f"nowhere{idx}" in fault for idx, fault in enumerate(faults))


def test_whitespace_of_json_has_a_bound():
    def allows(num_spaces):
        matcher = LLMatcher(RandomFollower(tokenizer_with(PLAIN))._tokenizer, grammar, log_level=0)
        return matcher.consume_tokens(byte_ids_of("{" + " " * num_spaces + "}"))

    grammar = json.dumps({"grammars": [json.loads(structured.json_object("x").grammar)]})
    assert allows(24)
    assert not allows(25)


def test_a_constraint_that_is_too_large_is_refused_before_it_is_compiled():
    with pytest.raises(InvalidRequest, match="too large"):
        structured.lark("#" * 200_000, "x")
