"""The whole door on a real server, through Ray Serve's proxy: TLS, keys, browsers, metrics, a short fuzz."""

from __future__ import annotations

import json
import re
import ssl
import subprocess
import time
from pathlib import Path

import grpc
import httpx
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from hypothesis import HealthCheck, Phase, given, settings
from prometheus_client.parser import text_string_to_metric_families

from specdec.client import Client
from specdec.errors import Unauthenticated
from tests.e2e.harness import Server, descendants, wait_for
from tests.fuzz.bodies import BODIES
from tests.fuzz.scale import num_cases

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

FILE = Path(__file__).parents[2] / "deployments" / "simulated.yaml"
ARGS = yaml.safe_load(FILE.read_text(encoding="utf-8"))["applications"][0]["args"]
KEY = "sk-door-test-secret"
ORIGIN = "https://app.example.com"
PROMPT = "w5 w17 w3"
DRAFTED = {"metrics": True}
OPEN = ["/health", "/version", "/openapi.json"]
GUARDED = ["/status", "/metrics", "/tokenizer_info", "/v1/models", "/v1/models/x", "/no-such-path"]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=localhost"
    names = "-addext subjectAltName=DNS:localhost,IP:127.0.0.1"
    subprocess.run(
        [*make.split(), *names.split(), "-keyout", str(key), "-out", str(cert)],
        check=True,
        capture_output=True,
    )
    return cert, key


@pytest.fixture(scope="module")
def server(tmp_path_factory, certificate):
    cert, key = certificate
    gateway = {**ARGS["gateway"], "cors_origins": [ORIGIN], "grpc_reflection": True}
    server = Server(
        tmp_path_factory.mktemp("door"),
        # Small, so that an answer without max_tokens ends soon.
        {
            **ARGS,
            "gateway": gateway,
            "simulation": {**ARGS["simulation"], "max_context": 256},
            # By measurement, next to nothing may be drafted for a short answer.
            "speculation": {"num_speculative_tokens": 3},
        },
        flags=["--tls-cert", str(cert), "--tls-key", str(key)],
        environment={"SPECDEC_API_KEYS": f"{KEY},another"},
    )
    server.url = server.url.replace("http://", "https://")
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


@pytest.fixture
def http(server, certificate):
    headers = {"Authorization": f"bearer {KEY}"}
    with httpx.Client(
        base_url=server.url,
        verify=ssl.create_default_context(cafile=certificate[0]),
        headers=headers,
        timeout=60,
    ) as client:
        yield client


@pytest.fixture
def channel(server, certificate):
    credentials = grpc.ssl_channel_credentials(certificate[0].read_bytes())
    with grpc.secure_channel(server.grpc_address, credentials) as channel:
        yield channel


