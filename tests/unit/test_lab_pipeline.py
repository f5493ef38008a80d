"""`specdec bench pipeline`: what is measured on a system in process, and which figures come of it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from specdec.cluster.deploy_config import parse_deploy_config
from specdec.config import SimulationConfig
from specdec.coordinator.local import run_local
from specdec.engine.simulated_pair import make_runner
from specdec.lab.errors import BenchError
from specdec.lab.pipeline import scaling
from specdec.lab.pipeline.measure import Choice, Measured, measure
from specdec.lab.pipeline.plan import (
    AUTO,
    LOOKAHEAD,
    ONE,
    PLAIN,
    SCENARIOS,
    SERIAL,
    USELESS,
    figures,
    ideal_tokens_per_s,
)
from specdec.lab.pipeline.run import deployment, write_json
from specdec.messages import CoordinatorStatus
from tests.laws import app_config

MEASURED = Measured(
    tokens_per_s=100.0, tokens_per_round=3.0, round_s=0.03, acceptance_rate=0.5, prepared_rate=0.0
)
FAST = SimulationConfig.model_validate(
    {"vocab_size": 100, "target": {"step_s": 0.002}, "draft": {"step_s": 0.0002}}
)


class LocalBackend:
    """A coordinator in this process in the place of a deployed one."""

    def __init__(self, client):
        self._client = client

    def generate(self, request, not_before):
        return self._client.batches(request, not_before)

    def is_ready(self):
        return True

    def statuses(self) -> tuple[CoordinatorStatus, ...]:
        return ()


@pytest.mark.parametrize("choice", [PLAIN, SERIAL, LOOKAHEAD, Choice(gamma=2, pipeline="serial")], ids=str)
async def test_what_is_measured_is_what_was_asked_for(choice):
    runners = [make_runner(FAST, role, kv_capacity_tokens=100_000) for role in ("target", "draft")]
    async with run_local(app_config(8, pipeline="auto"), *runners) as system:
        measured = await measure(LocalBackend(system.client), choice, FAST, 3, warm_up_s=0.1, counted_s=0.5)
    assert measured.tokens_per_s == pytest.approx(3 * measured.tokens_per_round / measured.round_s)
    assert measured.round_s >= 0.002
    assert 1.0 <= measured.tokens_per_round <= choice.gamma + 1
    assert (measured.tokens_per_round > 1.3) == (choice.gamma > 0)
    assert (measured.prepared_rate > 0.3) == (choice.pipeline == "lookahead")


async def test_a_request_that_fails_ends_the_measurement():
    class Broken(LocalBackend):
        async def generate(self, request, not_before):
            raise BenchError("broken")
            yield

    with pytest.raises(BenchError, match="broken"):
        await measure(Broken(None), PLAIN, FAST, 2, warm_up_s=5.0, counted_s=5.0)


def test_figures_are_ratios_of_what_was_measured():
    results = {
        (ONE.name, SERIAL): MEASURED,
        (ONE.name, LOOKAHEAD): replace(MEASURED, tokens_per_s=140.0),
        (USELESS.name, PLAIN): replace(MEASURED, tokens_per_s=60.0),
        (USELESS.name, AUTO): replace(MEASURED, tokens_per_s=57.0),
    }
    lines = {line.name: line for line in figures(results)}
    assert ideal_tokens_per_s(ONE, MEASURED) == pytest.approx(3.0 / 0.024)
    assert lines["serial ÷ ideal, 1 sequence"].value == pytest.approx(0.8)
    assert not lines["serial ÷ ideal, 1 sequence"].is_reached
    assert lines["lookahead ÷ serial, 1 sequence"].value == pytest.approx(1.4)
    assert lines["lookahead ÷ serial, 1 sequence"].is_reached
    assert lines["auto ÷ plain, useless draft"].value == pytest.approx(0.95)
    assert len(lines) == 3


def test_scaling_is_told_by_ratios_of_rates_and_the_slowest_return():
    def rates(*values):
        return [replace(MEASURED, tokens_per_s=value) for value in values]

    names = [(scenario.name, SERIAL) for scenario in scaling.SCENARIOS]
    results = dict(zip(names, rates(100.0, 185.0, 200.0, 300.0), strict=True))
    losses = [
        scaling.Loss(plain_rate=50.0, rate_before=90.0, rate_without=rate, replaced_s=5.0, back_s=back_s)
        for rate, back_s in ((49.0, 1.0), (48.0, 11.0), (40.0, 2.0))
    ]
    lines = list(scaling.scaling_figures(results, losses))
    assert [line.value for line in lines] == pytest.approx([1.85, 1.5, 0.96, 11.0])
    assert [line.is_reached for line in lines] == [True, False, True, False]


def test_every_scenario_can_be_deployed():
    for scenario in (*SCENARIOS, *scaling.SCENARIOS, scaling.LOSS):
        for gamma in (8, "auto"):
            app = parse_deploy_config(deployment(scenario, gamma)).app
            assert app.simulation == scenario.simulation
            deployed = parse_deploy_config(deployment(scenario, gamma)).schema.applications[0].deployments
            counts = {item.name: item.num_replicas for item in deployed}
            assert counts == {"TargetWorker": scenario.num_targets, "DraftWorker": scenario.num_drafts}
            assert app.coordinator.max_num_seqs >= scenario.num_sequences


def test_results_are_written_with_all_that_was_measured(tmp_path):
    results = {(ONE.name, SERIAL): MEASURED}
    write_json(tmp_path / "out.json", results, list(figures(results)), {"rounds": 3})
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["rounds"] == 3
    assert content["measured"][0]["choice"] == "serial γ=4"
    with pytest.raises(BenchError, match="cannot write"):
        write_json(tmp_path / "no" / "out.json", {}, [], {})
