"""What a client sees when a worker dies, hangs or comes back; clients that leave leave nothing behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import httpx
import pytest

from tests.e2e.conftest import run_server
from tests.e2e.harness import Server, chat, descendants, ids_of, wait_for, wait_for_value
from tests.e2e.streams import Stream

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

STORY = "Tell me a long story about a dragon and a baker."
GAMMA = 3
"""Fixed: by measurement, it may be nothing beside a killed or hung draft."""
DRAFT_TIMEOUT_S = 2.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    # float32: texts are compared across rounds of different shape.
    args = {
        "target": {"model": "smollm2", "dtype": "float32"},
        "draft": {"model": "smollm2-draft", "dtype": "float32"},
        "speculation": {"num_speculative_tokens": GAMMA},
        "coordinator": {"draft_timeout_s": DRAFT_TIMEOUT_S},
    }
    yield from run_server(tmp_path_factory.mktemp("server"), args)


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[int]:
    """The story by plain decoding."""
    answer = server.stub().Generate(chat(STORY, gamma=0, max_tokens=100, ignore_eos=True), timeout=120)
    return ids_of(answer)


def one_pid(server: Server, role: str) -> int:
    def the_one() -> int | None:
        pids = [int(worker["pid"]) for worker in server.workers(role)]
        return pids[0] if len(pids) == 1 else None

    return wait_for_value(the_one, 60, f"one {role} worker")


def wait_for_drafts(server: Server) -> float:
    """Seconds until a request is drafted for again."""

    def is_drafting() -> bool:
        answer = server.stub().Generate(chat(STORY, gamma=GAMMA, max_tokens=12), timeout=60)
        return bool(answer.speculative_metrics.num_draft_tokens > 0)

    return wait_for(is_drafting, 90, "drafts again")


def test_draft_target_and_coordinator_are_different_processes(server: Server) -> None:
    status = server.status()
    pids = {status["pid"], one_pid(server, "draft"), one_pid(server, "target"), server.process.pid}
    assert len(pids) == 4
    names = [Path(f"/proc/{pid}/cmdline").read_text() for pid in pids - {server.process.pid}]
    assert sorted(name.split(":")[-1].strip("\0 ") for name in names) == [
        "Coordinator",
        "DraftWorker",
        "TargetWorker",
    ]


def test_a_killed_draft_changes_nothing_in_a_stream_and_comes_back(
    server: Server, undisturbed: list[int]
) -> None:
    pid = one_pid(server, "draft")
    request = chat(STORY, gamma=GAMMA, max_tokens=100, ignore_eos=True)
    drafted = server.stub().Generate(request, timeout=120).speculative_metrics.num_draft_tokens
    stream = Stream(server, request)
    stream.wait_for_tokens(20)
    os.kill(pid, signal.SIGKILL)
    assert stream.finish() == undisturbed
    assert stream.metrics is not None
    # Drafts until the kill, none for a while after it.
    assert 0 < stream.metrics.num_draft_tokens < 0.9 * drafted
    print(f"{stream.metrics.num_draft_tokens} draft tokens instead of {drafted}")
    back_s = wait_for_drafts(server)
    assert one_pid(server, "draft") != pid
    print(f"longest pause {max(stream.pauses_s[1:]):.2f} s; drafts again {back_s:.1f} s after the stream")


def test_a_hung_draft_costs_one_deadline(server: Server, undisturbed: list[int]) -> None:
    pid = one_pid(server, "draft")
    stream = Stream(server, chat(STORY, gamma=GAMMA, max_tokens=100, ignore_eos=True))
    stream.wait_for_tokens(20)
    os.kill(pid, signal.SIGSTOP)
    try:
        assert stream.finish() == undisturbed
    finally:
        os.kill(pid, signal.SIGCONT)
    longest_s = max(stream.pauses_s[1:])
    print(f"longest pause {longest_s:.2f} s")
    assert DRAFT_TIMEOUT_S * 0.5 < longest_s < DRAFT_TIMEOUT_S * 3
    wait_for_drafts(server)


def test_a_frozen_target_is_not_ready_and_its_stream_ends(server: Server, undisturbed: list[int]) -> None:
    """With an error where no other target came in time, else with all of its text."""

    def health() -> int:
        return httpx.get(f"{server.url}/health", timeout=10).status_code

    pid = one_pid(server, "target")
    stream = Stream(server, chat(STORY, gamma=GAMMA, max_tokens=100, ignore_eos=True))
    stream.wait_for_tokens(20)
    os.kill(pid, signal.SIGSTOP)
    try:
        noticed_s = wait_for(lambda: health() == 503, 60, "readiness says so")
        ready_s = wait_for(lambda: health() == 200, 120, "another target, or this one replaced")
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    print(f"not ready after {noticed_s:.1f} s, ready again {ready_s:.1f} s later")
    stream.thread.join(60)
    assert not stream.thread.is_alive()
    if stream.error is None:
        assert stream.token_ids == undisturbed
    else:
        assert stream.error.code() is grpc.StatusCode.UNAVAILABLE
        assert stream.token_ids == undisturbed[: len(stream.token_ids)]


def test_a_killed_target_pauses_a_stream_and_the_text_goes_on(server: Server, undisturbed: list[int]) -> None:
    pid = one_pid(server, "target")
    stream = Stream(server, chat(STORY, gamma=GAMMA, max_tokens=100, ignore_eos=True))
    stream.wait_for_tokens(20)
    os.kill(pid, signal.SIGKILL)
    assert stream.finish() == undisturbed
    assert one_pid(server, "target") != pid
    print(f"longest pause {max(stream.pauses_s[1:]):.2f} s")


def test_a_killed_coordinator_pauses_a_stream_and_the_text_goes_on(
    server: Server, undisturbed: list[int]
) -> None:
    pid = int(server.status()["pid"])
    stream = Stream(server, chat(STORY, gamma=GAMMA, max_tokens=100, ignore_eos=True))
    stream.wait_for_tokens(20)
    os.kill(pid, signal.SIGKILL)
    assert stream.finish() == undisturbed
    print(f"longest pause {max(stream.pauses_s[1:]):.2f} s")
    wait_for(lambda: is_ready_and_idle(server), 60, "idle again")


def assert_freed(server: Server) -> None:
    """Every sequence and its KV cache is gone: at once in the workers, and seen with the next poll."""
    seconds = wait_for(server.is_idle, 10.0, "no sequence, no KV cache in use")
    print(f"idle after {seconds:.2f} s")


def calls_made(server: Server) -> int:
    return sum(worker["num_calls"] for role in ("draft", "target") for worker in server.workers(role))


def assert_no_more_work(server: Server) -> None:
    time.sleep(1.5)  # gateway and coordinator poll twice a second each: what was done before is seen by now
    before = calls_made(server)
    time.sleep(1.5)
    assert calls_made(server) == before


def test_a_cancelled_grpc_stream_frees_both_caches(server: Server) -> None:
    stream = Stream(server, chat(STORY, max_tokens=1500, ignore_eos=True))
    stream.wait_for_tokens(5)
    wait_for(lambda: not server.is_idle(), 5, "the status shows the sequence")
    stream.call.cancel()
    assert_freed(server)
    assert_no_more_work(server)


def test_an_expired_grpc_call_frees_both_caches(server: Server) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        server.stub().Generate(chat(STORY, max_tokens=1500, ignore_eos=True), timeout=2)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert_freed(server)
    assert_no_more_work(server)


@pytest.mark.parametrize("is_streamed", [True, False])
def test_an_http_client_that_leaves_frees_both_caches(server: Server, is_streamed: bool) -> None:
    body = {
        "messages": [{"role": "user", "content": STORY}],
        "max_tokens": 1500,
        "ignore_eos": True,
        "temperature": 0,
        "stream": is_streamed,
    }
    try:
        with (
            httpx.Client(timeout=20.0 if is_streamed else 2.0) as client,
            client.stream("POST", f"{server.url}/v1/chat/completions", json=body) as response,
        ):
            lines = response.iter_lines()
            for _ in range(8):
                next(lines)
    except httpx.ReadTimeout:
        assert not is_streamed  # nothing was to be read before the end: the client gives up
    assert_freed(server)
    assert_no_more_work(server)


def test_a_killed_gateway_leaves_no_sequence_behind(server: Server) -> None:
    stream = Stream(server, chat(STORY, max_tokens=1500, ignore_eos=True))
    stream.wait_for_tokens(5)
    (gateway,) = [
        pid
        for pid in descendants(server.process.pid)
        if "ServeReplica:specdec:Gateway" in Path(f"/proc/{pid}/cmdline").read_text()
    ]
    os.kill(gateway, signal.SIGKILL)
    stream.thread.join(30)
    assert stream.error is not None
    assert stream.error.code() is grpc.StatusCode.UNAVAILABLE
    # Another gateway is started; the sequence of the dead one must end long before its 1,500 tokens.
    wait_for(lambda: is_ready_and_idle(server), 40, "idle again")
    assert (
        "Paris" in server.stub().Generate(chat("What is the capital of France?"), timeout=60).choices[0].text
    )


def is_ready_and_idle(server: Server) -> bool:
    try:
        return httpx.get(f"{server.url}/health", timeout=5).status_code == 200 and server.is_idle()
    except (httpx.HTTPError, KeyError, ValueError):
        return False


def test_half_of_many_clients_leave_and_the_others_get_their_texts(server: Server) -> None:
    requests = [chat(STORY, max_tokens=40, seed=seed, temperature=1.0) for seed in range(6)]
    stub = server.stub()
    alone = [ids_of(stub.Generate(request, timeout=120)) for request in requests[::2]]
    streams = [Stream(server, request) for request in requests]
    for stream in streams:
        stream.wait_for_tokens(3)
    for stream in streams[1::2]:
        stream.call.cancel()
    assert [stream.finish() for stream in streams[::2]] == alone
    assert_freed(server)
