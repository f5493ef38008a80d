"""When every worker is gone, requests end in time; when workers come back, so does the service."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import httpx
import pytest

from specdec.gateway.proto import generation_pb2 as pb
from tests.e2e.harness import Server, descendants, wait_for
from tests.e2e.simulated.settings import IDLE_WAIT_S
from tests.e2e.streams import Stream

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

LATE_S = 8.0
"""What processes that start and are killed beside it may cost an answer."""
DEADLINE_S = 20.0
PROMPT_IDS = (5, 17, 3)


@contextmanager
def without_workers(server: Server) -> Iterator[None]:
    """Kill every draft and target worker, and each that is started in its place, while the context lasts."""
    is_over = threading.Event()

    def kill_all() -> None:
        while not is_over.wait(0.05):
            for pid in descendants(server.process.pid):
                try:
                    name = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
                    if "ServeReplica:specdec:DraftWorker" in name or "ServeReplica:specdec:TargetW" in name:
                        os.kill(pid, signal.SIGKILL)
                except OSError:
                    continue

    killer = threading.Thread(target=kill_all)
    killer.start()
    try:
        yield
    finally:
        is_over.set()
        killer.join()


def grpc_request(max_tokens: int = 60) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=PROMPT_IDS),
        sampling=pb.SamplingOptions(temperature=0.0, max_tokens=max_tokens),
    )


def post(server: Server) -> httpx.Response:
    body = {"prompt": list(PROMPT_IDS), "max_tokens": 60, "temperature": 0.0}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=DEADLINE_S)


def test_without_workers_requests_end_in_time_and_with_new_ones_they_are_served(server: Server) -> None:
    text = post(server).json()["choices"][0]["text"]
    token_ids = Stream(server, grpc_request()).finish()
    running = Stream(server, grpc_request(max_tokens=4000))
    running.wait_for_tokens(20)

    with without_workers(server):
        wait_for(lambda: not server.workers("target"), 20, "the coordinator knows that no target is left")
        started_s = time.monotonic()
        answer = post(server)
        http_s = time.monotonic() - started_s
        assert answer.status_code == 503, answer.text
        assert "retry" in answer.json()["error"]["message"]
        started_s = time.monotonic()
        with pytest.raises(grpc.RpcError) as caught:
            server.stub().Generate(grpc_request(), timeout=DEADLINE_S)
        grpc_s = time.monotonic() - started_s
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "retry" in caught.value.details()
        print(f"answered after {http_s:.1f} s over HTTP and {grpc_s:.1f} s over gRPC")
        assert IDLE_WAIT_S * 0.8 < http_s < IDLE_WAIT_S + LATE_S
        assert IDLE_WAIT_S * 0.8 < grpc_s < IDLE_WAIT_S + LATE_S
        # The stream that lost its target has waited as long, and was told.
        running.thread.join(DEADLINE_S)
        assert running.error is not None
        assert running.error.code() is grpc.StatusCode.UNAVAILABLE
        assert httpx.get(f"{server.url}/health", timeout=5).status_code == 503

    back_s = wait_for(lambda: httpx.get(f"{server.url}/health", timeout=5).status_code == 200, 150, "health")
    assert post(server).json()["choices"][0]["text"] == text
    assert Stream(server, grpc_request()).finish() == token_ids
    print(f"served again {back_s:.1f} s after the last kill")
    wait_for(lambda: bool(server.workers("draft")), 90, "a draft")
    wait_for(server.is_idle, 10, "nothing is held")
