"""Simulated workers that come with the load and go with it; what is being served does not notice."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from specdec.cluster.autoscaling_policy import POLICY_PATH
from specdec.lab.chaos.server import ray_address
from tests.e2e.harness import Server, private_env, specdec_command, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]

FILE = Path(__file__).parents[2] / "deployments" / "simulated.yaml"
UP_LIMIT_S = 80.0
"""From the first request to work for a third target: reports, Serve's delay, two starts on busy cores."""
DOWN_LIMIT_S = 100.0
NUM_STREAMS = 12
MAX_TOKENS = 400


def autoscaled(deployment: dict[str, Any]) -> dict[str, Any]:
    (application,) = deployment["applications"]
    reports = {"metrics_interval_s": 0.5, "look_back_period_s": 2.0}
    delays = {"upscale_delay_s": 1.0, "downscale_delay_s": 6.0}
    application["autoscaling_policy"] = {
        "policy_function": POLICY_PATH,
        "policy_kwargs": {"sequences_per_target": 4, "sequences_per_draft": 100, "drafts_per_target": 0.5},
    }
    application["deployments"] = [
        {"name": "Coordinator", "autoscaling_config": {"min_replicas": 1, "max_replicas": 1, **reports}},
        *(
            {
                "name": name,
                "autoscaling_config": {"min_replicas": 1, "max_replicas": 3, **reports, **delays},
            }
            for name in ("DraftWorker", "TargetWorker")
        ),
    ]
    return deployment


class AutoscaledServer(Server):
    def __init__(self, folder: Path, args: dict[str, Any]) -> None:
        super().__init__(folder, args)
        self.folder = folder

    def _deployment(self, args: dict[str, Any]) -> dict[str, Any]:
        return autoscaled(super()._deployment(args))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AutoscaledServer]:
    args = yaml.safe_load(FILE.read_text(encoding="utf-8"))["applications"][0]["args"]
    args["coordinator"] = {"max_num_seqs": 4}
    server = AutoscaledServer(tmp_path_factory.mktemp("autoscaled"), args)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


async def complete(client: httpx.AsyncClient, number: int) -> str:
    body = {"prompt": f"w{number} w17", "max_tokens": MAX_TOKENS, "temperature": 0.0}
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


async def load_until(server: Server, is_enough: Any, limit_s: float) -> tuple[set[tuple[int, str]], float]:
    """Keep streams going until the condition holds and they have ended: their texts, and how long it took."""
    texts: set[tuple[int, str]] = set()
    seen_s: float | None = None
    started_s = time.monotonic()

    async def stream(client: httpx.AsyncClient, number: int) -> None:
        while seen_s is None:
            texts.add((number, await complete(client, number)))

    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client, asyncio.TaskGroup() as streams:
        for number in range(NUM_STREAMS):
            streams.create_task(stream(client, number))
        while not await asyncio.to_thread(is_enough):
            assert time.monotonic() - started_s < limit_s, f"not within {limit_s} s"
            await asyncio.sleep(0.3)
        seen_s = time.monotonic() - started_s
    return texts, seen_s


def sequences_of_targets(server: Server) -> list[int]:
    return [worker["num_sequences"] for worker in server.workers("target")]


def test_targets_come_with_the_load_work_and_go_with_it_and_every_text_is_the_same(server: Server) -> None:
    async def undisturbed() -> set[tuple[int, str]]:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            return {(number, await complete(client, number)) for number in range(NUM_STREAMS)}

    before = asyncio.run(undisturbed())
    assert len(sequences_of_targets(server)) == 1

    texts, up_s = asyncio.run(
        load_until(server, lambda: [n > 0 for n in sequences_of_targets(server)] == [True] * 3, UP_LIMIT_S)
    )
    print(f"three targets at work after {up_s:.1f} s")
    assert texts == before
    assert len(server.workers("draft")) == 1  # one for two, so one for three

    # One stream goes on all the while: workers that go must not take it with them.
    async def one_stream_until_one_target() -> tuple[set[str], float]:
        started_s = time.monotonic()
        texts: set[str] = set()
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            while len(await asyncio.to_thread(server.workers, "target")) > 1:
                assert time.monotonic() - started_s < DOWN_LIMIT_S, "targets do not go"
                texts.add(await complete(client, 0))
        return texts, time.monotonic() - started_s

    alone, down_s = asyncio.run(one_stream_until_one_target())
    print(f"one target again after {down_s:.1f} s")
    assert alone <= {text for number, text in before if number == 0}
    wait_for(server.is_idle, 10.0, "idle")


def scale(server: AutoscaledServer, count: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [specdec_command(), "scale", count, "--address", ray_address(server.process.pid)],
        capture_output=True,
        text=True,
        timeout=60,
        env=private_env(server.folder),
    )


def test_by_hand_it_takes_bounds_and_no_number(server: AutoscaledServer) -> None:
    refused = scale(server, "target=2")
    assert refused.returncode == 2
    assert "TargetWorker scales by itself, now between 1 and 3" in refused.stderr
    assert "target=2..2" in refused.stderr
    assert len(server.workers("target")) == 1

    taken = scale(server, "target=2..2")
    assert taken.returncode == 0, taken.stderr
    wait_for(lambda: len(server.workers("target")) == 2, UP_LIMIT_S, "two targets without any load")
