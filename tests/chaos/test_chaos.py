"""Short runs of `specdec bench chaos`: every text stays what it was, whatever happens to the workers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from rich.console import Console

from specdec.lab.chaos.plan import ROLES, SCALED_ROLES, SCALINGS, Plan
from specdec.lab.chaos.report import Report, fault_table, make_report, summary_table
from specdec.lab.chaos.run import run_chaos
from specdec.lab.chaos.server import ServerProcess

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

FAULTS = Plan(duration_s=25.0, seed=7, num_streams=16, interval_s=3.0, num_questions=6)
SCALING = Plan(duration_s=17.0, seed=7, num_streams=16, actions=SCALINGS, interval_s=3.5, num_questions=6)
LONGEST_PAUSE_S = 4.0
"""Of a stream that is moved when workers come or go: it is fed anew, on two cores that load models."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("chaos"), FAULTS.fleet) as server:
        yield server


def run(server: ServerProcess, plan: Plan) -> Report:
    result = make_report(asyncio.run(run_chaos(server, plan, print)))
    console = Console(width=110)
    console.print(summary_table(result), fault_table(result))
    for fault in result.faults:
        print(f"{fault.at_s:5.1f} s: {fault.kind}: {fault.num_paused} streams, up to {fault.pause_s:.2f} s")
    return result


@pytest.fixture(scope="module")
def scaled(server: ServerProcess) -> Report:
    """Before anything is killed."""
    return run(server, SCALING)


@pytest.fixture(scope="module")
def report(scaled: Report, server: ServerProcess) -> Report:
    return run(server, FAULTS)


def test_scaling_changes_no_text_and_no_request_fails(scaled: Report) -> None:
    assert scaled.problems == ()
    assert scaled.num_equal > SCALING.num_streams
    assert set(scaled.num_by_way) == {"http stream", "http whole", "grpc stream", "grpc whole"}


def test_both_sides_were_scaled_up_and_down(scaled: Report) -> None:
    assert set(scaled.kinds) == {f"{action} {role}" for action in SCALINGS for role in SCALED_ROLES}
    assert all(fault.num_open == SCALING.num_streams for fault in scaled.faults)
    assert all(fault.recovery_s is not None for fault in scaled.faults)


def test_scaling_pauses_no_stream_for_longer_than_a_new_prefill(scaled: Report) -> None:
    assert scaled.pauses is not None
    print(scaled.pauses)
    assert scaled.pauses.longest_s < LONGEST_PAUSE_S


def test_every_text_is_what_it_was(report: Report) -> None:
    assert report.differences == ()
    assert report.failures == {}
    assert report.num_equal > FAULTS.num_streams
    assert report.num_equal_parts > 3
    assert set(report.num_by_way) == {"http stream", "http whole", "grpc stream", "grpc whole"}


def test_faults_of_every_kind_met_running_streams(report: Report) -> None:
    kinds = {fault.kind for fault in report.faults if fault.num_open == FAULTS.num_streams}
    assert kinds == {f"{action} {role}" for role in ROLES for action in FAULTS.actions}
    # One that has just been replaced may be hit before it holds anything.
    assert sum(fault.num_sequences > 0 for fault in report.faults) >= len(report.faults) - 3


def test_drafts_were_used_during_faults_and_afterwards(report: Report) -> None:
    assert report.num_accepted_draft_tokens > report.num_accepted_afterwards > 0


def test_all_replicas_came_back_and_nothing_is_held(report: Report) -> None:
    assert report.missing == ()
    assert report.leaked == ()
    assert report.recovery_s is not None
    assert report.idle_s is not None


def test_streams_were_paused_and_went_on(report: Report) -> None:
    assert report.pauses is not None
    print(report.pauses)
    assert report.pauses.longest_s > 0.5
    assert report.problems == ()
