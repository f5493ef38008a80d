"""deployments/onprem-cluster.yaml and onprem.yaml agree. tests/ray_up starts a cluster from them."""

import re
from pathlib import Path

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from specdec.cluster.deploy_config import load_deploy_config
from specdec.cluster.server import SERVE_ENVIRONMENT

ROOT = Path(__file__).parents[2]


@pytest.fixture
def cluster():
    return yaml.safe_load((ROOT / "deployments" / "onprem-cluster.yaml").read_text(encoding="utf-8"))


def start_command(cluster, role):
    (command,) = [line for line in cluster[f"{role}_start_ray_commands"] if "ray start" in line]
    return command


def test_ray_up_accepts_the_cluster_file(cluster):
    prepared = prepare_config(cluster)
    validate_config(prepared)
    assert prepared["max_workers"] == len(cluster["provider"]["worker_ips"])


def test_every_host_has_a_pool_and_every_deployment_a_host(cluster):
    pools = dict(re.findall(r"([\d.]+)\) POOL=(\w+);;", start_command(cluster, "worker")))
    assert list(pools) == cluster["provider"]["worker_ips"]
    assert "--labels=pool=head" in start_command(cluster, "head")
    (stop,) = cluster["head_setup_commands"]
    assert f"for host in {' '.join(pools)}; do" in stop
    assert f"ADDRESS={cluster['provider']['head_ip']};" in start_command(cluster, "head")
    (application,) = load_deploy_config(ROOT / "deployments" / "onprem.yaml").schema.applications
    asked = {item.ray_actor_options.label_selector["pool"] for item in application.deployments}
    assert asked == {"head", *pools.values()}


@pytest.mark.parametrize("role", ["head", "worker"])
def test_hosts_start_with_the_token_serves_settings_and_their_own_address(cluster, role):
    command = start_command(cluster, role)
    assert "RAY_AUTH_MODE=token" in command
    assert all(f"{name}={value}" in command for name, value in SERVE_ENVIRONMENT.items())
    assert "--node-ip-address=$ADDRESS" in command
    assert "0.0.0.0" not in command
    assert cluster[f"{role}_start_ray_commands"][0] == "~/venv/bin/ray stop"


def test_the_dashboard_is_on_loopback_and_the_token_is_private(cluster):
    assert "--dashboard-host=127.0.0.1" in start_command(cluster, "head")
    assert cluster["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    assert "chmod 600 ~/.ray/auth_token" in cluster["initialization_commands"]


def test_what_is_mounted_and_installed_is_what_the_other_cluster_file_mounts_and_installs(cluster):
    other = yaml.safe_load((ROOT / "cluster.yaml").read_text(encoding="utf-8"))
    assert list(cluster["file_mounts"].values()) == list(other["file_mounts"].values())
    assert any("'ray[serve]==2.60.0'" in command for command in cluster["setup_commands"])
