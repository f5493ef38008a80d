"""What a client is told when there is too much, and how many requests one key may have."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, asynccontextmanager

import grpc
import httpx
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from specdec.errors import ConfigError, ServiceUnavailable, TooManyRequests
from specdec.gateway.grpc_server import start_grpc_server
from specdec.gateway.http import build_http_app
from specdec.gateway.keys import ApiKeys
from specdec.gateway.limits import ClientLimits
from specdec.gateway.models import ServedModels
from specdec.gateway.proto import generation_pb2 as pb
from specdec.gateway.proto import generation_pb2_grpc as pb_grpc
from tests.fakes import ScriptedBackend, eventually, only, serving, token_ids_of, toy_service

COLOURS = token_ids_of("red green blue")
BODY = {"prompt": "x", "max_tokens": len(COLOURS)}
FULL = TooManyRequests("the queue is full", retry_after_s=7.2)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def keys_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text("first-key\nsecond-key\n")
    return str(path)


@asynccontextmanager
async def both_doors(backend, **gateway):
    service = toy_service(backend, **gateway)
    server = await start_grpc_server(ServedModels(service), service.config.gateway, service.is_ready)
    async with (
        serving(build_http_app(only(service))) as url,
        httpx.AsyncClient(base_url=url, timeout=10) as client,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        yield client, pb_grpc.GenerationServiceStub(channel)
    await server.stop()


def ask() -> pb.GenerateRequest:
    return pb.GenerateRequest(text="x", sampling=pb.SamplingOptions(max_tokens=len(COLOURS)))


async def grpc_error(call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


def retry_delay_s(error: grpc.aio.AioRpcError) -> float:
    (detail,) = rpc_status.from_call(error).details
    info = error_details_pb2.RetryInfo()
    assert detail.Unpack(info)
    return info.retry_delay.ToMilliseconds() / 1000


@pytest.mark.parametrize("stream", [False, True])
async def test_http_says_when_to_try_again_in_whole_seconds(stream):
    async with both_doors(ScriptedBackend(COLOURS, error=FULL)) as (client, _):
        response = await client.post("/v1/completions", json={**BODY, "stream": stream})
    assert response.status_code == 429
    assert response.headers["retry-after"] == "8"
    assert response.json()["error"]["code"] == "rate_limit_exceeded"


@pytest.mark.parametrize(
    ("error", "code", "delay_s"),
    [(FULL, "RESOURCE_EXHAUSTED", 7.2), (ServiceUnavailable("no target"), "UNAVAILABLE", 1.0)],
)
async def test_grpc_says_when_to_try_again_in_both_usual_ways(error, code, delay_s):
    async with both_doors(ScriptedBackend(COLOURS, error=error)) as (_, stub):
        caught = await grpc_error(stub.Generate(ask()))
    assert caught.code().name == code
    assert retry_delay_s(caught) == delay_s
    assert dict(caught.trailing_metadata())["grpc-retry-pushback-ms"] == str(round(delay_s * 1000))


def test_a_clients_name_tells_keys_apart_and_is_not_the_key(keys_file):
    keys = ApiKeys.load(keys_file)
    names = {keys.check(f"Bearer {key}") for key in ("first-key", "second-key", " first-key ")}
    assert len(names) == 2
    assert not any("key" in name for name in names)
    assert ApiKeys().check("Bearer anything") == ""


async def test_the_clients_name_goes_with_the_request_through_both_doors(keys_file):
    backend = ScriptedBackend(COLOURS)
    header = {"Authorization": "Bearer second-key"}
    async with both_doors(backend, api_keys_file=keys_file) as (client, stub):
        assert (await client.post("/v1/completions", json=BODY, headers=header)).status_code == 200
        await stub.Generate(ask(), metadata=[("authorization", "Bearer second-key")])
    name = ApiKeys.load(keys_file).check("Bearer second-key")
    assert [request.client for request in backend.requests] == [name, name]


async def test_a_key_has_so_many_requests_at_a_time_and_others_are_not_affected(keys_file):
    backend = ScriptedBackend(COLOURS, block_after=1)
    first, second = ({"Authorization": f"Bearer {key}"} for key in ("first-key", "second-key"))
    async with both_doors(backend, api_keys_file=keys_file, max_requests_per_key=2) as (client, stub):
        held = [
            asyncio.create_task(client.post("/v1/completions", json=BODY, headers=first)) for _ in range(2)
        ]
        await eventually(lambda: backend.num_running == 2)
        refused = await client.post("/v1/completions", json=BODY, headers=first)
        assert refused.status_code == 429
        assert "2 requests with this API key" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1
        over_grpc = await grpc_error(stub.Generate(ask(), metadata=[("authorization", "Bearer first-key")]))
        assert over_grpc.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        backend.block_after = None
        assert (await client.post("/v1/completions", json=BODY, headers=second)).status_code == 200
        for task in held:
            task.cancel()
        await eventually(lambda: backend.num_running == 0)
        again = await client.post("/v1/completions", json=BODY, headers=first)
        assert again.status_code == 200


def test_counts_return_to_zero_and_the_wait_follows_what_requests_take():
    clock = Clock()
    limits = ClientLimits(2, ApiKeys(["a"]), clock)
    with ExitStack() as running:
        for _ in range(2):
            running.enter_context(limits.request("a"))
        clock.now_s += 20
    with ExitStack() as running:
        for _ in range(2):
            running.enter_context(limits.request("a"))
        with pytest.raises(TooManyRequests) as caught, limits.request("a"):
            pass
        assert caught.value.retry_after_s == 10.0
    assert not limits._num_requests


def test_a_limit_without_keys_is_a_mistake():
    with pytest.raises(ConfigError, match="max_requests_per_key needs API keys"):
        toy_service(ScriptedBackend(COLOURS), max_requests_per_key=2)


def test_without_a_limit_nothing_is_counted():
    limits = ClientLimits(None, ApiKeys())
    with limits.request(""), limits.request(""):
        assert not limits._num_requests
