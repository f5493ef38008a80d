"""The simulated pair as an operator serves it: two devices in actors of their own, overlapped rounds."""

from __future__ import annotations

import subprocess

import httpx
import pytest

from specdec.gateway.proto import generation_pb2 as pb
from tests.e2e.harness import Server, private_env, specdec_command, wait_for
from tests.e2e.simulated.settings import FILE

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

PROMPT = "w5 w17 w3"
GAMMA = 3
DRAFTED = {"num_speculative_tokens": GAMMA}


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
    before = server.settled()
    for pipeline in ("serial", "lookahead", "auto"):
        assert complete(server, **sampling, speculative={"pipeline": pipeline, **DRAFTED}) == plain
    after = server.settled()
    assert after["num_accepted_draft_tokens"] > before["num_accepted_draft_tokens"] + 100
    assert after["num_prepared_drafts"] > before["num_prepared_drafts"] + 10


def test_serial_requests_have_nothing_prepared_for_them(server):
    before = server.settled()["num_prepared_drafts"]
    complete(server, speculative={"pipeline": "serial", **DRAFTED})
    assert server.settled()["num_prepared_drafts"] == before


def test_pipeline_is_a_field_of_grpc_too(server):
    request = pb.GenerateRequest(
        text=PROMPT,
        sampling=pb.SamplingOptions(max_tokens=100, temperature=0.0),
        speculative=pb.SpeculativeOptions(
            pipeline=pb.PIPELINE_LOOKAHEAD, num_speculative_tokens=GAMMA, metrics=True
        ),
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
