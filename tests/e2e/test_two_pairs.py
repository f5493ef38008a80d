"""Two pairs behind one gateway: each has its name, its texts, its failures and its updates."""

from __future__ import annotations

import copy
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import openai
import pytest

from specdec.client import Client
from specdec.gateway.proto import generation_pb2 as pb
from specdec.lab.chaos.server import ray_address
from tests.e2e.harness import (
    Server,
    chat,
    ids_of,
    private_env,
    specdec_command,
    wait_for,
    wait_for_value,
)
from tests.e2e.streams import Stream

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

FIRST, OTHER = "smollm2", "simulated"
STORY = "Tell me a long story about a dragon and a baker."
OTHER_APPLICATION = {
    "name": "second",
    "route_prefix": None,
    "import_path": "specdec.cluster.app:build_pair",
    "args": {
        "served_model_name": OTHER,
        "target": {"model": "simulated-target", "kv_capacity_tokens": 200_000},
        "draft": {"model": "simulated-draft", "kv_capacity_tokens": 200_000},
        "simulation": {"target": {"step_s": 0.03}, "draft": {"step_s": 0.003}},
        "speculation": {"num_speculative_tokens": 3},
        "coordinator": {"idle_wait_s": 60.0},
    },
}
DEPLOY = """
import json, sys, ray
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

ray.init(address=sys.argv[1], namespace="serve", log_to_driver=False, logging_level="ERROR")
serve.status()
_get_global_client().deploy_apps(ServeDeploySchema.model_validate(json.load(sys.stdin)))
"""
"""What `serve deploy FILE` does; the private Ray of these tests has no dashboard for it to ask."""


class TwoPairs(Server):
    """The embedded pair with the gateway, and a simulated one."""

    tree: dict[str, Any]

    def _deployment(self, args: dict[str, Any]) -> dict[str, Any]:
        self.tree = super()._deployment(args)
        self.tree["applications"].append(copy.deepcopy(OTHER_APPLICATION))
        return self.tree

    def coordinators(self) -> dict[str, dict[str, Any]]:
        """Each model's one coordinator."""
        found = httpx.get(f"{self.url}/status", timeout=10).json()["coordinators"]
        assert len({status["model"] for status in found}) == len(found)
        return {status["model"]: status for status in found}

    def pids(self, model: str) -> dict[str, int]:
        """Process ids of a pair, once it is whole."""

        def of_whole_pair() -> dict[str, int] | None:
            status = self.coordinators().get(model)
            if not status or len(status["targets"]) != 1 or len(status["drafts"]) != 1:
                return None
            (target,), (draft,) = status["targets"], status["drafts"]
            return {"coordinator": status["pid"], "target": target["pid"], "draft": draft["pid"]}

        return wait_for_value(of_whole_pair, 90, f"{model} is whole")

    def pids_without(self, model: str, role: str, gone: int) -> dict[str, int]:
        """Process ids of a pair, once another process has taken the place of ``gone``."""

        def of_replaced_pair() -> dict[str, int] | None:
            pids = self.pids(model)
            return pids if pids[role] != gone else None

        return wait_for_value(of_replaced_pair, 90, f"another {role} of {model}")

    def run(self, *command: str, stdin: str = "") -> str:
        """Run a command beside the server; gives its output."""
        env = private_env(self.log_path.parent)
        result = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=90, env=env)
        assert result.returncode == 0, result.stderr
        return result.stdout

    def deploy(self, *applications: dict[str, Any]) -> None:
        """Deploy the file with these applications behind the first."""
        tree = {**self.tree, "applications": [self.tree["applications"][0], *applications]}
        self.run(sys.executable, "-c", DEPLOY, ray_address(self.process.pid), stdin=json.dumps(tree))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoPairs]:
    args = {
        # float32: texts are compared across rounds of different shape.
        "target": {"model": "smollm2", "dtype": "float32"},
        "draft": {"model": "smollm2-draft", "dtype": "float32"},
        "speculation": {"num_speculative_tokens": 3},
        "gateway": {"other_pairs": ["second"]},
    }
    server = TwoPairs(tmp_path_factory.mktemp("server"), args)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


