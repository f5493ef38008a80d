"""`specdec scale`: what Serve says it has deployed, with other numbers."""

from __future__ import annotations

import pytest

from specdec.cluster.deploy_config import default_deploy_config
from specdec.cluster.scaling import Bounds, parse_counts, scaled
from specdec.errors import ConfigError, ServiceUnavailable


def details(**changes):
    schema = default_deploy_config().schema
    (application,) = schema.model_dump(mode="json", exclude_unset=True)["applications"]
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": 8000},
        "applications": {"specdec": {"deployed_app_config": {**application, **changes}}},
    }


def replicas(schema):
    return {item.name: item.num_replicas for item in schema.applications[0].deployments}


def test_roles_are_deployments():
    assert parse_counts(["draft=2", "target=1", "coordinator=3", "gateway=1"]) == {
        "DraftWorker": 2,
        "TargetWorker": 1,
        "Coordinator": 3,
        "Gateway": 1,
    }


def test_bounds_are_two_numbers():
    assert parse_counts(["draft=1..4", "target=2..2"]) == {
        "DraftWorker": Bounds(1, 4),
        "TargetWorker": Bounds(2, 2),
    }


@pytest.mark.parametrize(
    "setting",
    [
        *("draft", "draft=", "draft=0", "draft=-1", "draft=x", "worker=2", "=2"),
        *("draft=0..2", "draft=3..2", "draft=1..", "draft=..2", "draft=1..2..3", "draft=1..x"),
    ],
)
def test_what_is_no_count_is_refused(setting):
    with pytest.raises(ConfigError, match="ROLE=N"):
        parse_counts([setting])


def test_only_the_numbers_asked_for_change():
    listed = [{"name": "TargetWorker", "num_replicas": 3, "ray_actor_options": {"num_cpus": 0}}]
    schema = scaled(details(deployments=listed), {"DraftWorker": 2})
    assert replicas(schema) == {"TargetWorker": 3, "DraftWorker": 2}
    assert schema.applications[0].args == default_deploy_config().schema.applications[0].args
    assert schema.http_options.port == 8000


SCALED = [{"name": "DraftWorker", "autoscaling_config": {"max_replicas": 4, "metrics_interval_s": 1}}]


def test_a_number_for_what_scales_by_itself_is_refused_with_the_two_ways_there_are():
    with pytest.raises(ConfigError) as caught:
        scaled(details(deployments=SCALED), {"DraftWorker": 6})
    assert "scales by itself, now between 1 and 4" in str(caught.value)
    assert "draft=1..6" in str(caught.value)
    assert "draft=6..6" in str(caught.value)


def test_bounds_of_what_scales_by_itself_change_and_nothing_else():
    listed = [{**SCALED[0], "autoscaling_config": {**SCALED[0]["autoscaling_config"], "initial_replicas": 3}}]
    policy = {"policy_function": "m:p", "policy_kwargs": {"spare": 0.1}}
    schema = scaled(
        details(deployments=listed, autoscaling_policy=policy),
        {"DraftWorker": Bounds(2, 8), "TargetWorker": 3},
    )
    draft, target = schema.applications[0].deployments
    assert draft.autoscaling_config == {"min_replicas": 2, "max_replicas": 8, "metrics_interval_s": 1}
    assert target.num_replicas == 3
    assert schema.applications[0].autoscaling_policy == policy


def test_bounds_for_a_fixed_number_are_refused():
    with pytest.raises(ConfigError, match=r"fixed number of replicas: give one \(target=2\)"):
        scaled(details(), {"TargetWorker": Bounds(2, 4)})


def test_a_coordinator_that_reports_still_has_a_number():
    listed = [{"name": "Coordinator", "autoscaling_config": {"min_replicas": 1, "max_replicas": 1}}]
    (item,) = scaled(details(deployments=listed), {"Coordinator": 2}).applications[0].deployments
    assert item.autoscaling_config == {"min_replicas": 2, "max_replicas": 2}
    with pytest.raises(ConfigError, match="Coordinator does not scale by itself"):
        scaled(details(deployments=listed), {"Coordinator": Bounds(1, 2)})


def test_a_target_alone_has_no_draft_to_scale():
    with pytest.raises(ConfigError, match="without a draft"):
        scaled(details(args={"target": {"model": "smollm2"}}), {"DraftWorker": 2})


def test_a_cluster_without_specdec_is_said():
    with pytest.raises(ServiceUnavailable, match="0 specdec gateways"):
        scaled({"applications": {}}, {"TargetWorker": 2})
