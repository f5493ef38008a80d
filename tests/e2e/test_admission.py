"""A burst at a small deployment: who is refused is told when to come back, who is taken notices nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import yaml
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from specdec.gateway.proto import generation_pb2 as pb
from tests.e2e.harness import Server, wait_for
from tests.fakes import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

FILE = Path(__file__).parents[2] / "deployments" / "simulated.yaml"
NUM_PLACES, NUM_WAITING, NUM_SENT = 2, 8, 20
LIMIT_S = 30.0
NUM_OF_BURST = NUM_PLACES + NUM_WAITING // 2
"""What a lone client gets of it: all places, and half of the queue."""
NUM_TOKENS = 150
"""Plain decoding at 16 ms a token: longer than it takes to send and refuse a burst."""
BODY = {
    "prompt": "w5 w17 w3",
    "max_tokens": NUM_TOKENS,
    "temperature": 0.0,
    "speculative": {"num_speculative_tokens": 0},
}


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}-key"}


class GuardedServer(Server):
    def status(self) -> dict[str, Any]:
        response = httpx.get(f"{self.url}/status", timeout=10, headers=key("operator"))
        (coordinator,) = response.json()["coordinators"]
        return dict(coordinator)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("admission")
    (folder / "keys").write_text("operator-key\nfirst-key\nsecond-key\n")
    args = yaml.safe_load(FILE.read_text(encoding="utf-8"))["applications"][0]["args"]
    args["coordinator"] = {"max_num_seqs": NUM_PLACES, "max_waiting": NUM_WAITING}
    args["gateway"] = {"api_keys_file": str(folder / "keys")}
    server = GuardedServer(folder, args)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


@dataclass
class Burst:
    """What became of many requests with one key, sent at a time."""

    responses: list[httpx.Response]
    num_ended: int = 0
    """Of those taken, so far."""

    def with_status(self, status: int) -> list[httpx.Response]:
        return [response for response in self.responses if response.status_code == status]


async def one(client: httpx.AsyncClient, name: str) -> httpx.Response:
    return await client.post("/v1/completions", json=BODY, headers=key(name))


async def send(client: httpx.AsyncClient, name: str, num: int, burst: Burst) -> None:
    async def request() -> None:
        response = await one(client, name)
        burst.responses.append(response)
        burst.num_ended += response.status_code == 200

    await asyncio.gather(*(request() for _ in range(num)))


async def first_and_then_second(server: Server) -> tuple[Burst, httpx.Response, int]:
    """A burst of the first client; while it is served, one request of the second: its answer, and how many of
    the burst had ended before it."""
    burst = Burst([])
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        sending = asyncio.create_task(send(client, "first", NUM_SENT, burst))
        await eventually(lambda: len(burst.with_status(429)) == NUM_SENT - NUM_OF_BURST, LIMIT_S)
        assert burst.num_ended == 0
        second = await one(client, "second")
        num_before = burst.num_ended
        await sending
    return burst, second, num_before


def test_a_burst_is_cut_to_its_share_and_another_client_waits_for_one_place(server: Server) -> None:
    alone = httpx.post(f"{server.url}/v1/completions", json=BODY, headers=key("operator"), timeout=60)
    assert alone.status_code == 200

    burst, second, num_before = asyncio.run(first_and_then_second(server))
    refused = burst.with_status(429)
    assert (len(burst.with_status(200)), len(refused)) == (NUM_OF_BURST, NUM_SENT - NUM_OF_BURST)
    for response in refused:
        assert response.json()["error"]["code"] == "rate_limit_exceeded"
        assert 1 <= int(response.headers["retry-after"]) <= 60
    texts = {response.json()["choices"][0]["text"] for response in [*burst.with_status(200), second]}
    assert texts == {alone.json()["choices"][0]["text"]}
    assert num_before <= NUM_PLACES + 1, "the second client waited for the first one's queue"
    wait_for(server.is_idle, 10.0, "idle")


def test_who_comes_back_when_told_is_served(server: Server) -> None:
    async def retry() -> tuple[int, httpx.Response]:
        burst = Burst([])
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            sending = asyncio.create_task(send(client, "first", NUM_SENT, burst))
            await eventually(lambda: burst.with_status(429), LIMIT_S)
            advice_s = int(burst.with_status(429)[0].headers["retry-after"])
            await asyncio.sleep(advice_s)
            again = await one(client, "first")
            await sending
        return advice_s, again

    advice_s, again = asyncio.run(retry())
    print(f"told to come back in {advice_s} s")
    assert advice_s > 1  # measured by the burst before: several requests of two seconds each
    assert again.status_code == 200
    wait_for(server.is_idle, 10.0, "idle")


def test_grpc_gets_the_same_advice(server: Server) -> None:
    request = pb.GenerateRequest(
        text="w5",
        sampling=pb.SamplingOptions(max_tokens=NUM_TOKENS, temperature=0.0),
        speculative=pb.SpeculativeOptions(num_speculative_tokens=0),
    )
    metadata = [("authorization", "Bearer first-key")]
    stub = server.stub()
    calls = [stub.Generate.future(request, timeout=60, metadata=metadata) for _ in range(NUM_SENT)]
    errors = [error for call in calls if isinstance(error := call.exception(), grpc.RpcError)]
    assert len(errors) == len(calls) - NUM_OF_BURST
    for error in errors:
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        (detail,) = rpc_status.from_call(error).details
        info = error_details_pb2.RetryInfo()
        assert detail.Unpack(info)
        assert 1.0 <= info.retry_delay.ToMilliseconds() / 1000 <= 60.0
    wait_for(server.is_idle, 10.0, "idle")
