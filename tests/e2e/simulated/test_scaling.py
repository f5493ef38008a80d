"""`specdec scale` while streams run: their texts stay, and who comes gets work."""

from __future__ import annotations

import subprocess
import time

import pytest

from specdec.gateway.proto import generation_pb2 as pb
from specdec.lab.chaos.server import ray_address
from tests.e2e.harness import Server, private_env, specdec_command, wait_for
from tests.e2e.streams import Stream

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

LONGEST_GAP_S = 5.0
"""A stream that is moved is fed anew to its workers, in chunks between rounds; meanwhile a replica starts or
stops on the same two cores."""
MAX_TOKENS = 3500
"""At 16 ms a round of up to four tokens: longer than workers take to come."""
GAMMA = 3


def request(number: int) -> pb.GenerateRequest:
    """Greedy and seeded ones by turns."""
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[number, 7, 3 * number]),
        sampling=pb.SamplingOptions(
            temperature=float(number % 2),
            seed=number if number % 2 else None,
            max_tokens=MAX_TOKENS,
            ignore_eos=True,
        ),
        speculative=pb.SpeculativeOptions(
            metrics=True,
            num_speculative_tokens=GAMMA,
            mode=pb.VERIFICATION_MODE_COUPLED if number % 2 else None,
        ),
    )


def scale(server: Server, *counts: str) -> None:
    address = ray_address(server.process.pid)
    result = subprocess.run(
        [specdec_command(), "scale", *counts, "--address", address],
        capture_output=True,
        text=True,
        timeout=60,
        env=private_env(server.log_path.parent),
    )
    assert result.returncode == 0, result.stderr


def counts(server: Server) -> tuple[int, int]:
    return len(server.workers("draft")), len(server.workers("target"))


def num_sequences(server: Server) -> list[int]:
    return [worker["num_sequences"] for role in ("draft", "target") for worker in server.workers(role)]


def test_streams_go_on_while_workers_come_and_go_and_new_ones_get_sequences(server: Server) -> None:
    alone = [Stream(server, request(number)) for number in range(8)]
    undisturbed = [stream.finish() for stream in alone]
    assert {len(ids) for ids in undisturbed} == {MAX_TOKENS}

    early = [Stream(server, request(number)) for number in range(4)]
    for stream in early:
        stream.wait_for_tokens(20)
    started_s = time.monotonic()
    scale(server, "draft=2", "target=2")
    wait_for(lambda: counts(server) == (2, 2), 60, "two of each")
    came_s = time.monotonic() - started_s
    late = [Stream(server, request(number)) for number in range(4, 8)]
    served_s = wait_for(lambda: all(num_sequences(server)), 10, "all four have sequences")
    for stream in late:
        stream.wait_for_tokens(100)

    assert all(stream.thread.is_alive() for stream in late)
    started_s = time.monotonic()
    scale(server, "draft=1", "target=1")
    wait_for(lambda: counts(server) == (1, 1), 60, "one of each")
    left_s = time.monotonic() - started_s
    assert any(stream.thread.is_alive() for stream in late)

    assert [stream.finish() for stream in (*early, *late)] == undisturbed
    gaps = sorted(max(stream.pauses_s[1:]) for stream in (*early, *late))
    print(
        f"two of each after {came_s:.1f} s, with sequences {served_s:.2f} s later, one after {left_s:.1f} s"
    )
    print(f"longest gap of a stream: {gaps[0]:.2f} to {gaps[-1]:.2f} s")
    assert gaps[-1] < LONGEST_GAP_S
    assert sum(stream.metrics.num_draft_tokens for stream in late if stream.metrics) > 0
    wait_for(server.is_idle, 10, "nothing is held")