def named(model: str, **options: Any) -> pb.GenerateRequest:
    request = chat(STORY, ignore_eos=True, **{"max_tokens": 60, **options})
    request.model = model
    if model != FIRST:  # its tokenizer has no chat template
        request.text = "w5 w17 w3"
    return request


@pytest.fixture(scope="module")
def alone(server: TwoPairs) -> dict[str, list[int]]:
    """What each target says by itself."""
    return {
        model: ids_of(server.stub().Generate(named(model, gamma=0, max_tokens=count), timeout=120))
        for model, count in ((FIRST, 100), (OTHER, 300))
    }


def refused(server: TwoPairs, model: str) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json={"prompt": "w1", "model": model}, timeout=30)


def test_ready_means_all_pairs_and_both_are_listed(server: TwoPairs) -> None:
    health = httpx.get(f"{server.url}/health").json()
    assert health == {"status": "ready", "model": FIRST, "ready_models": [FIRST, OTHER]}
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused")
    assert [model.id for model in client.models.list().data] == [FIRST, OTHER]
    for url in (server.url, f"grpc://{server.grpc_address}"):
        with Client(url) as ours:
            assert ours.models() == (FIRST, OTHER)
    assert server.log().count("target ") >= 2
    shown = server.run(specdec_command(), "status", server.url)
    assert FIRST in shown
    assert OTHER in shown


def test_openai_and_grpc_pick_a_pair_by_its_name(server: TwoPairs, alone: dict[str, list[int]]) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused")
    for model in (FIRST, OTHER):
        prompt = "w5 w17 w3" if model == OTHER else "Once upon a time"
        options: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": 40, "temperature": 0.0}
        plain = client.completions.create(
            **options, extra_body={"speculative": {"num_speculative_tokens": 0}}
        )
        whole = client.completions.create(**options)
        pieces = list(client.completions.create(**options, stream=True))
        assert whole.model == model
        assert {piece.model for piece in pieces} == {model}
        streamed = "".join(piece.choices[0].text for piece in pieces if piece.choices)
        assert streamed == whole.choices[0].text == plain.choices[0].text
        assert bool(re.match(r"w\d+ w\d+", whole.choices[0].text)) == (model == OTHER)

        answer = server.stub().Generate(named(model, gamma=3, max_tokens=len(alone[model])), timeout=120)
        assert answer.model == model
        assert ids_of(answer) == alone[model]
        assert answer.speculative_metrics.num_accepted_draft_tokens > 0
        stream = Stream(server, named(model, max_tokens=len(alone[model])))
        assert stream.finish() == alone[model]
        assert server.stub().GetModelInfo(pb.GetModelInfoRequest(model=model)).model == model


def test_no_name_is_the_first_pair_and_an_unknown_one_is_refused(server: TwoPairs) -> None:
    answer = server.stub().Generate(chat(STORY, max_tokens=4), timeout=60)
    assert answer.model == FIRST
    response = refused(server, "no-such")
    assert response.status_code == 404
    assert f"'{FIRST}', '{OTHER}' are" in response.json()["error"]["message"]
    with pytest.raises(grpc.RpcError) as caught:
        server.stub().Generate(pb.GenerateRequest(text="x", model="no-such"), timeout=60)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_the_loss_of_one_pairs_processes_is_not_the_others(
    server: TwoPairs, alone: dict[str, list[int]]
) -> None:
    first, other = server.pids(FIRST), server.pids(OTHER)
    for role in ("target", "coordinator", "draft"):
        streams = [Stream(server, named(model, max_tokens=len(alone[model]))) for model in (FIRST, OTHER)]
        streams[1].wait_for_tokens(20)
        os.kill(other[role], signal.SIGKILL)
        assert streams[0].finish() == alone[FIRST]
        assert max(streams[0].pauses_s[1:]) < 5.0
        assert streams[1].finish() == alone[OTHER]
        other = server.pids_without(OTHER, role, other[role])
    assert server.pids(FIRST) == first

    stream = Stream(server, named(OTHER, max_tokens=len(alone[OTHER])))
    stream.wait_for_tokens(20)
    os.kill(first["target"], signal.SIGKILL)
    assert stream.finish() == alone[OTHER]
    assert server.pids(OTHER) == other
    replaced = server.pids_without(FIRST, "target", first["target"])
    assert replaced == {**first, "target": replaced["target"]}


