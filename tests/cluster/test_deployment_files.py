"""The files that operators start from: deployments/*.yaml and cluster.yaml. No cluster is started."""

import ipaddress
import tomllib
from pathlib import Path

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.serve.schema import ServeDeploySchema

from specdec.cluster.app import DEPLOYMENT_DEFAULTS
from specdec.cluster.deploy_checks import DEPLOYMENT_NAMES
from specdec.cluster.deploy_config import (
    default_deploy_config,
    load_deploy_config,
    parse_deploy_config,
)
from specdec.cluster.server import SERVE_ENVIRONMENT
from specdec.config import AppConfig
from specdec.errors import ConfigError

ROOT = Path(__file__).parents[2]
NOT_FOR_SERVE = {"onprem-cluster.yaml", "kuberay.yaml"}
"""For `ray up` and for Kubernetes: tests/ray_up and test_kuberay.py."""
DEPLOYMENT_FILES = sorted(
    path for path in (ROOT / "deployments").glob("*.yaml") if path.name not in NOT_FOR_SERVE
)


def read(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.fixture(params=DEPLOYMENT_FILES, ids=lambda path: path.name)
def deployment_file(request):
    return request.param


@pytest.fixture
def cluster():
    return read(ROOT / "cluster.yaml")


def test_there_are_deployment_files():
    assert {"local.yaml", "small-and-large-gpu.yaml"} <= {path.name for path in DEPLOYMENT_FILES}


def test_serve_itself_accepts_the_file(deployment_file):
    ServeDeploySchema.model_validate(read(deployment_file))


def test_every_key_and_every_argument_is_known(deployment_file):
    assert isinstance(load_deploy_config(deployment_file).app, AppConfig)


def test_all_four_deployments_are_configured(deployment_file):
    application = load_deploy_config(deployment_file).gateway_application
    assert [item.name for item in application.deployments] == list(DEPLOYMENT_NAMES)


def test_a_further_pair_has_a_name_and_settings_of_its_own():
    config = load_deploy_config(ROOT / "deployments" / "two-pairs.yaml")
    assert [app.model_name for app in config.apps.values()] == ["smollm2", "smollm2-float32"]
    assert [app.draft is None for app in config.apps.values()] == [False, True]


def test_every_port_is_on_loopback(deployment_file):
    config = load_deploy_config(deployment_file)
    hosts = [read(deployment_file)["http_options"]["host"], config.app.gateway.grpc_host]
    assert all(ipaddress.ip_address(host).is_loopback for host in hosts)
    assert config.schema.grpc_options.grpc_servicer_functions == []


def test_streams_may_be_many_and_access_logs_are_off(deployment_file):
    config = load_deploy_config(deployment_file).schema
    assert not config.logging_config.enable_access_log
    for item in (item for application in config.applications for item in application.deployments):
        limit = item.max_ongoing_requests if "max_ongoing_requests" in item.model_fields_set else None
        assert (limit or DEPLOYMENT_DEFAULTS["max_ongoing_requests"]) >= 1000


@pytest.mark.parametrize("name", DEPLOYMENT_NAMES)
def test_a_misspelt_setting_in_any_deployment_would_be_caught(deployment_file, name):
    values = read(deployment_file)
    item = next(d for d in values["applications"][0]["deployments"] if d["name"] == name)
    item["num_replicaz"] = item.pop("num_replicas", 1)
    ServeDeploySchema.model_validate(values)  # Serve drops the key without a word
    with pytest.raises(ConfigError, match=rf"deployments\[{name}\]\.num_replicaz: .*num_replicas\?"):
        parse_deploy_config(values)


def test_the_local_deployment_starts_on_any_number_of_cores():
    (application,) = load_deploy_config(ROOT / "deployments" / "local.yaml").schema.applications
    assert not any("ray_actor_options" in item.model_fields_set for item in application.deployments)
    assert DEPLOYMENT_DEFAULTS["ray_actor_options"] == {"num_cpus": 0}


def test_serving_without_a_file_is_serving_the_local_one():
    local = load_deploy_config(ROOT / "deployments" / "local.yaml")
    default = default_deploy_config()
    assert default.app == local.app
    assert default.schema.http_options == local.schema.http_options
    assert default.schema.proxy_location == local.schema.proxy_location


@pytest.mark.parametrize(("num_gpus", "share"), [(1, 0.5), (2, 1), (8, 1)])
def test_draft_and_target_get_a_gpu_each_or_share_the_only_one(num_gpus, share):
    (application,) = default_deploy_config(num_gpus=num_gpus).schema.applications
    shares = {item.name: item.ray_actor_options.num_gpus for item in application.deployments}
    assert shares == {"DraftWorker": share, "TargetWorker": share}


def test_gpu_streams_can_end_while_a_replica_drains():
    config = load_deploy_config(ROOT / "deployments" / "small-and-large-gpu.yaml")
    for item in config.schema.applications[0].deployments:
        assert item.graceful_shutdown_timeout_s > config.app.gateway.request_timeout_s


def test_ray_up_accepts_the_cluster_file(cluster):
    validate_config(prepare_config(cluster))


def test_a_misspelt_cluster_key_would_be_caught(cluster):
    cluster["available_node_types"]["head"]["min_worker"] = 1
    with pytest.raises(Exception, match="min_worker"):
        validate_config(prepare_config(cluster))


def test_what_ray_up_runs_keeps_to_loopback_the_token_and_pinned_wheels(cluster):
    prepared = prepare_config(cluster)
    commands = {key: value for key, value in prepared.items() if key.endswith("_commands")}
    text = "\n".join(command for group in commands.values() for command in group)
    assert "0.0.0.0" not in text
    assert "latest" not in text
    assert any(
        "ray start --head" in line and "--dashboard-host=127.0.0.1" in line for line in text.split("\n")
    )
    for role in ("head", "worker"):
        (start,) = [line for line in commands[f"{role}_start_ray_commands"] if "ray start" in line]
        assert "RAY_AUTH_MODE=token" in start
        assert all(f"{name}={value}" in start for name, value in SERVE_ENVIRONMENT.items())
    token = next(remote for remote in cluster["file_mounts"] if remote.endswith("/.ray/auth_token"))
    assert f"chmod 600 {token}" in commands["initialization_commands"]
    assert "'ray[serve]==2.60.0'" in text


def test_the_mounted_files_are_there_and_enough_to_install_from(cluster):
    local = {path for path in cluster["file_mounts"].values() if not path.startswith("~")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {"pyproject.toml", project["readme"], *project["license-files"], "specdec"} <= local
    assert [path for path in sorted(local) if not (ROOT / path).exists()] == []


def test_each_replica_of_the_gpu_deployment_fits_its_pool(cluster):
    pools = {kind["labels"]["pool"]: kind["resources"] for kind in cluster["available_node_types"].values()}
    (application,) = load_deploy_config(ROOT / "deployments" / "small-and-large-gpu.yaml").schema.applications
    for item in application.deployments:
        options = item.ray_actor_options
        resources = pools[options.label_selector["pool"]]
        assert options.num_cpus <= resources["CPU"]
        if "num_gpus" in options.model_fields_set:
            assert options.num_gpus <= resources["GPU"]
            assert resources[f"accelerator_type:{options.accelerator_type}"] == 1


def test_draft_and_target_have_pools_of_their_own_that_scale_apart(cluster):
    kinds = cluster["available_node_types"]
    workers = {
        kind["labels"]["pool"]: kind for name, kind in kinds.items() if name != cluster["head_node_type"]
    }
    assert set(workers) == {"draft", "target"}
    assert all(kind["min_workers"] < kind["max_workers"] for kind in workers.values())
    assert sum(kind["max_workers"] for kind in workers.values()) <= cluster["max_workers"]


def test_workers_of_the_gpu_deployment_scale_by_themselves_within_their_pools(cluster):
    config = load_deploy_config(ROOT / "deployments" / "small-and-large-gpu.yaml")
    (application,) = config.schema.applications
    kinds = cluster["available_node_types"].values()
    pools = {kind["labels"]["pool"]: kind for kind in kinds if "max_workers" in kind}
    bounds = {
        item.ray_actor_options.label_selector["pool"]: item.autoscaling_config
        for item in application.deployments
        if item.name in ("DraftWorker", "TargetWorker")
    }
    for pool, bound in bounds.items():
        assert bound["min_replicas"] == pools[pool]["min_workers"] < bound["max_replicas"]
        assert bound["max_replicas"] == pools[pool]["max_workers"]
    ratio = application.autoscaling_policy["policy_kwargs"]["drafts_per_target"]
    assert bounds["draft"]["max_replicas"] <= ratio * bounds["target"]["max_replicas"]
