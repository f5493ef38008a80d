"""`/tokenize`, `/detokenize` and `/tokenizer_info`, as lm-eval's remote tokenizer asks for them."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager

import grpc
import httpx
import pytest
from fastapi.testclient import TestClient

from specdec.gateway.http import build_http_app
from specdec.gateway.proto import generation_pb2 as pb
from specdec.gateway.proto import generation_pb2_grpc as pb_grpc
from tests.fakes import (
    CHAT_TEMPLATE,
    EOS_ID,
    MODEL_NAME,
    VOCAB_SIZE,
    ScriptedBackend,
    only,
    token_ids_of,
    toy_service,
)
from tests.grpc_calls import channel_to

CHAT = [{"role": "user", "content": "one"}]


@pytest.fixture
def client():
    service = toy_service(ScriptedBackend(token_ids_of("red")), max_context=256)
    with TestClient(build_http_app(only(service)), raise_server_exceptions=False) as client:
        yield client


def tokenize(client: httpx.Client, **body) -> httpx.Response:
    return client.post("/tokenize", json=body)


@pytest.mark.parametrize("text", ["one two", "日本 😀\x00", "", " \n", "<|im_end|>"])
@pytest.mark.parametrize("special", [{}, {"add_special_tokens": False}, {"add_special_tokens": None}])
def test_a_text_there_and_back(client, text, special):
    answer = tokenize(client, prompt=text, **special).json()
    assert answer == {
        "tokens": token_ids_of(text),  # this tokenizer adds none by itself
        "count": len(token_ids_of(text)),
        "max_model_len": 256,
    }
    assert client.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": text}


def test_special_tokens_of_the_tokenizer_are_added_unless_refused(client):
    service = client.app.state.get_models().first
    asked = []

    class Recording:
        chat_template = None

        def encode(self, text, *, add_special_tokens):
            asked.append(add_special_tokens)
            return [1]

    service._prompt_encoder._tokenizer = Recording()
    for special in ({}, {"add_special_tokens": True}, {"add_special_tokens": False}):
        tokenize(client, prompt="x", **special)
    assert asked == [True, True, False]


def test_a_conversation_is_encoded_as_a_chat_request_would_be(client):
    backend = ScriptedBackend(token_ids_of("red"))
    service = toy_service(backend)
    with TestClient(build_http_app(only(service))) as other:
        other.post("/v1/chat/completions", json={"messages": CHAT, "max_tokens": 1})
    (request,) = backend.requests
    assert tokenize(client, messages=CHAT).json()["tokens"] == list(request.prompt_ids)


def test_what_a_remote_tokenizer_reads(client):
    info = client.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|im_end|>"
    assert info["bos_token"] is None
    assert info["pad_token"] is None
    assert info["chat_template"] == CHAT_TEMPLATE
    assert info["vocab_size"] == VOCAB_SIZE
    assert info["max_model_len"] == 256
    # It takes the first id of the encoded token for its id.
    eos = tokenize(client, prompt=info["eos_token"], add_special_tokens=False).json()
    assert eos["tokens"] == [EOS_ID]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": CHAT}, 400, "prompt"),
        ("/tokenize", {"prompt": ["x"]}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "surprise": 1}, 400, "surprise"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": CHAT, "add_special_tokens": True}, 400, "add_special_tokens"),
        ("/tokenize", {"messages": [{"role": "nobody", "content": "x"}]}, 400, "messages[0].role"),
        ("/tokenize", {"prompt": "x", "model": "no-such"}, 404, "model"),
        ("/tokenize", {"prompt": "\ud83d"}, 400, "prompt"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "x"}, 400, "tokens"),
        ("/detokenize", {"tokens": [True]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [VOCAB_SIZE]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, 400, "tokens"),
        ("/detokenize", {"tokens": [], "model": "no-such"}, 404, "model"),
    ],
)
def test_what_is_refused(client, path, body, status, param):
    headers = {"Content-Type": "application/json"}
    answer = client.post(path, content=json.dumps(body), headers=headers)  # escapes half an emoji
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param


def test_no_tokens_are_an_empty_text_and_a_name_is_accepted(client):
    assert client.post("/detokenize", json={"tokens": [], "model": MODEL_NAME}).json() == {"prompt": ""}


# gRPC


@asynccontextmanager
async def grpc_stub():
    async with channel_to(toy_service(ScriptedBackend(token_ids_of("red")), max_context=256)) as channel:
        yield pb_grpc.GenerationServiceStub(channel)


async def test_grpc_gives_the_same_token_ids(client):
    messages = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="one")])
    async with grpc_stub() as stub:
        text = await stub.Tokenize(pb.TokenizeRequest(text="one 日本", add_special_tokens=False))
        chat = await stub.Tokenize(pb.TokenizeRequest(messages=messages, model=MODEL_NAME))
        back = await stub.Detokenize(pb.DetokenizeRequest(token_ids=text.token_ids))
    assert list(text.token_ids) == token_ids_of("one 日本")
    assert text.max_context == 256
    assert list(chat.token_ids) == tokenize(client, messages=CHAT).json()["tokens"]
    assert back.text == "one 日本"


@pytest.mark.parametrize(
    ("method", "request_", "code"),
    [
        ("Tokenize", pb.TokenizeRequest(), "INVALID_ARGUMENT"),
        ("Tokenize", pb.TokenizeRequest(text="x", model="no-such"), "NOT_FOUND"),
        (
            "Tokenize",
            pb.TokenizeRequest(
                messages=pb.ChatMessages(messages=[pb.ChatMessage(role="user")]), add_special_tokens=True
            ),
            "INVALID_ARGUMENT",
        ),
        ("Detokenize", pb.DetokenizeRequest(token_ids=[-1]), "INVALID_ARGUMENT"),
        ("Detokenize", pb.DetokenizeRequest(token_ids=[VOCAB_SIZE]), "INVALID_ARGUMENT"),
        ("Detokenize", pb.DetokenizeRequest(model="no-such"), "NOT_FOUND"),
    ],
)
async def test_what_grpc_refuses(method, request_, code):
    async with grpc_stub() as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await getattr(stub, method)(request_)
    assert caught.value.code().name == code