def test_one_pair_is_scaled_by_its_applications_name(server: TwoPairs) -> None:
    first = server.pids(FIRST)
    address = ray_address(server.process.pid)
    for count in (2, 1):
        counts = f"target={count}"
        server.run(specdec_command(), "scale", counts, "--app", "second", "--address", address)
        wait_for(lambda n=count: len(server.coordinators()[OTHER]["targets"]) == n, 60, counts)
    assert server.pids(FIRST) == first


def test_one_pair_is_redeployed_under_another_name(server: TwoPairs, alone: dict[str, list[int]]) -> None:
    first = server.pids(FIRST)
    stream = Stream(server, named(FIRST, max_tokens=100))
    stream.wait_for_tokens(5)
    changed = copy.deepcopy(OTHER_APPLICATION)
    changed["args"]["served_model_name"] = "renamed"
    changed["args"]["target"]["model"] = "another-target"
    changed["args"]["simulation"]["vocab_size"] = 2000
    server.deploy(changed)
    wait_for(
        lambda: "renamed" in httpx.get(f"{server.url}/health").json()["ready_models"], 120, "the new name"
    )
    assert stream.finish() == alone[FIRST]
    assert server.pids(FIRST) == first
    info = server.stub().GetModelInfo(pb.GetModelInfoRequest(model="renamed"))
    assert info.vocab_size == 2000
    assert server.stub().Generate(named("renamed"), timeout=60).model == "renamed"
    assert refused(server, OTHER).status_code == 404

    server.deploy(OTHER_APPLICATION)
    wait_for(lambda: OTHER in httpx.get(f"{server.url}/health").json()["ready_models"], 120, "the old name")
    answer = server.stub().Generate(named(OTHER, max_tokens=len(alone[OTHER])), timeout=60)
    assert ids_of(answer) == alone[OTHER]


def test_a_removed_pair_is_unavailable_until_it_is_deployed_again(
    server: TwoPairs, alone: dict[str, list[int]]
) -> None:
    first = server.pids(FIRST)
    going = Stream(server, named(OTHER, max_tokens=4000))
    going.wait_for_tokens(20)
    staying = Stream(server, named(FIRST, max_tokens=100))
    server.deploy()
    wait_for(lambda: refused(server, OTHER).status_code == 503, 60, "it is not served any more")
    going.thread.join(60)
    assert isinstance(going.error, grpc.RpcError)
    assert going.error.code() is grpc.StatusCode.UNAVAILABLE
    assert "'second' is not deployed; please retry" in going.error.details()
    response = refused(server, OTHER)
    assert response.elapsed.total_seconds() < 2.0
    assert int(response.headers["retry-after"]) >= 1
    assert "the application 'second' is not deployed" in response.json()["error"]["message"]
    assert staying.finish() == alone[FIRST]
    assert httpx.get(f"{server.url}/health").json()["ready_models"] == [FIRST]
    assert server.pids(FIRST) == first

    server.deploy(OTHER_APPLICATION)
    wait_for(lambda: OTHER in httpx.get(f"{server.url}/health").json()["ready_models"], 120, "it is back")
    answer = server.stub().Generate(named(OTHER, max_tokens=len(alone[OTHER])), timeout=60)
    assert ids_of(answer) == alone[OTHER]
