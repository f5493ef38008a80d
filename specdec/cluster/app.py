"""The Serve applications of a deployment file.

``import_path: specdec.cluster.app:build_app`` is a gateway with a pair of its own, ``build_pair`` a pair that
a gateway of another application serves.
"""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from specdec.cluster.deployments import CoordinatorReplica, DraftWorkerReplica, TargetWorkerReplica
from specdec.cluster.gateway import GatewayReplica, current_models
from specdec.cluster.router import ROUTER_PATH
from specdec.config import AppConfig, parse_config, parse_pair_config
from specdec.gateway.http import build_http_app

DEPLOYMENT_DEFAULTS: dict[str, Any] = {
    # A deployment file may override each of these per deployment.
    # Serve's default of 5 concurrent calls would starve streams and heartbeats; our own limits apply instead.
    "max_ongoing_requests": 1000,
    # One that hangs is replaced behind three checks in a row that were not answered in time.
    "health_check_period_s": 5.0,
    "health_check_timeout_s": 10.0,
    # Long-lived streams never end by themselves; deployment files of real clusters give them more time.
    "graceful_shutdown_wait_loop_s": 0.5,
    "graceful_shutdown_timeout_s": 5.0,
    # Ray's book-keeping, no limit on threads: by default the four start on any number of cores.
    "ray_actor_options": {"num_cpus": 0},
}
_PINNED = {
    **DEPLOYMENT_DEFAULTS,
    "request_router_config": RequestRouterConfig(request_router_class=ROUTER_PATH),
}


def build_app(args: dict[str, object]) -> Application:
    """Wire a gateway and its own pair together.

    Args:
        args: the `AppConfig` tree. Without ``draft`` there is no DraftWorker and decoding is plain.

    Raises:
        ConfigError: a key or value is wrong.
    """
    config = parse_config(args)
    ingress = serve.ingress(build_http_app(current_models, config.gateway.cors_origins))(GatewayReplica)
    return serve.deployment(ingress, name="Gateway", **DEPLOYMENT_DEFAULTS).bind(config, _pair(config))


def build_pair(args: dict[str, object]) -> Application:
    """Wire a further pair together; it has no HTTP, and ``route_prefix: null`` in the deployment file.

    Args:
        args: the `AppConfig` tree; of ``gateway`` only `PAIR_GATEWAY_KEYS`.

    Raises:
        ConfigError: a key or value is wrong.
    """
    return _pair(parse_pair_config(args))


def _pair(config: AppConfig) -> Application:
    target = serve.deployment(TargetWorkerReplica, name="TargetWorker", **_PINNED).bind(config)
    draft = None
    if config.draft is not None:
        draft = serve.deployment(DraftWorkerReplica, name="DraftWorker", **_PINNED).bind(config)
    return serve.deployment(CoordinatorReplica, name="Coordinator", **_PINNED).bind(config, target, draft)
