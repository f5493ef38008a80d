"""What draws a worker in, what keeps it, what lets it go; and how Serve's contexts become a load."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ray.serve._private.autoscaling_state import _resolve_policy_callable
from ray.serve._private.common import DeploymentID, ReplicaID, TimeStampedValue
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from specdec.cluster.autoscaling import (
    AutoscalingSettings,
    Load,
    Replicas,
    parse_settings,
    wanted_drafts,
    wanted_targets,
)
from specdec.cluster.autoscaling_policy import POLICY_PATH, PairPolicy
from specdec.errors import ConfigError

ONE = Replicas(min_replicas=1, max_replicas=10, current=1)
SETTINGS = AutoscalingSettings(
    sequences_per_target=10, sequences_per_draft=20, max_round_s=0.1, drafts_per_target=1
)


def load(**amounts) -> Load:
    return Load(**{"num_targets": 1, "num_drafts": 1, "kv_capacity_tokens": 1000.0, **amounts})


def at(current: int) -> Replicas:
    return Replicas(min_replicas=1, max_replicas=10, current=current)


@pytest.mark.parametrize(
    ("amounts", "targets"),
    [
        ({}, 1),
        ({"num_running": 10}, 1),
        ({"num_running": 11}, 2),
        ({"num_running": 10, "num_waiting": 25}, 4),
        ({"kv_tokens": 800}, 1),
        ({"kv_tokens": 801}, 2),
        ({"num_running": 4, "round_s": 0.1}, 1),
        ({"num_running": 4, "round_s": 0.25}, 3),
        ({"num_running": 2, "round_s": 0.9}, 2),  # a third one would have nothing to do
        ({"num_running": 2, "num_waiting": 1, "num_targets": 3}, 4),
        ({"num_running": 10_000}, 10),
    ],
)
def test_each_of_sequences_queue_cache_and_rounds_draws_targets(amounts, targets):
    assert wanted_targets(load(**amounts), SETTINGS, ONE) == targets


def test_a_target_goes_only_where_the_others_keep_some_room():
    assert wanted_targets(load(num_running=9), SETTINGS, at(2)) == 2
    assert wanted_targets(load(num_running=8), SETTINGS, at(2)) == 1
    assert wanted_targets(load(), SETTINGS, at(7)) == 1


def test_some_may_wait_where_that_is_said():
    patient = SETTINGS.model_copy(update={"max_waiting": 3})
    waiting = {"num_running": 2, "num_targets": 2}
    assert wanted_targets(load(num_waiting=3, **waiting), patient, ONE) == 1
    assert wanted_targets(load(num_waiting=4, **waiting), patient, ONE) == 3


@pytest.mark.parametrize(
    ("amounts", "drafts"),
    [
        ({"num_running": 20}, 1),
        ({"num_running": 21}, 2),
        ({"num_running": 6, "draft_share": 0.5}, 1),
        ({"num_running": 6, "draft_share": 0.6}, 2),
        ({"num_running": 1, "draft_share": 0.9}, 1),  # one sequence has one draft
        ({"draft_kv_tokens": 900, "draft_kv_capacity_tokens": 1000}, 2),
        ({"num_running": 1000}, 4),
    ],
)
def test_sequences_a_large_share_and_a_full_cache_draw_drafts_up_to_the_ratio(amounts, drafts):
    assert wanted_drafts(load(**amounts), SETTINGS, ONE, num_targets=4) == drafts


@pytest.mark.parametrize(("num_targets", "drafts"), [(1, 1), (2, 1), (3, 1), (4, 2), (7, 3)])
def test_one_draft_may_serve_two_targets(num_targets, drafts):
    sharing = SETTINGS.model_copy(update={"drafts_per_target": 0.5})
    assert wanted_drafts(load(num_running=1000), sharing, ONE, num_targets) == drafts


def test_a_wrong_setting_is_named():
    with pytest.raises(ConfigError, match="sequences_per_targets: Extra inputs"):
        parse_settings({"sequences_per_targets": 3})
    with pytest.raises(ConfigError, match="kv_high_water: Input should be less than or equal to 1"):
        PairPolicy(kv_high_water=1.5)


# Serve's side


def context(name: str, reports: list[dict[str, float]], *, current: int | None = None) -> AutoscalingContext:
    deployment_id = DeploymentID(name, "specdec")
    ids = [ReplicaID(f"r{idx}", deployment_id) for idx in range(len(reports))]
    names = {key for report in reports for key in report}
    series = {
        key: {
            replica_id: [TimeStampedValue(1.0, 1e9), TimeStampedValue(2.0, report[key])]
            for replica_id, report in zip(ids, reports, strict=True)
            if key in report
        }
        for key in names
    }
    return AutoscalingContext(
        deployment_id=deployment_id,
        deployment_name=name,
        app_name="specdec",
        current_num_replicas=len(reports),
        target_num_replicas=len(reports) if current is None else current,
        running_replicas=ids,
        total_num_requests=0,
        total_queued_requests=0,
        aggregated_metrics={},
        raw_metrics=lambda: series,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=8,
        policy_state={},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=2.0,
        config=AutoscalingConfig(),
    )


def decide(*contexts: AutoscalingContext, **settings) -> dict[str, int]:
    policy = _resolve_policy_callable(AutoscalingPolicy(policy_function=POLICY_PATH, policy_kwargs=settings))
    wanted, state = policy({context.deployment_id: context for context in contexts})
    assert state == {}
    return {deployment_id.name: number for deployment_id, number in wanted.items()}


TARGET = {"num_sequences": 8, "kv_tokens_in_use": 100, "kv_capacity_tokens": 1000}
DRAFT = {"num_sequences": 8, "kv_tokens_in_use": 100, "kv_capacity_tokens": 1000}
COORDINATOR = {
    "num_running": 8,
    "num_waiting": 16,
    "kv_wanted_tokens": 500,
    "round_s": 0.02,
    "draft_share": 0.3,
}


def test_serve_loads_the_policy_by_its_path_and_gets_numbers_for_workers_alone():
    contexts = (context("TargetWorker", [TARGET]), context("DraftWorker", [DRAFT]))
    wanted = decide(*contexts, context("Coordinator", [COORDINATOR]), sequences_per_target=8)
    assert wanted == {"TargetWorker": 3, "DraftWorker": 1}


def test_the_last_report_counts_and_those_of_all_replicas_add_up():
    coordinators = context("Coordinator", [COORDINATOR, COORDINATOR])
    assert decide(context("TargetWorker", [TARGET]), coordinators, sequences_per_target=8) == {
        "TargetWorker": 6
    }


def test_workers_speak_for_themselves_while_no_coordinator_has_reported():
    targets = context("TargetWorker", [TARGET, {**TARGET, "kv_tokens_in_use": 1600}])
    assert decide(targets, context("Coordinator", [{}]), sequences_per_target=8) == {"TargetWorker": 3}


def test_nothing_reported_is_no_load():
    contexts = [context(name, [{}]) for name in ("TargetWorker", "DraftWorker", "Coordinator")]
    assert decide(*contexts) == {"TargetWorker": 1, "DraftWorker": 1}
    assert decide(context("TargetWorker", [], current=0)) == {"TargetWorker": 1}


def test_without_a_target_that_scales_nothing_is_decided():
    assert decide(context("DraftWorker", [DRAFT])) == {}


def test_a_target_that_has_reported_nothing_yet_does_not_draw_another():
    waiting = {**COORDINATOR, "num_running": 4, "num_waiting": 1, "kv_wanted_tokens": 0}
    half = context("TargetWorker", [TARGET, {}], current=2)
    one = context("TargetWorker", [TARGET], current=2)  # the second is starting
    assert decide(half, context("Coordinator", [waiting])) == {"TargetWorker": 3}
    assert decide(one, context("Coordinator", [waiting])) == {"TargetWorker": 2}


async def test_reports_have_the_names_that_the_policy_reads():
    from specdec.cluster.deployments import CoordinatorReplica, TargetWorkerReplica
    from tests.unit.test_coordinator import Draft, Target, running

    target = Target()
    async with running([target], [Draft()]) as system:
        coordinator = SimpleNamespace(_coordinator=system.coordinator)
        reported = await CoordinatorReplica.record_autoscaling_stats(coordinator)
        assert set(reported) == set(COORDINATOR)
        worker = await TargetWorkerReplica.record_autoscaling_stats(SimpleNamespace(_worker=target.worker))
        assert set(worker) == set(TARGET)
