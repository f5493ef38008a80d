"""Several pairs behind one gateway: a request's model picks one, over HTTP and gRPC alike."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from specdec.client import Client
from specdec.errors import ConfigError
from specdec.gateway.grpc_server import start_grpc_server
from specdec.gateway.http import build_http_app
from specdec.gateway.models import ServedModels
from specdec.gateway.proto import generation_pb2 as pb
from specdec.gateway.proto import generation_pb2_grpc as pb_grpc
from specdec.gateway.service import GenerationService
from specdec.types import ModelInfo
from tests.fakes import (
    EOS_ID,
    MODEL_NAME,
    VOCAB_SIZE,
    ScriptedBackend,
    in_thread,
    serving,
    token_ids_of,
    toy_config,
    toy_service,
    toy_tokenizer,
)
from tests.grpc_calls import failure_of

OTHER, APPLICATION = "org/other", "large"
RED, ONE = token_ids_of("red"), token_ids_of("one")


class Backend(ScriptedBackend):
    """Of a pair with this name; what its coordinator says of itself carries it."""

    def __init__(self, script: Sequence[int], name: str) -> None:
        super().__init__(script)
        self.name = name

    def statuses(self):
        return tuple(
            replace(status, model=self.name, coordinator_id=f"coordinator of {self.name}")
            for status in super().statuses()
        )


def service_of(name: str, script: Sequence[int], first: GenerationService | None = None, max_context=128):
    config = toy_config().model_copy(update={"served_model_name": name})
    info = ModelInfo(max_context=max_context, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({EOS_ID}))
    shared = first.shared if first is not None else None
    return GenerationService(Backend(script, name), toy_tokenizer(), config, info, 1_700_000_000, shared)


@pytest.fixture
def models():
    first = service_of(MODEL_NAME, RED)
    models = ServedModels(first, [APPLICATION])
    models.put(APPLICATION, service_of(OTHER, ONE, first, max_context=64))
    return models


@asynccontextmanager
async def doors(models: ServedModels):
    server = await start_grpc_server(models, models.config, models.is_ready)
    async with (
        serving(build_http_app(lambda: models)) as url,
        httpx.AsyncClient(base_url=url, timeout=10) as client,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        yield client, pb_grpc.GenerationServiceStub(channel)
    await server.stop()


async def over_http(client: httpx.AsyncClient, path: str, **fields) -> httpx.Response:
    asked = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    if "responses" in path:
        return await client.post(path, json={"input": "x", "max_output_tokens": 3, **fields})
    return await client.post(path, json={**asked, "max_tokens": 3, **fields})


def ask(model: str = "") -> pb.GenerateRequest:
    return pb.GenerateRequest(text="x", model=model, sampling=pb.SamplingOptions(max_tokens=3))


@pytest.mark.parametrize(
    ("asked", "answers", "text"),
    [
        ({}, MODEL_NAME, "redredred"),
        ({"model": ""}, MODEL_NAME, "redredred"),
        ({"model": MODEL_NAME}, MODEL_NAME, "redredred"),
        ({"model": OTHER}, OTHER, "oneoneone"),
    ],
)
async def test_the_model_of_a_request_picks_the_pair(models, asked, answers, text):
    async with doors(models) as (client, stub):
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
            whole = (await over_http(client, path, **asked)).json()
            assert whole["model"] == answers
            assert text in json.dumps(whole)
            streamed = await over_http(client, path, stream=True, **asked)
            assert answers in streamed.text
            assert (OTHER if answers == MODEL_NAME else MODEL_NAME) not in streamed.text
        answer = await stub.Generate(ask(**asked))
        assert (answer.model, answer.choices[0].text) == (answers, text)
        pieces = [piece async for piece in stub.GenerateStream(ask(**asked))]
        assert {piece.model for piece in pieces} == {answers}
        assert "".join(piece.text for piece in pieces) == text


async def test_what_describes_a_model_takes_its_name(models):
    async with doors(models) as (client, stub):
        assert [item["id"] for item in (await client.get("/v1/models")).json()["data"]] == [MODEL_NAME, OTHER]
        assert (await client.get(f"/v1/models/{OTHER}")).json()["id"] == OTHER
        assert (await client.get("/tokenizer_info")).json()["model"] == MODEL_NAME
        info = (await client.get("/tokenizer_info", params={"model": OTHER})).json()
        assert (info["model"], info["max_model_len"]) == (OTHER, 64)
        tokens = (await client.post("/tokenize", json={"prompt": "x", "model": OTHER})).json()
        assert tokens["max_model_len"] == 64
        assert (await client.post("/detokenize", json={"tokens": RED, "model": OTHER})).json()[
            "prompt"
        ] == "red"
        assert (await stub.GetModelInfo(pb.GetModelInfoRequest())).model == MODEL_NAME
        described = await stub.GetModelInfo(pb.GetModelInfoRequest(model=OTHER))
        assert (described.model, described.max_context) == (OTHER, 64)
        assert (await stub.Tokenize(pb.TokenizeRequest(text="x", model=OTHER))).max_context == 64
        listed = (await stub.ListModels(pb.ListModelsRequest())).models
        assert [(item.model, item.is_ready) for item in listed] == [(MODEL_NAME, True), (OTHER, True)]


async def test_an_unknown_name_is_not_found_and_the_names_are_told(models):
    async with doors(models) as (client, stub):
        answers = [await over_http(client, "/v1/completions", model="other", stream=s) for s in (False, True)]
        answers += [
            await client.get("/v1/models/other"),
            await client.get("/tokenizer_info", params={"model": "other"}),
            await client.post("/tokenize", json={"prompt": "x", "model": "other"}),
            await client.post("/detokenize", json={"tokens": [], "model": "other"}),
        ]
        for answer in answers:
            assert answer.status_code == 404, answer.text
            error = answer.json()["error"]
            assert (error["code"], error["param"]) == ("model_not_found", "model")
            assert f"{MODEL_NAME!r}, {OTHER!r} are" in error["message"]
        for call in (
            stub.Generate(ask("other")),
            stub.GenerateStream(ask("other")),
            stub.GetModelInfo(pb.GetModelInfoRequest(model="other")),
            stub.Tokenize(pb.TokenizeRequest(text="x", model="other")),
            stub.Detokenize(pb.DetokenizeRequest(model="other")),
        ):
            error = await failure_of(call)
            assert error.code() == grpc.StatusCode.NOT_FOUND
            assert f"{MODEL_NAME!r}, {OTHER!r} are" in error.details()


async def test_while_a_pair_has_not_said_its_name_an_unknown_one_may_be_its(models):
    models = ServedModels(models.first, [APPLICATION])
    async with doors(models) as (client, stub):
        answer = await over_http(client, "/v1/completions", model=OTHER)
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert "the application 'large' has not answered yet" in answer.json()["error"]["message"]
        assert (await failure_of(stub.Generate(ask(OTHER)))).code() == grpc.StatusCode.UNAVAILABLE
        assert (await over_http(client, "/v1/completions")).status_code == 200
        models.withdraw(APPLICATION, "cannot be served: it has no tokenizer", OTHER)
        assert (await client.get("/status")).json()["absent"] == [
            {"application": APPLICATION, "name": OTHER, "reason": "cannot be served: it has no tokenizer"}
        ]
        answer = await over_http(client, "/v1/completions", model=OTHER)
        assert answer.status_code == 503
        assert "'large' cannot be served: it has no tokenizer" in answer.json()["error"]["message"]
        # Its name is known by now, and it is not this one.
        assert (await over_http(client, "/v1/completions", model="other")).status_code == 404


async def test_a_pair_that_has_gone_is_unavailable_under_its_name_alone(models):
    models.withdraw(APPLICATION, "is not deployed")
    async with doors(models) as (client, stub):
        answer = await over_http(client, "/v1/chat/completions", model=OTHER)
        assert answer.status_code == 503
        assert "retry-after" in answer.headers
        assert f"{OTHER!r} is not available now: the application 'large' is not deployed" in answer.text
        assert (await over_http(client, "/v1/completions", model="other")).status_code == 404
        assert (await over_http(client, "/v1/completions", model=MODEL_NAME)).status_code == 200
        assert [item["id"] for item in (await client.get("/v1/models")).json()["data"]] == [MODEL_NAME]
        assert [item.model for item in (await stub.ListModels(pb.ListModelsRequest())).models] == [MODEL_NAME]


async def test_readiness_is_the_first_pairs_and_the_body_names_the_ready_models(models):
    first, other = models.services()
    async with doors(models) as (client, stub):
        health = (await client.get("/health")).json()
        assert health == {"status": "ready", "model": MODEL_NAME, "ready_models": [MODEL_NAME, OTHER]}
        other._backend.is_open = False
        assert (await client.get("/health")).json()["ready_models"] == [MODEL_NAME]
        assert [item["id"] for item in (await client.get("/v1/models")).json()["data"]] == [MODEL_NAME]
        assert (await client.get(f"/v1/models/{OTHER}")).status_code == 503
        listed = (await stub.ListModels(pb.ListModelsRequest())).models
        assert [item.is_ready for item in listed] == [True, False]
        other._backend.is_open, first._backend.is_open = True, False
        assert (await client.get("/health")).status_code == 503
        assert [item["id"] for item in (await client.get("/v1/models")).json()["data"]] == [OTHER]
        assert (await over_http(client, "/v1/completions", model=OTHER)).status_code == 200


async def test_figures_of_pairs_are_not_mixed(models):
    async with doors(models) as (client, stub):
        await over_http(client, "/v1/completions")
        for _ in range(2):
            await stub.Generate(ask(OTHER))
        text = (await client.get("/metrics")).text
        coordinators = (await client.get("/status")).json()["coordinators"]
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    tokens = {
        (sample.labels["protocol"], sample.labels["model"]): sample.value
        for sample in samples
        if sample.name == "specdec_generation_tokens_total"
    }
    assert tokens == {("http", MODEL_NAME): 3, ("grpc", OTHER): 6}
    running = {
        (sample.labels["model"], sample.labels["coordinator"])
        for sample in samples
        if sample.name == "specdec_sequences_running"
    }
    assert running == {(name, f"coordinator of {name}") for name in (MODEL_NAME, OTHER)}
    assert [coordinator["model"] for coordinator in coordinators] == [MODEL_NAME, OTHER]


async def test_a_clients_limit_counts_its_requests_to_all_pairs(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("k\n")
    first = toy_service(ScriptedBackend(RED, block_after=1), api_keys_file=str(keys), max_requests_per_key=1)
    models = ServedModels(first, [APPLICATION])
    models.put(APPLICATION, service_of(OTHER, ONE, first))
    async with doors(models) as (client, _):
        client.headers["Authorization"] = "Bearer k"
        body = {"prompt": "x", "max_tokens": 3, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            assert (await over_http(client, "/v1/completions", model=OTHER)).status_code == 429


async def test_the_client_lists_what_it_may_ask_for(models):
    server = await start_grpc_server(models, models.config, models.is_ready)
    try:
        async with serving(build_http_app(lambda: models)) as url:
            for base_url in (url, f"grpc://127.0.0.1:{server.port}"):

                def asked(base_url: str = base_url) -> tuple[tuple[str, ...], str]:
                    with Client(base_url, timeout_s=10) as client:
                        return client.models(), client.complete("x", model=OTHER, max_tokens=3).text

                assert await in_thread(asked) == ((MODEL_NAME, OTHER), "oneoneone")
    finally:
        await server.stop()


def test_a_second_pair_with_a_taken_name_is_not_served(models):
    first = models.first
    several = ServedModels(first, [APPLICATION, "more"])
    several.put(APPLICATION, service_of(OTHER, ONE, first))
    for name in (MODEL_NAME, OTHER):
        with pytest.raises(ConfigError, match=f"another pair is served as {name!r} already"):
            several.put("more", service_of(name, RED, first))
    assert [service.model_name for service in several.services()] == [MODEL_NAME, OTHER]
    # A pair that is redeployed keeps its own.
    several.put(APPLICATION, service_of(OTHER, RED, first))
