"""`specdec simulate`: virtual time, the figures it gives, and what the command writes."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from specdec.cli import app
from specdec.config import StepTimes
from specdec.errors import GenerationFailed
from specdec.lab.simulate.errors import SimulationError
from specdec.lab.simulate.report import as_json
from specdec.lab.simulate.scenario import Scenario
from specdec.lab.simulate.simulate import best_of, simulate, sweep
from specdec.lab.simulate.trace import as_trace
from specdec.lab.simulate.virtual_time import VirtualThread, run_in_virtual_time
from specdec.speculation.policy import expected_tokens

DEFAULT = Scenario(num_tokens=200)
AHEAD = replace(DEFAULT, pipeline="lookahead")


# Virtual time -------------------------------------------------------------------------------------------


def test_an_hour_is_over_at_once():
    async def main(loop):
        await asyncio.sleep(3600.0)
        return loop.time()

    began_s = time.monotonic()
    assert run_in_virtual_time(main, patience_s=1e6) == 3600.0
    assert time.monotonic() - began_s < 5.0


def test_threads_sleep_side_by_side_and_jobs_of_one_follow_each_other():
    async def main(loop):
        threads = [VirtualThread(loop), VirtualThread(loop)]
        ends = []

        def job(thread, seconds):
            thread.sleep(seconds)
            ends.append((seconds, loop.time()))
            return seconds

        calls = [(threads[0], 2.0), (threads[1], 3.0), (threads[0], 4.0)]
        futures = [loop.run_in_executor(thread, job, thread, seconds) for thread, seconds in calls]
        results = await asyncio.gather(*futures)
        for thread in threads:
            thread.shutdown()
        return results, ends

    results, ends = run_in_virtual_time(main)
    assert results == [2.0, 3.0, 4.0]
    assert ends == [(2.0, 2.0), (3.0, 3.0), (4.0, 6.0)]


def test_an_error_on_a_thread_reaches_the_caller():
    async def main(loop):
        thread = VirtualThread(loop)
        try:
            await loop.run_in_executor(thread, int, "no number")
        finally:
            thread.shutdown()

    with pytest.raises(ValueError, match="no number"):
        run_in_virtual_time(main)


def test_a_deadline_fires_while_a_thread_works_on():
    async def main(loop):
        thread = VirtualThread(loop)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(loop.run_in_executor(thread, thread.sleep, 50.0), 20.0)
        deadline_s = loop.time()
        await loop.run_in_executor(thread, int, 0)
        thread.shutdown()
        return deadline_s, loop.time()

    assert run_in_virtual_time(main) == (20.0, 50.0)


def test_a_job_that_sleeps_is_abandoned_at_the_end():
    async def main(loop):
        thread = VirtualThread(loop)
        running = thread.submit(thread.sleep, 1.0)
        waiting = thread.submit(thread.sleep, 1.0)
        await asyncio.sleep(0.5)
        thread.shutdown()
        with pytest.raises(RuntimeError, match="after shutdown"):
            thread.submit(int)
        return running.done(), waiting.cancelled()

    assert run_in_virtual_time(main) == (False, True)


def test_waiting_for_nothing_is_an_error():
    async def forever(loop):
        await loop.create_future()

    with pytest.raises(SimulationError, match="stands still"):
        run_in_virtual_time(forever)


def test_polling_for_nothing_is_an_error():
    async def poll(loop):
        for _ in itertools.count():
            await asyncio.sleep(0.5)

    with pytest.raises(SimulationError, match="no device worked for"):
        run_in_virtual_time(poll)


# Figures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pipeline", ["serial", "lookahead"])
@pytest.mark.parametrize(("gamma", "law"), [(4, "greedy"), ("auto", "greedy"), (3, "sampled")])
def test_the_same_scenario_gives_the_same_result(pipeline, gamma, law):
    scenario = Scenario(
        pipeline=pipeline, gamma=gamma, law=law, num_sequences=3, num_tokens=40, num_drafts=2, rpc_s=0.0003
    )
    one, other = simulate(scenario), simulate(scenario)
    assert one == other
    assert as_trace([one]) == as_trace([other])


def test_results_do_not_depend_on_the_process():
    code = (
        "from specdec.lab.simulate.simulate import *\n"
        "s = simulate(Scenario(pipeline='lookahead', num_sequences=2, num_tokens=40, num_drafts=2))\n"
        "print(repr(s.elapsed_s), s.num_rounds, s.prepared_share, s.texts)"
    )
    outputs = {
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
        for _ in range(2)
    }
    assert len(outputs) == 1


def test_minutes_of_slow_devices_end_in_seconds():
    slow = Scenario(draft=StepTimes(step_s=0.5), target=StepTimes(step_s=4.0), num_tokens=100)
    began_s = time.monotonic()
    simulation = simulate(slow)
    assert simulation.elapsed_s > 120.0
    assert time.monotonic() - began_s < 20.0


@pytest.mark.parametrize("gamma", [1, 4, 8])
def test_drafting_in_turn_reaches_the_ideal(gamma):
    simulation = simulate(replace(DEFAULT, gamma=gamma, num_tokens=500))
    ideal = simulation.scenario.ideal_with(simulation.mean_acceptance_length)
    assert simulation.tokens_per_s == pytest.approx(ideal, rel=0.02)


def test_plain_decoding_takes_one_step_a_token():
    simulation = simulate(replace(DEFAULT, gamma=0))
    assert simulation.tpot_s == pytest.approx(0.016)
    assert simulation.num_rounds == 200
    assert simulation.utilisation("target") == pytest.approx(1.0)
    assert simulation.utilisation("draft") == 0.0


@pytest.mark.parametrize(("alpha", "gamma"), [(0.5, 4), (0.8, 2), (0.8, 6), (0.95, 4)])
def test_accepted_lengths_follow_the_formula(alpha, gamma):
    scenario = replace(DEFAULT, acceptance_rate=alpha, gamma=gamma, num_sequences=16)
    assert simulate(scenario).mean_acceptance_length == pytest.approx(expected_tokens(alpha, gamma), rel=0.05)


def test_accepted_lengths_of_the_sampled_law_are_near_the_formula():
    scenario = Scenario(law="sampled", gamma=3, num_sequences=8, num_tokens=200)
    assert simulate(scenario).mean_acceptance_length == pytest.approx(expected_tokens(0.8, 3), rel=0.1)


@pytest.mark.parametrize("pipeline", ["serial", "lookahead"])
def test_accepted_lengths_follow_a_profile(pipeline):
    scenario = Scenario(profile=(0.9, 0.6, 0.3), gamma=4, num_sequences=16, num_tokens=150, pipeline=pipeline)
    simulation = simulate(scenario)
    assert scenario.expected_length == pytest.approx(1 + 0.9 + 0.54 + 0.162 + 0.0486)
    assert simulation.mean_acceptance_length == pytest.approx(scenario.expected_length, rel=0.05)
    assert simulation.texts == simulate(replace(scenario, gamma=0)).texts


def test_looking_ahead_is_faster_and_changes_no_text():
    serial, ahead, plain = (
        simulate(Scenario(**way)) for way in ({}, {"pipeline": "lookahead"}, {"gamma": 0})
    )
    assert ahead.tokens_per_s > 1.1 * serial.tokens_per_s > 1.1 * plain.tokens_per_s
    assert serial.texts == ahead.texts == plain.texts
    assert serial.prepared_share == 0.0
    assert ahead.prepared_share > 0.4
    assert ahead.utilisation("target") > serial.utilisation("target")


def test_a_pipeline_of_its_own_choice_changes_no_text():
    scenario = replace(DEFAULT, pipeline="auto", gamma="auto", num_sequences=4)
    assert simulate(scenario).texts == simulate(replace(scenario, gamma=0)).texts


@pytest.mark.parametrize("seed", range(12))
def test_no_load_and_no_timing_changes_a_text(seed):
    chance = random.Random(seed)
    scenario = Scenario(
        acceptance_rate=chance.choice([0.0, 0.6, 0.9, 1.0]),
        gamma=chance.choice([1, 4, 8, "auto"]),
        pipeline=chance.choice(["serial", "lookahead", "auto"]),
        num_sequences=chance.choice([1, 2, 9]),
        num_tokens=chance.choice([1, 2, 60]),
        num_prompt_tokens=chance.choice([1, 2, 700]),
        num_targets=chance.choice([1, 2, 3]),
        num_drafts=chance.choice([1, 2, 3]),
        rpc_s=chance.choice([0.0, 0.003]),
        draft=StepTimes(step_s=chance.choice([0.0, 0.002, 0.01])),
        target=StepTimes(step_s=chance.choice([0.002, 0.016]), token_s=chance.choice([0.0, 0.0005])),
        lookahead_branches=chance.choice([1, 8, 32]),
        seed=seed,
    )
    assert simulate(scenario).texts == simulate(replace(scenario, gamma=0)).texts


def test_two_targets_nearly_double_a_load_that_waits_for_one():
    loaded = replace(DEFAULT, target=StepTimes(step_s=0.001, token_s=0.002), num_sequences=8, num_drafts=2)
    one, two = simulate(loaded), simulate(replace(loaded, num_targets=2))
    assert one.utilisation("target") > 0.7
    assert 1.6 < two.tokens_per_s / one.tokens_per_s < 2.1


def test_the_network_costs_two_ways_a_call():
    near, far = simulate(DEFAULT), simulate(replace(DEFAULT, rpc_s=0.001))
    num_proposals = sum(len(done.proposals) for done in far.rounds)
    assert far.texts == near.texts
    assert far.elapsed_s - near.elapsed_s == pytest.approx(0.002 * (len(far.rounds) + num_proposals))


def test_a_target_that_misses_its_deadline_is_given_up():
    with pytest.raises(GenerationFailed):
        simulate(Scenario(gamma=0, num_tokens=4, target=StepTimes(step_s=90.0)))


def test_a_draft_that_misses_its_deadline_is_done_without():
    simulation = simulate(replace(DEFAULT, num_tokens=20, draft=StepTimes(step_s=7.0)))
    first = next(done for done in simulation.rounds if done.proposals)
    assert first.proposed_s - first.start_s == pytest.approx(5.0)
    assert simulation.draft_acceptance_rate is None
    assert simulation.texts == simulate(replace(DEFAULT, num_tokens=20, gamma=0)).texts


def test_the_sweep_finds_the_best_gamma():
    scenarios = sweep(replace(DEFAULT, num_tokens=60), [0, 1, 4, 4], ["serial", "lookahead"])
    assert [scenario.name for scenario in scenarios] == [
        *("plain", "γ = 1 serial", "γ = 1 lookahead", "γ = 4 serial", "γ = 4 lookahead")
    ]
    assert best_of([simulate(scenario) for scenario in scenarios]).scenario.name == "γ = 4 lookahead"


# The trace ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pipeline", ["serial", "lookahead", "auto"])
def test_events_of_one_track_never_overlap(pipeline):
    scenario = Scenario(pipeline=pipeline, num_sequences=4, num_tokens=60, num_targets=2, num_drafts=2)
    simulation = simulate(scenario)
    events = as_trace([simulation])["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    for tid, name in names.items():
        mine = [event for event in events if event["ph"] == "X" and event["tid"] == tid]
        if not name.startswith("coordinator"):
            assert {event["name"] for event in mine} <= {"prefill", "draft", "look-ahead", "verify"}
            assert_apart(mine)
        for kind in ("round", "propose", "verify"):
            assert_apart([event for event in mine if event["name"] == kind])


def assert_apart(events):
    ordered = sorted(events, key=lambda event: event["ts"])
    for one, other in itertools.pairwise(ordered):
        assert one["ts"] + one["dur"] <= other["ts"] + 1e-3


def test_the_trace_accounts_for_every_token_and_block():
    simulation = simulate(AHEAD)
    rounds = [event for event in as_trace([simulation])["traceEvents"] if event["name"] == "round"]
    assert sum(event["args"]["committed"] for event in rounds) == 200
    proposals = [event for event in as_trace([simulation])["traceEvents"] if event["name"] == "propose"]
    hits = sum(event["args"]["hits"] for event in proposals)
    asked = hits + sum(event["args"]["misses"] for event in proposals)
    assert hits / asked == simulation.prepared_share


# The command --------------------------------------------------------------------------------------------


def run(*options):
    return CliRunner().invoke(app, ["simulate", *options], env={"COLUMNS": "160"})


def test_the_command_reports_and_writes_everything(tmp_path):
    pytest.importorskip("matplotlib")
    figures, plot, trace = tmp_path / "f.json", tmp_path / "p.png", tmp_path / "t.json"
    result = run(
        *("--tokens", "40", "--gamma", "0,2..3,auto", "--json", str(figures)),
        *("--plot", str(plot), "--trace", str(trace)),
    )
    assert result.exit_code == 0, result.output
    assert "lookahead" in result.output
    assert result.output.count("*") == 2  # the best row, and the caption
    runs = json.loads(figures.read_text())["runs"]
    assert [(run["scenario"]["gamma"], run["scenario"]["pipeline"]) for run in runs] == [
        (0, "serial"),
        *((gamma, pipeline) for gamma in (2, 3, "auto") for pipeline in ("serial", "lookahead")),
    ]
    assert all(run["tokens_per_s"] > 0 for run in runs)
    assert plot.read_bytes().startswith(b"\x89PNG")
    processes = {event["pid"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert processes == set(range(1, 8))


def test_the_figures_are_those_of_the_library(tmp_path):
    figures = tmp_path / "f.json"
    result = run("--tokens", "40", "--gamma", "2", "--pipeline", "serial", "--json", str(figures))
    assert result.exit_code == 0, result.output
    expected = as_json([simulate(replace(DEFAULT, num_tokens=40, gamma=2))])
    assert json.loads(figures.read_text()) == json.loads(json.dumps(expected))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--alpha", "1.5"), "acceptance rate 1.5"),
        (("--profile", "0.9,x"), "--profile '0.9,x'"),
        (("--profile", "0.9", "--law", "sampled"), "greedy law"),
        (("--law", "nice"), "law 'nice': one of greedy, sampled"),
        (("--pipeline", "parallel"), "pipeline 'parallel': one of serial, lookahead"),
        (("--gamma", "4,x"), "--gamma '4,x'"),
        (("--gamma", "5..4"), "the range is empty"),
        (("--gamma", "33"), "0 to 32 or auto"),
        (("--gamma", "1..999999999"), "0 to 32 or auto"),
        (("--sequences", "0"), "0 sequences"),
        (("--targets", "-1"), "-1 target workers"),
        (("--target-step-ms", "-1"), "the target's step time -1 ms"),
        (("--target-step-ms", "0"), "must take some time"),
        (("--rpc-ms", "nan"), "network delay nan ms"),
        (("--tokens", "4", "--json", "/nowhere/f.json"), "cannot write /nowhere/f.json"),
        (("--tokens", "4", "--trace", "/nowhere/t.json"), "cannot write /nowhere/t.json"),
    ],
)
def test_bad_input_is_one_line(options, message):
    result = run("--gamma", "1", *options)
    assert isinstance(result.exception, SimulationError)
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)


def test_the_other_commands_load_neither_torch_nor_matplotlib():
    code = (
        "import sys; from specdec.cli import app\n"
        "assert not {'torch', 'matplotlib', 'numba'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
