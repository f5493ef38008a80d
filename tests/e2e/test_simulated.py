"""The simulated pair as an operator serves it: two devices in actors of their own, overlapped rounds."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import httpx
import pytest
import yaml

from specdec.gateway.proto import generation_pb2 as pb
from tests.e2e.harness import Server, private_env, specdec_command, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

FILE = Path(__file__).parents[2] / "deployments" / "simulated.yaml"
ARGS = yaml.safe_load(FILE.read_text(encoding="utf-8"))["applications"][0]["args"]
PROMPT = "w5 w17 w3"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("simulated"), ARGS)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


def counters(server: Server) -> dict:
    """The status once the gateway's polls have caught up with what was served."""
    readings = [server.status()["num_output_tokens"]]
    while len(readings) < 3 or len(set(readings[-3:])) > 1:
        time.sleep(0.4)
        readings.append(server.status()["num_output_tokens"])
    return server.status()


def complete(server: Server, **fields) -> str:
    body = {"prompt": PROMPT, "max_tokens": 200, "temperature": 0.0, **fields}
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 7}], ids=["greedy", "coupled"]
)
def test_every_pipeline_gives_the_text_of_plain_decoding(server, sampling):
    plain = complete(server, **sampling, speculative={"num_speculative_tokens": 0})
    assert len(plain.split()) == 200
    before = counters(server)
    for pipeline in ("serial", "lookahead", "auto"):
        assert complete(server, **sampling, speculative={"pipeline": pipeline}) == plain
    after = counters(server)
    assert after["num_accepted_draft_tokens"] > before["num_accepted_draft_tokens"] + 100
    assert after["num_prepared_drafts"] > before["num_prepared_drafts"] + 10


def test_serial_requests_have_nothing_prepared_for_them(server):
    before = counters(server)["num_prepared_drafts"]
    complete(server, speculative={"pipeline": "serial"})
    assert counters(server)["num_prepared_drafts"] == before


def test_pipeline_is_a_field_of_grpc_too(server):
    request = pb.GenerateRequest(
        text=PROMPT,
        sampling=pb.SamplingOptions(max_tokens=100, temperature=0.0),
        speculative=pb.SpeculativeOptions(pipeline=pb.PIPELINE_LOOKAHEAD, metrics=True),
    )
    answer = server.stub().Generate(request, timeout=60)
    assert answer.choices[0].text == complete(
        server, max_tokens=100, speculative={"num_speculative_tokens": 0}
    )
    assert answer.speculative_metrics.num_accepted_draft_tokens > 20


def test_draft_and_target_are_devices_of_their_own(server):
    (target,), (draft,) = server.workers("target"), server.workers("draft")
    assert target["device"] != draft["device"]
    wait_for(server.is_idle, 10.0, "idle")


def test_a_wrong_setting_is_named(tmp_path):
    result = subprocess.run(
        [specdec_command(), "serve", str(FILE), "--set", "args.simulation.alpha=0.5"],
        capture_output=True,
        text=True,
        timeout=100,
        env=private_env(tmp_path),
    )
    assert result.returncode == 2
    assert result.stderr.startswith("error:")
    assert "args.simulation.alpha: unknown key" in result.stderr
    assert "Traceback" not in result.stderr
