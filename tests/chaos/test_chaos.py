"""A short run of `specdec bench chaos`: every text stays what it was while processes are killed and hung."""

from __future__ import annotations

import asyncio

import pytest
from rich.console import Console

from specdec.lab.chaos.plan import ROLES, Plan
from specdec.lab.chaos.report import Report, fault_table, make_report, summary_table
from specdec.lab.chaos.run import run_chaos
from specdec.lab.chaos.server import ServerProcess

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

PLAN = Plan(duration_s=52.0, seed=7, num_streams=16, interval_s=4.0, num_questions=12)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    with ServerProcess(tmp_path_factory.mktemp("chaos"), PLAN.fleet) as server:
        result = make_report(asyncio.run(run_chaos(server, PLAN, print)))
    console = Console(width=110)
    console.print(summary_table(result), fault_table(result))
    for fault in result.faults:
        print(f"{fault.at_s:5.1f} s: {fault.kind}: {fault.num_paused} streams, up to {fault.pause_s:.2f} s")
    return result


def test_every_text_is_what_it_was(report: Report) -> None:
    assert report.differences == ()
    assert report.failures == {}
    assert report.num_equal > 100
    assert report.num_equal_parts > 5
    assert set(report.num_by_way) == {"http stream", "http whole", "grpc stream", "grpc whole"}


def test_faults_of_every_kind_met_running_streams(report: Report) -> None:
    assert len(report.faults) >= 10
    kinds = {fault.kind for fault in report.faults if fault.num_open == PLAN.num_streams}
    assert kinds == {f"{action} {role}" for role in ROLES for action in PLAN.actions}
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
