"""`specdec scale`: other numbers of replicas while serving, or other bounds for the autoscaling policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from specdec.cluster.autoscaling_checks import SCALED, is_autoscaled
from specdec.cluster.deploy_checks import DEPLOYMENT_NAMES, PAIR_DEPLOYMENT_NAMES
from specdec.cluster.deploy_tree import APP_IMPORT_PATH, PAIR_IMPORT_PATH, has_gateway
from specdec.errors import ConfigError, ServiceUnavailable

ROLES = {"gateway": "Gateway", "coordinator": "Coordinator", "draft": "DraftWorker", "target": "TargetWorker"}
_ROLE_OF = {name: role for role, name in ROLES.items()}


@dataclass(frozen=True, slots=True)
class Bounds:
    """``2..4``: between these the autoscaling policy chooses."""

    min_replicas: int
    max_replicas: int


Count = int | Bounds


def parse_counts(settings: list[str]) -> dict[str, Count]:
    """``draft=2`` or ``draft=1..4`` as a deployment's name and its number of replicas, or their bounds.

    Raises:
        ConfigError: no such role, no number of at least 1, or bounds in the wrong order.
    """
    counts: dict[str, Count] = {}
    for setting in settings:
        role, _, text = setting.partition("=")
        count = _parse_count(text)
        if role not in ROLES or count is None:
            raise ConfigError(
                f"{setting!r}: ROLE=N or ROLE=MIN..MAX is expected, N at least 1, "
                f"ROLE one of {', '.join(ROLES)}"
            )
        counts[ROLES[role]] = count
    return counts


def _parse_count(text: str) -> Count | None:
    low, dots, high = text.partition("..")
    numbers = [int(part) for part in ((low, high) if dots else (low,)) if part.isdecimal()]
    if len(numbers) != (2 if dots else 1) or numbers[0] < 1 or numbers[-1] < numbers[0]:
        return None
    return Bounds(numbers[0], numbers[1]) if dots else numbers[0]


def scale(address: str, counts: Mapping[str, Count], app: str | None = None) -> None:
    """Deploy what is deployed on a Ray cluster with other numbers of replicas; nothing else restarts.

    Workers that come get sequences once they have loaded; those that go hand theirs over.

    Args:
        address: of the cluster.
        counts: as of `parse_counts`.
        app: name of the application; None: the one with the gateway.

    Raises:
        ServiceUnavailable: there is no such cluster, or it serves no specdec.
        ConfigError: a number for a deployment that scales by itself, bounds for one that does not, or there
            is no such application, or no such deployment in it.
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
        client.deploy_apps(scaled(client.get_serve_details(), counts, app))
    finally:
        ray.shutdown()


def scaled(
    details: Mapping[str, Any], counts: Mapping[str, Count], app: str | None = None
) -> ServeDeploySchema:
    """What Serve says it has deployed, with other numbers of replicas; arguments and errors as of `scale`."""
    applications = [
        dict(application["deployed_app_config"])
        for application in details["applications"].values()
        if application.get("deployed_app_config")
    ]
    application = _chosen(applications, app)
    if application.get("args", {}).get("draft") is None and "DraftWorker" in counts:
        raise ConfigError("it is served without a draft model")
    names = DEPLOYMENT_NAMES if has_gateway(application) else PAIR_DEPLOYMENT_NAMES
    if others := sorted(counts.keys() - set(names)):
        raise ConfigError(f"the application {app!r} has no {', '.join(others)}")
    deployments = {item["name"]: dict(item) for item in application.get("deployments", [])}
    for name in names:
        if name in counts:
            _set_count(deployments.setdefault(name, {"name": name}), counts[name])
    application["deployments"] = list(deployments.values())
    return ServeDeploySchema(
        applications=applications,
        proxy_location=details.get("proxy_location"),
        http_options=details.get("http_options") or {},
    )


def _chosen(applications: list[dict[str, Any]], app: str | None) -> dict[str, Any]:
    """The application with this name, or else the one with the gateway."""
    if app is None:
        ours = [application for application in applications if has_gateway(application)]
        if len(ours) != 1:
            raise ServiceUnavailable(f"the cluster serves {len(ours)} specdec gateways, not one")
        return ours[0]
    ours = [item for item in applications if item["import_path"] in (APP_IMPORT_PATH, PAIR_IMPORT_PATH)]
    for application in ours:
        if application["name"] == app:
            return application
    names = ", ".join(repr(application["name"]) for application in ours) or "none"
    raise ConfigError(f"--app {app!r}: the applications of specdec are {names}")


def _set_count(item: dict[str, Any], count: Count) -> None:
    name, role = item["name"], _ROLE_OF[item["name"]]
    bounds = item.get("autoscaling_config") or {}
    if not is_autoscaled(item):
        if isinstance(count, Bounds):
            raise ConfigError(
                f"{name} has a fixed number of replicas: give one ({role}={count.min_replicas}), or let it "
                "scale by itself with autoscaling_config in the deployment file"
            )
        item["num_replicas"] = count
        return
    if isinstance(count, int) and name in SCALED:
        low, high = bounds.get("min_replicas", 1), bounds.get("max_replicas", 1)
        raise ConfigError(
            f"{name} scales by itself, now between {low} and {high}: give other bounds "
            f"({role}={low}..{max(high, count)}), or one twice to hold it there ({role}={count}..{count})"
        )
    if isinstance(count, int):  # Its section is there for what it reports.
        count = Bounds(count, count)
    elif name not in SCALED and count.min_replicas != count.max_replicas:
        raise ConfigError(f"{name} does not scale by itself: give one number ({role}={count.min_replicas})")
    # Serve would start from initial_replicas again.
    kept = {key: value for key, value in bounds.items() if key != "initial_replicas"}
    item["autoscaling_config"] = {
        **kept,
        "min_replicas": count.min_replicas,
        "max_replicas": count.max_replicas,
    }
