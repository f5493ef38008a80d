"""The default pair over HTTP and gRPC with the clients people use: curl, openai, grpc."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.gateway.proto import generation_pb2 as pb
from tests.e2e.conftest import run_server
from tests.e2e.harness import Server, chat, descendants, ids_of, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

QUESTION = [{"role": "user", "content": "Name the capital of France."}]
"""Its answer has no near tie, which bfloat16 decides one way or the other by CPU."""
METRICS = {"speculative": {"metrics": True, "num_speculative_tokens": 2}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    args = {
        "target": {"model": "smollm2"},
        "draft": {"model": "smollm2-draft"},
        # By measurement, next to nothing may be drafted for a short answer.
        "speculation": {"num_speculative_tokens": 8},
    }
    yield from run_server(tmp_path_factory.mktemp("server"), args)


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=120)


def assert_drafts_were_used(metrics: dict[str, float]) -> None:
    assert metrics["num_draft_tokens"] > 0
    assert metrics["num_accepted_draft_tokens"] > 0
    assert metrics["mean_acceptance_length"] == pytest.approx(
        1 + metrics["num_accepted_draft_tokens"] / metrics["num_spec_steps"]
    )
    assert sum(metrics["acceptance_histogram"]) == metrics["num_spec_steps"]


def test_the_log_of_a_start_is_short_and_readable(server: Server) -> None:
    lines = [line for line in server.log().splitlines() if line.strip()]
    assert len(lines) <= 3, server.log()
    assert "ready" in lines[-1]
    assert f"http://127.0.0.1:{server.http_port}/v1" in lines[-1]
    assert server.grpc_address in lines[-1]


def test_curl_chat(server: Server) -> None:
    body = json.dumps({"model": "smollm2", "messages": QUESTION, "temperature": 0, **METRICS})
    output = subprocess.run(
        f"curl -sS --fail {server.url}/v1/chat/completions -H Content-Type:application/json -d @-".split(),
        input=body,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout
    answer = json.loads(output)
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert_drafts_were_used(answer["metrics"]["speculative_decoding"])


def test_openai_client_whole_and_streamed_agree(client: openai.OpenAI) -> None:
    def call(**more: object):
        return client.chat.completions.create(
            model="smollm2", messages=QUESTION, temperature=0, max_tokens=60, extra_body=METRICS, **more
        )

    whole = call()
    chunks = list(call(stream=True, stream_options={"include_usage": True}))
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert streamed == whole.choices[0].message.content
    assert "Paris" in streamed
    assert chunks[-1].usage == whole.usage
    finish = next(c for c in chunks if c.choices and c.choices[0].finish_reason)
    for answered in (whole, finish):
        assert_drafts_were_used(answered.model_extra["metrics"]["speculative_decoding"])


def test_openai_client_text_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="smollm2", prompt="The capital of France is", temperature=0, max_tokens=8
    )
    assert "Paris" in answer.choices[0].text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 8
    assert [model.id for model in client.models.list()] == ["smollm2"]


def test_first_byte_comes_before_the_last_token(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="smollm2",
        messages=QUESTION,
        stream=True,
        max_tokens=200,
        extra_body={"ignore_eos": True, **METRICS},
    )
    started_s = time.monotonic()
    times_s = [time.monotonic() - started_s for event in stream if event.choices[0].delta.content]
    assert len(times_s) > 20
    # Piece by piece while the tokens are made, not all of them at the end.
    assert times_s[0] < times_s[-1] / 4
    assert times_s[len(times_s) // 2] < times_s[-1] * 0.8


def test_grpc_unary_and_streamed_agree_with_http(server: Server, client: openai.OpenAI) -> None:
    stub = server.stub()
    request = chat(QUESTION[0]["content"], gamma=2)
    whole = stub.Generate(request, timeout=120)
    chunks = list(stub.GenerateStream(request, timeout=120))
    assert "".join(chunk.text for chunk in chunks) == whole.choices[0].text
    assert [i for chunk in chunks for i in chunk.token_ids] == ids_of(whole)
    http = client.chat.completions.create(model="smollm2", messages=QUESTION, temperature=0, max_tokens=64)
    assert http.choices[0].message.content == whole.choices[0].text
    assert http.usage.completion_tokens == whole.usage.completion_tokens
    assert whole.speculative_metrics.num_draft_tokens > 0
    assert whole.speculative_metrics.num_accepted_draft_tokens > 0


def test_grpc_health_and_model_info(server: Server) -> None:
    channel = grpc.insecure_channel(server.grpc_address)
    check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
    assert check.status == health_pb2.HealthCheckResponse.SERVING
    info = server.stub().GetModelInfo(pb.GetModelInfoRequest(), timeout=10)
    assert (info.model, info.draft_model, info.max_context) == ("smollm2", "smollm2-draft", 8192)
    assert info.num_speculative_tokens == 8


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"temperature": -1}, 400, "temperature"),
        ({"top_p": 0}, 400, "top_p"),
        ({"no_such_field": 1}, 400, "no_such_field"),
        ({"speculative": {"num_speculative_tokens": 99}}, 400, "speculative.num_speculative_tokens"),
        ({"model": "no-such"}, 404, "model"),
        ({"messages": []}, 400, "messages"),
        ({"max_tokens": 10**6}, 400, "max_tokens"),
    ],
)
def test_bad_requests_get_the_envelope_and_the_server_lives_on(
    server: Server, change: dict[str, object], status: int, param: str
) -> None:
    body = {"messages": QUESTION, "max_tokens": 4, **change}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=30)
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param
    assert httpx.get(f"{server.url}/health", timeout=30).status_code == 200


def test_a_prompt_longer_than_the_context_is_refused_before_the_stream(server: Server) -> None:
    body = {"prompt": "word " * 9000, "max_tokens": 4, "stream": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_speculation_can_be_switched_off_for_a_request(server: Server) -> None:
    answer = server.stub().Generate(chat(QUESTION[0]["content"], gamma=0), timeout=60)
    assert answer.speculative_metrics.num_draft_tokens == 0
    assert "Paris" in answer.choices[0].text


DASHBOARD_PORTS = range(8265, 8316)
"""Where Ray has it by default, and the ports it tries when that one is taken."""


def sockets_of(pids: set[int]) -> set[str]:
    """Inodes of the sockets that processes have open."""
    inodes: set[str] = set()
    for descriptor in (path for pid in pids for path in Path(f"/proc/{pid}/fd").glob("*")):
        with suppress(FileNotFoundError):  # closed meanwhile
            name = os.readlink(descriptor)
            inodes |= {name[8:-1]} if name.startswith("socket:[") else set()
    return inodes


def test_http_and_grpc_listen_on_loopback_alone_and_there_is_no_dashboard(server: Server) -> None:
    """Ray's other ports and those between workers are open and ask for a token: docs/security.md."""
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    own = sockets_of({server.process.pid, *descendants(server.process.pid)})
    listening = [row[1].split(":") for row in rows if row[3] == "0A" and row[9] in own]
    for port in (server.http_port, server.grpc_port):
        hosts = {host for host, hex_port in listening if int(hex_port, 16) == port}
        # 127.0.0.1, and the same as IPv6 sockets write it.
        assert hosts
        assert hosts <= {"0100007F", "0000000000000000FFFF00000100007F"}
    assert not {int(hex_port, 16) for _, hex_port in listening} & set(DASHBOARD_PORTS)


def test_many_instant_requests_are_all_answered(server: Server) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as http:
        statuses = {http.get(path).status_code for _ in range(500) for path in ("/health", "/v1/models")}
    assert statuses == {200}


def test_the_server_is_idle_afterwards(server: Server) -> None:
    wait_for(server.is_idle, 5, "idle")