def samples(http) -> dict[str, float]:
    """Sums over the series of each name."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            protocol = sample.labels.get("protocol")
            name = f"{sample.name} {protocol}" if protocol else sample.name
            found[name] = found.get(name, 0.0) + sample.value
    return found


def test_only_tls_is_spoken(server):
    with pytest.raises(httpx.HTTPError):
        httpx.get(server.url.replace("https://", "http://") + "/health", timeout=5)
    with grpc.insecure_channel(server.grpc_address) as channel, pytest.raises(grpc.RpcError) as caught:
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_keys_guard_everything_but_the_open_list(http, channel):
    for path in OPEN:
        assert http.get(path, headers={"Authorization": ""}).status_code == 200, path
    for path in GUARDED:
        refused = http.get(path, headers={"Authorization": "Bearer sk-wrong"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        assert http.get(path).status_code in (200, 404), path
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        assert http.post(path, json={}, headers={"Authorization": ""}).status_code == 401
        assert http.post(path, json={}).status_code == 400
    health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
    assert health.status == health_pb2.HealthCheckResponse.SERVING
    reflect = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    with pytest.raises(grpc.RpcError) as caught:
        next(reflect(iter([asked]), timeout=20))
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    answer = next(reflect(iter([asked]), timeout=20, metadata=(("authorization", "Bearer another"),)))
    assert len(answer.list_services_response.service) >= 2


def test_the_client_speaks_both_protocols_over_tls_and_gets_one_text(server, certificate):
    texts = set()
    for url in (server.url, f"grpcs://{server.grpc_address}"):
        with Client(url, api_key=KEY, ca_file=certificate[0], timeout_s=60) as client:
            answer = client.complete(PROMPT, max_tokens=40, temperature=0.0, speculative=DRAFTED)
            pieces = list(client.stream(PROMPT, max_tokens=40, temperature=0.0))
            assert "".join(piece.text for piece in pieces) == answer.text
            assert answer.speculation.num_draft_tokens > 0
            texts.add(answer.text)
        stranger = Client(url, api_key="sk-wrong", ca_file=certificate[0])
        with stranger, pytest.raises(Unauthenticated):
            stranger.complete(PROMPT)
    assert len(texts) == 1


def test_a_browser_is_answered_through_the_proxy(http):
    asked = {
        "Origin": ORIGIN,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    preflight = http.options("/v1/chat/completions", headers={**asked, "Authorization": ""})
    assert preflight.status_code in (200, 204)
    assert preflight.headers["access-control-allow-origin"] == ORIGIN


def test_head_and_wrong_methods_through_the_proxy(http):
    head = http.head("/v1/models")
    assert (head.status_code, head.content) == (200, b"")
    for method, path, status in (("GET", "/v1/completions", 405), ("POST", "/v1/v1/completions", 404)):
        answer = http.request(method, path, json={})
        assert (answer.status_code, set(answer.json())) == (status, {"error"})


def test_token_ids_there_and_back(http):
    answer = http.post("/tokenize", json={"prompt": PROMPT, "add_special_tokens": False}).json()
    assert answer["count"] == len(answer["tokens"]) == 3
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": PROMPT}
    info = http.get("/tokenizer_info").json()
    assert (info["vocab_size"], info["max_model_len"], info["eos_token"]) == (1000, 256, None)


def test_acceptance_is_counted_and_counters_only_grow(http):
    body = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "speculative": DRAFTED}
    before = samples(http)
    assert http.post("/v1/completions", json=body).status_code == 200
    wait_for(
        lambda: samples(http)["specdec_draft_tokens_total"] > before.get("specdec_draft_tokens_total", 0),
        10,
        "the gateway's poll",
    )
    after = samples(http)
    assert 0 < after["specdec_accepted_draft_tokens_total"] <= after["specdec_draft_tokens_total"]
    counters = [name for name in before if "_total" in name or "_count" in name or "_bucket" in name]
    assert len(counters) > 10
    assert all(after[name] >= before[name] for name in counters)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_stream_of_seconds_is_measured_to_its_end(http, server, certificate, protocol):
    before = samples(http)
    url = server.url if protocol == "http" else f"grpcs://{server.grpc_address}"
    started_s = time.monotonic()
    with Client(url, api_key=KEY, ca_file=certificate[0]) as client:
        # Plain decoding at 16 ms a token.
        options = {"max_tokens": 200, "temperature": 0.0, "speculative": {"num_speculative_tokens": 0}}
        list(client.stream(PROMPT, **options))
    took_s = time.monotonic() - started_s
    assert took_s >= 3.0
    wait_for(
        lambda: (
            samples(http).get(f"specdec_request_duration_seconds_count {protocol}", 0)
            > before.get(f"specdec_request_duration_seconds_count {protocol}", 0)
        ),
        10,
    )
    after = samples(http)

    def grown(name):
        return after[f"{name} {protocol}"] - before.get(f"{name} {protocol}", 0.0)

    assert 3.0 <= grown("specdec_request_duration_seconds_sum") <= took_s + 0.1
    assert grown("specdec_time_to_first_token_seconds_sum") < took_s / 2
    assert 0.01 < grown("specdec_time_per_output_token_seconds_sum") < took_s / 199


def test_whatever_is_sent_there_is_no_server_error_and_the_server_lives(http):
    statuses = []

    @settings(
        max_examples=num_cases(0.4),
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(request=BODIES)
    def ask(request):
        path, body = request
        headers = {"Content-Type": "application/json"}
        answer = http.post(path, content=json.dumps(body), headers=headers)
        statuses.append(answer.status_code)
        assert answer.status_code in (200, 400, 404, 429), (answer.text, body)

    ask()
    assert len(set(statuses)) >= 2
    answer = http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2, "temperature": 0})
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    assert http.get("/health").status_code == 200


def test_no_log_holds_a_key(server):
    command_lines = [
        (Path("/proc") / str(pid) / "cmdline").read_bytes().decode(errors="replace")
        for pid in descendants(server.process.pid)
    ]
    (session,) = {
        found for line in command_lines for found in re.findall(r"/[\w./-]+/session_\d[\w-]+", line)
    }
    logs = [path for path in Path(session, "logs").rglob("*") if path.is_file()]
    assert any("Gateway" in path.name for path in logs)
    assert [path.name for path in [*logs, server.log_path] if KEY.encode() in path.read_bytes()] == []
