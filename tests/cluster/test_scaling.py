"""`specdec scale`: what Serve says it has deployed, with other numbers."""

from __future__ import annotations

import pytest

from specdec.cluster.deploy_config import default_deploy_config
from specdec.cluster.scaling import parse_counts, scaled
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


@pytest.mark.parametrize("setting", ["draft", "draft=", "draft=0", "draft=-1", "draft=x", "worker=2", "=2"])
def test_what_is_no_count_is_refused(setting):
    with pytest.raises(ConfigError, match="ROLE=N"):
        parse_counts([setting])


def test_only_the_numbers_asked_for_change():
    listed = [{"name": "TargetWorker", "num_replicas": 3, "ray_actor_options": {"num_cpus": 0}}]
    schema = scaled(details(deployments=listed), {"DraftWorker": 2})
    assert replicas(schema) == {"TargetWorker": 3, "DraftWorker": 2}
    assert schema.applications[0].args == default_deploy_config().schema.applications[0].args
    assert schema.http_options.port == 8000


def test_a_deployment_that_scales_by_itself_is_left_alone():
    listed = [{"name": "DraftWorker", "autoscaling_config": {"max_replicas": 4}}]
    with pytest.raises(ConfigError, match="scales by itself"):
        scaled(details(deployments=listed), {"DraftWorker": 2})


def test_a_target_alone_has_no_draft_to_scale():
    with pytest.raises(ConfigError, match="without a draft"):
        scaled(details(args={"target": {"model": "smollm2"}}), {"DraftWorker": 2})


def test_a_cluster_without_specdec_is_said():
    with pytest.raises(ServiceUnavailable, match="0 specdec applications"):
        scaled({"applications": {}}, {"TargetWorker": 2})
