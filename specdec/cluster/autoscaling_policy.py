"""Serve's side of `specdec.cluster.autoscaling`: an autoscaling policy of the whole application.

Serve's controller loads it in its own process and asks it once per control loop. What replicas report comes
from their ``record_autoscaling_stats``, every ``metrics_interval_s`` of their ``autoscaling_config``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.serve.config import AutoscalingContext

from specdec.cluster.autoscaling import Load, Replicas, parse_settings, wanted_drafts, wanted_targets

POLICY_PATH = "specdec.cluster.autoscaling_policy:PairPolicy"
"""``autoscaling_policy.policy_function`` in deployment files."""

Samples = dict[str, list[float]]


class PairPolicy:
    """Scales TargetWorker and DraftWorker, those of them that have an ``autoscaling_config``.

    Args:
        settings: `specdec.cluster.autoscaling.AutoscalingSettings`.

    Raises:
        ConfigError: a setting is wrong.
    """

    def __init__(self, **settings: object) -> None:
        self._settings = parse_settings(settings)

    def __call__(self, contexts: Mapping[Any, AutoscalingContext]) -> tuple[dict[Any, int], dict[Any, Any]]:
        """Replicas wanted, by deployment id; of those not named the numbers stay."""
        by_name = {context.deployment_name: context for context in contexts.values()}
        wanted: dict[Any, int] = {}
        target = by_name.get("TargetWorker")
        if target is None:
            return wanted, {}
        load = observed_load(by_name)
        num_targets = wanted_targets(load, self._settings, _replicas(target))
        wanted[target.deployment_id] = num_targets
        if draft := by_name.get("DraftWorker"):
            wanted[draft.deployment_id] = wanted_drafts(load, self._settings, _replicas(draft), num_targets)
        return wanted, {}


def observed_load(by_name: Mapping[str, AutoscalingContext]) -> Load:
    """Add up what replicas reported last.

    Args:
        by_name: of the deployments that scale, and of Coordinator.
    """
    targets, drafts, coordinators = (
        _latest(by_name.get(name)) for name in ("TargetWorker", "DraftWorker", "Coordinator")
    )
    return Load(
        num_targets=by_name["TargetWorker"].current_num_replicas,
        num_drafts=by_name["DraftWorker"].current_num_replicas if "DraftWorker" in by_name else 0,
        # Workers are the witnesses while a coordinator has just been replaced.
        num_running=max(_sum(coordinators, "num_running"), _sum(targets, "num_sequences")),
        num_waiting=_sum(coordinators, "num_waiting"),
        kv_tokens=max(_sum(coordinators, "kv_wanted_tokens"), _sum(targets, "kv_tokens_in_use")),
        kv_capacity_tokens=_mean(targets, "kv_capacity_tokens"),
        draft_kv_tokens=_sum(drafts, "kv_tokens_in_use"),
        draft_kv_capacity_tokens=_mean(drafts, "kv_capacity_tokens"),
        round_s=_max(coordinators, "round_s"),
        draft_share=_max(coordinators, "draft_share"),
    )


def _replicas(context: AutoscalingContext) -> Replicas:
    return Replicas(
        min_replicas=context.capacity_adjusted_min_replicas,
        max_replicas=context.capacity_adjusted_max_replicas,
        current=context.target_num_replicas,
    )


def _latest(context: AutoscalingContext | None) -> Samples:
    """By metric, each running replica's last sample.

    Not Serve's mean of a time window: a queue that stood for one second of five would look like a short one,
    and its delays smooth enough.
    """
    if context is None or context.raw_metrics is None:
        return {}
    return {
        name: [series[-1].value for series in by_replica.values() if series]
        for name, by_replica in context.raw_metrics.items()
    }


def _sum(samples: Samples, name: str) -> float:
    return float(sum(samples.get(name, ())))


def _max(samples: Samples, name: str) -> float:
    return float(max(samples.get(name, ()), default=0.0))


def _mean(samples: Samples, name: str) -> float:
    values = samples.get(name, ())
    return sum(values) / len(values) if values else 0.0
