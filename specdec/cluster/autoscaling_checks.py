"""What may be wrong with autoscaling in a deployment file.

Serve would take all of it, and scale by calls that workers do not get, or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from specdec.cluster.autoscaling import parse_settings
from specdec.cluster.autoscaling_policy import POLICY_PATH
from specdec.config import AppConfig
from specdec.errors import ConfigError

SCALED = ("DraftWorker", "TargetWorker")
WITNESSES = ("Coordinator", "TargetWorker")
"""The policy is told what replicas report only of deployments that have an ``autoscaling_config``."""


def is_autoscaled(deployment: Mapping[str, Any]) -> bool:
    """Whether a policy, not the file, says how many replicas a deployment has."""
    return bool(deployment.get("autoscaling_config")) or deployment.get("num_replicas") == "auto"


def autoscaling_problems(application: Mapping[str, Any], path: str) -> Iterator[str]:
    """Yield a message for each deployment that would not scale as it seems to.

    Args:
        application: of a deployment file, as it was read.
        path: how messages call it.
    """
    deployments = application.get("deployments")
    items = [item for item in deployments if isinstance(item, dict)] if isinstance(deployments, list) else []
    scaled = {str(item.get("name")): item for item in items if is_autoscaled(item)}
    policy = application.get("autoscaling_policy")
    if policy is None:
        for name in scaled:
            yield f"{path}.deployments[{name}] scales by itself only with {path}.autoscaling_policy"
        return
    if not isinstance(policy, dict) or policy.get("policy_function") != POLICY_PATH:
        yield f"{path}.autoscaling_policy.policy_function must be {POLICY_PATH!r}, got {policy!r:.80}"
        return
    for name in WITNESSES:
        if name not in scaled:
            yield f"{path}.deployments[{name}].autoscaling_config is needed: the policy must know of it"
    for name, item in scaled.items():
        yield from _bounds_problems(name, item, f"{path}.deployments[{name}]")


def settings_problems(values: object, app: AppConfig, path: str) -> Iterator[str]:
    """Yield a message for each setting of the policy that is wrong by itself or for this configuration.

    Args:
        values: ``policy_kwargs``.
        app: the configuration beside it.
        path: how messages call the values.
    """
    try:
        settings = parse_settings(values)
    except ConfigError as error:
        yield f"{path}: {error}"
        return
    places = app.coordinator.max_num_seqs
    if settings.sequences_per_target > places:
        yield (
            f"{path}.sequences_per_target: a target has no more than {places} sequences "
            f"(args.coordinator.max_num_seqs), so {settings.sequences_per_target:g} are never reached"
        )


def _bounds_problems(name: str, item: Mapping[str, Any], path: str) -> Iterator[str]:
    bounds = item.get("autoscaling_config")
    if not isinstance(bounds, dict):
        yield f"{path}: write autoscaling_config with min_replicas and max_replicas"
    elif name not in SCALED and bounds.get("min_replicas", 1) != bounds.get("max_replicas", 1):
        yield f"{path} does not scale by itself: min_replicas and max_replicas must be equal"
