"""`specdec scale`: other numbers of replicas while serving."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from specdec.cluster.deploy_config import APP_IMPORT_PATH, DEPLOYMENT_NAMES
from specdec.errors import ConfigError, ServiceUnavailable

ROLES = {"gateway": "Gateway", "coordinator": "Coordinator", "draft": "DraftWorker", "target": "TargetWorker"}


def parse_counts(settings: list[str]) -> dict[str, int]:
    """``draft=2`` as a deployment's name and its number of replicas.

    Raises:
        ConfigError: no such role, or no number of at least 1.
    """
    counts: dict[str, int] = {}
    for setting in settings:
        role, equals, number = setting.partition("=")
        if not equals or role not in ROLES or not number.isdecimal() or int(number) < 1:
            raise ConfigError(
                f"{setting!r}: ROLE=N is expected, N at least 1, ROLE one of {', '.join(ROLES)}"
            )
        counts[ROLES[role]] = int(number)
    return counts


def scale(address: str, counts: Mapping[str, int]) -> None:
    """Deploy what is deployed on a Ray cluster with other numbers of replicas; nothing else restarts.

    Workers that come get sequences once they have loaded; those that go hand theirs over.

    Raises:
        ServiceUnavailable: there is no such cluster, or it serves no specdec.
        ConfigError: a deployment scales by itself, or the application has no such deployment.
    """
    try:
        ray.init(address=address, namespace="serve", log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ServiceUnavailable(f"no Ray cluster at {address}: {error}") from error
    try:
        serve.status()  # connects to Serve, if there is one
        client = _get_global_client(raise_if_no_controller_running=False)
        if client is None:
            raise ServiceUnavailable(f"nothing is served on the Ray cluster at {address}")
        client.deploy_apps(scaled(client.get_serve_details(), counts))
    finally:
        ray.shutdown()


def scaled(details: Mapping[str, Any], counts: Mapping[str, int]) -> ServeDeploySchema:
    """What Serve says it has deployed, with other numbers of replicas.

    Raises:
        ServiceUnavailable: there is no specdec in it.
        ConfigError: a deployment scales by itself, or is not in it.
    """
    applications = [
        dict(application["deployed_app_config"])
        for application in details["applications"].values()
        if application.get("deployed_app_config")
    ]
    ours = [application for application in applications if application["import_path"] == APP_IMPORT_PATH]
    if len(ours) != 1:
        raise ServiceUnavailable(f"the cluster serves {len(ours)} specdec applications, not one")
    (application,) = ours
    if application.get("args", {}).get("draft") is None and "DraftWorker" in counts:
        raise ConfigError("it is served without a draft model")
    deployments = {item["name"]: dict(item) for item in application.get("deployments", [])}
    for name in DEPLOYMENT_NAMES:
        if name in counts:
            item = deployments.setdefault(name, {"name": name})
            if item.get("autoscaling_config"):
                raise ConfigError(f"{name} scales by itself (autoscaling_config); change its bounds instead")
            item["num_replicas"] = counts[name]
    application["deployments"] = list(deployments.values())
    return ServeDeploySchema(
        applications=applications,
        proxy_location=details.get("proxy_location"),
        http_options=details.get("http_options") or {},
    )
