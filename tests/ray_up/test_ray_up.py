"""deployments/onprem-cluster.yaml and onprem.yaml on three machines: `ray up`, `serve deploy`, `ray down`.

Replaced in the files are addresses, the GPUs, which are only said to be there, and the models, which are
simulated. The tests are the stages of one cluster's life, in order. `make ray-up-test` runs them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import yaml

from specdec.gateway.proto import generation_pb2_grpc as pb_grpc
from tests.e2e.harness import chat, wait_for
from tests.ray_up.lan import NODES, ROOT, Lan, why_not

if reason := "make ray-up-test runs it" if "SPECDEC_RAY_UP" not in os.environ else why_not():
    pytest.skip(reason, allow_module_level=True)
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1200)]

STORY = "w1 w2 w3"
MAX_TOKENS = 800
NODE_BACK_TIMEOUT_S = 300.0


class Cluster:
    """What the tests ask of the running cluster."""

    def __init__(self, lan: Lan) -> None:
        self.lan = lan
        write_cluster_file(lan.folder / "onprem-cluster.yaml")
        self.sockets: dict[int, Path] = {}
        self.client = httpx.Client()

    def ray(self, verb: str, *arguments: str) -> str:
        return self.lan.operator("ray", verb, "/shared/onprem-cluster.yaml", *arguments, timeout_s=600)

    def up(self) -> None:
        self.lan.operator("sh", "-c", "ray get-auth-token --generate && chmod 600 ~/.ray/auth_token")
        self.ray("up", "--yes", "--no-config-cache")
        wait_for(self.has_three_nodes, 180, "three nodes")

    def has_three_nodes(self) -> bool:
        count = "import ray; ray.init(); print('ALIVE', sum(node['Alive'] for node in ray.nodes()))"
        return "ALIVE 3" in self.ray("exec", f'python -c "{count}" 2>/dev/null')

    def deploy(self, *, num_drafts: int) -> None:
        deployment = derived_deployment(num_drafts)
        (self.lan.folder / "onprem.yaml").write_text(yaml.safe_dump(deployment))
        self.ray("exec", "serve deploy /shared/onprem.yaml")

    def connect(self) -> None:
        self.sockets = self.lan.forward("head", 8000, 9000)
        transport = httpx.HTTPTransport(uds=str(self.sockets[8000]))
        self.client = httpx.Client(transport=transport, base_url="http://head", timeout=180)

    def is_ready(self) -> bool:
        try:
            return self.client.get("/health").status_code == 200
        except httpx.HTTPError:
            return False

    def workers(self, role: str) -> list[dict[str, Any]]:
        (coordinator,) = self.client.get("/status").json()["coordinators"]
        return list(coordinator[f"{role}s"])

    def node_ids(self, role: str) -> set[str]:
        return {worker["node_id"] for worker in self.workers(role)}

    def stub(self) -> pb_grpc.GenerationServiceStub:
        return pb_grpc.GenerationServiceStub(grpc.insecure_channel(f"unix:{self.sockets[9000]}"))

    def post(self, gamma: int | None) -> str:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": STORY}], "temperature": 0}
        body |= {"max_tokens": MAX_TOKENS}
        if gamma is not None:
            body["speculative"] = {"num_speculative_tokens": gamma}
        answer = self.client.post("/v1/chat/completions", json=body).raise_for_status().json()
        return str(answer["choices"][0]["message"]["content"])

    def kill_raylet(self, host: str) -> None:
        (raylet,) = [pid for pid, line in self.lan.processes(host).items() if "/raylet/raylet " in f"{line} "]
        os.kill(raylet, signal.SIGKILL)


class Stream:
    """A gRPC stream read in the background."""

    def __init__(self, cluster: Cluster) -> None:
        self.text = ""
        self.num_draft_tokens = 0
        self.longest_pause_s = 0.0
        self._error: Exception | None = None
        self._call = cluster.stub().GenerateStream(chat(STORY, max_tokens=MAX_TOKENS), timeout=400)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        last_s = time.monotonic()
        try:
            for chunk in self._call:
                self.longest_pause_s = max(self.longest_pause_s, time.monotonic() - last_s)
                last_s = time.monotonic()
                self.text += chunk.text
                if chunk.HasField("speculative_metrics"):
                    self.num_draft_tokens = chunk.speculative_metrics.num_draft_tokens
        except grpc.RpcError as error:
            self._error = error

    def wait_for_words(self, count: int) -> None:
        wait_for(lambda: len(self.text.split()) >= count or self._error, 60, f"{count} words")
        assert self._error is None

    def finish(self) -> str:
        self._thread.join(400)
        assert not self._thread.is_alive()
        assert self._error is None, self._error
        return self.text


def write_cluster_file(path: Path) -> None:
    """The shipped cluster file with our addresses, and with GPUs that are only said to be there."""
    text = (ROOT / "deployments" / "onprem-cluster.yaml").read_text()
    changes = dict(zip(("192.168.1.10", "192.168.1.11", "192.168.1.12"), NODES.values(), strict=True))
    changes["--labels=pool=$POOL"] = "--labels=pool=$POOL --num-gpus=2"
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    assert yaml.safe_load(text)["provider"]["worker_ips"] == list(NODES.values())[1:]
    path.write_text(text)


def derived_deployment(num_drafts: int) -> dict[str, Any]:
    """The shipped deployment with simulated models."""
    folder = ROOT / "deployments"
    shipped = yaml.safe_load((folder / "onprem.yaml").read_text())
    simulated = yaml.safe_load((folder / "simulated.yaml").read_text())
    (application,) = shipped["applications"]
    application["args"] |= simulated["applications"][0]["args"]
    for item in application["deployments"]:
        if item["name"] == "DraftWorker":
            item["num_replicas"] = num_drafts
    return dict(shipped)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Lan(tmp_path_factory.mktemp("lan")) as lan:
        cluster = Cluster(lan)
        started_s = time.monotonic()
        cluster.up()
        print(f"ray up: three nodes after {time.monotonic() - started_s:.0f} s")
        started_s = time.monotonic()
        cluster.deploy(num_drafts=1)
        cluster.connect()
        wait_for(cluster.is_ready, 180, "ready")
        print(f"serve deploy: ready after {time.monotonic() - started_s:.0f} s")
        yield cluster


@pytest.fixture(scope="module")
def plain(cluster: Cluster) -> str:
    """The story by plain decoding."""
    return cluster.post(gamma=0)


def test_draft_and_target_are_on_hosts_of_their_own(cluster: Cluster) -> None:
    wait_for(lambda: cluster.workers("draft") and cluster.workers("target"), 60, "a draft and a target")
    for host, name in (("head", "Gateway"), ("draft-host", "DraftWorker"), ("target-host", "TargetWorker")):
        lines = " ".join(cluster.lan.processes(host).values())
        assert f"ServeReplica:specdec:{name}" in lines
    assert len(cluster.node_ids("draft") | cluster.node_ids("target")) == 2


def test_the_text_over_http_and_grpc_is_that_of_plain_decoding(cluster: Cluster, plain: str) -> None:
    assert len(plain.split()) == MAX_TOKENS
    assert cluster.post(gamma=None) == plain
    stream = Stream(cluster)
    assert stream.finish() == plain
    assert stream.num_draft_tokens > 0


def test_a_second_draft_joins_when_the_file_asks_for_it(cluster: Cluster, plain: str) -> None:
    stream = Stream(cluster)
    stream.wait_for_words(20)
    cluster.deploy(num_drafts=2)
    seconds = wait_for(lambda: len(cluster.workers("draft")) == 2, 120, "two drafts")
    print(f"two drafts after {seconds:.0f} s")
    assert stream.finish() == plain
    assert len(cluster.node_ids("draft")) == 1
    assert cluster.post(gamma=None) == plain


def test_a_stream_goes_on_when_the_draft_host_is_lost_and_drafts_come_back(
    cluster: Cluster, plain: str
) -> None:
    lost = cluster.node_ids("draft")
    stream = Stream(cluster)
    stream.wait_for_words(50)
    cluster.kill_raylet("draft-host")
    assert stream.finish() == plain
    assert stream.num_draft_tokens > 0
    print(f"longest pause {stream.longest_pause_s:.1f} s")

    def are_back() -> bool:
        return len(cluster.workers("draft")) == 2 and not lost & cluster.node_ids("draft")

    print(f"both drafts on a new node after {wait_for(are_back, NODE_BACK_TIMEOUT_S, 'drafts again'):.0f} s")
    assert cluster.post(gamma=None) == plain


def test_a_stream_waits_for_the_target_host_to_come_back(cluster: Cluster, plain: str) -> None:
    lost = cluster.node_ids("target")
    stream = Stream(cluster)
    stream.wait_for_words(50)
    cluster.kill_raylet("target-host")
    assert stream.finish() == plain
    print(f"longest pause {stream.longest_pause_s:.1f} s")
    assert not lost & cluster.node_ids("target")


def test_ray_down_leaves_nothing_running(cluster: Cluster) -> None:
    running = [line for name in NODES for line in cluster.lan.processes(name).values()]
    assert any("gcs_server" in line for line in running)
    cluster.client.close()
    cluster.ray("exec", "sh ~/stop-ray.sh")
    cluster.ray("down", "--yes")

    def left() -> dict[str, str]:
        return {name: line for name in NODES for line in cluster.lan.processes(name).values()}

    with contextlib.suppress(AssertionError):
        print(f"nothing is left {wait_for(lambda: not left(), 30):.0f} s after ray down")
    assert left() == {}
