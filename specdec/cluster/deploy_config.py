"""Deployment files: Ray Serve config files for specdec, checked before anything starts.

Serve ignores unknown keys in most places, so a misspelt ``num_replicaz`` deploys something other than what
was asked for. Here every key is checked against Serve's own schema, and ``args`` against
:class:`specdec.config.AppConfig`. The file stays an ordinary Serve config: ``serve deploy`` accepts it.

Nothing here talks to a cluster.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

from specdec.cluster.autoscaling_checks import settings_problems
from specdec.cluster.deploy_checks import (
    POLICY_KWARGS,
    application_problems,
    file_problems,
    located,
    pair_problems,
    policy_kwargs,
    raise_if_any,
)
from specdec.cluster.deploy_overrides import apply_overrides
from specdec.cluster.deploy_tree import (
    APP_IMPORT_PATH,
    Application,
    applications_of,
    gateway_application,
    has_gateway,
    label,
    name_of,
)
from specdec.config import AppConfig, parse_config, parse_pair_config
from specdec.errors import ConfigError

DEFAULT_DEPLOYMENT: dict[str, Any] = {
    "proxy_location": "HeadOnly",
    "http_options": {"host": "127.0.0.1", "port": 8000},
    "logging_config": {"enable_access_log": False},
    "applications": [
        {
            "name": "specdec",
            "route_prefix": "/",
            "import_path": APP_IMPORT_PATH,
            "args": {"target": {"model": "smollm2"}, "draft": {"model": "smollm2-draft"}},
        }
    ],
}
"""What `specdec serve` without a file deploys; ``deployments/local.yaml`` says the same, for editing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployConfig:
    """A checked deployment file."""

    schema: ServeDeploySchema
    """What Serve deploys."""
    app: AppConfig
    """The ``args`` of the application with the gateway."""
    app_name: str
    """That application's name."""
    other_pairs: Mapping[str, AppConfig] = field(default_factory=dict)
    """The ``args`` of the other applications, by their names."""

    @property
    def apps(self) -> dict[str, AppConfig]:
        """The ``args`` of all applications, that with the gateway first."""
        return {self.app_name: self.app, **self.other_pairs}

    @property
    def gateway_application(self) -> ServeApplicationSchema:
        """The application with the gateway."""
        return next(item for item in self.schema.applications if item.name == self.app_name)


def load_deploy_config(path: Path | str, overrides: Mapping[str, object] | None = None) -> DeployConfig:
    """Read a deployment file, apply ``overrides`` and check the result.

    Args:
        path: a YAML file in Serve's config format.
        overrides: see :func:`apply_overrides`.

    Raises:
        ConfigError: the file cannot be read, or :func:`parse_deploy_config` refuses what it says.
    """
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the deployment file {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    try:
        return parse_deploy_config(values, overrides)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def default_deploy_config(
    overrides: Mapping[str, object] | None = None, *, num_gpus: int = 0
) -> DeployConfig:
    """The embedded pair on this machine, with overrides applied.

    Args:
        overrides: see :func:`apply_overrides`.
        num_gpus: GPUs of this machine: draft and target get one each, or share the only one.
    """
    tree = copy.deepcopy(DEFAULT_DEPLOYMENT)
    if num_gpus > 0:
        options = {"num_cpus": 0, "num_gpus": 1 if num_gpus > 1 else 0.5}
        tree["applications"][0]["deployments"] = [
            {"name": name, "ray_actor_options": options} for name in ("DraftWorker", "TargetWorker")
        ]
    return parse_deploy_config(tree, overrides)


def parse_deploy_config(values: object, overrides: Mapping[str, object] | None = None) -> DeployConfig:
    """Check the plain tree of a deployment file and return it typed. ``values`` is left as it is.

    Two things differ from what Serve would do. An absent HTTP host means loopback, not every interface.
    Settings for ``DraftWorker`` are dropped when ``args`` name no draft model: Serve refuses settings for a
    deployment that the application does not build.

    Raises:
        ConfigError: listing every unknown key with the allowed ones, or every bad value.
    """
    tree = apply_overrides(values, overrides or {})
    applications = {
        f"applications[{label(item, index)}]": item for index, item in enumerate(applications_of(tree))
    }
    raise_if_any(
        [
            *file_problems(tree),
            *(text for path, item in applications.items() for text in application_problems(item, path)),
        ]
    )
    configs = {name_of(item): _parse_args(item, path) for path, item in applications.items()}
    first = name_of(gateway_application(tree))
    raise_if_any(pair_problems(first, configs))

    http_options = tree.setdefault("http_options", {})
    if isinstance(http_options, dict):
        http_options.setdefault("host", "127.0.0.1")
    try:
        schema = ServeDeploySchema.model_validate(tree)
    except ValidationError as error:
        raise_if_any(f"{located(tree, item['loc'])}: {item['msg']}" for item in error.errors())
        raise
    app = configs.pop(first)
    return DeployConfig(schema=schema, app=app, app_name=first, other_pairs=configs)


def _parse_args(application: Application, path: str) -> AppConfig:
    """Check ``args`` and what depends on them; drops settings for a DraftWorker that there is not."""
    parse = parse_config if has_gateway(application) else parse_pair_config
    try:
        config = parse(application.get("args", {}))
    except ConfigError as error:
        raise ConfigError(f"{path}.args: {error}") from error
    if application.get("autoscaling_policy") is not None:
        raise_if_any(settings_problems(policy_kwargs(application), config, f"{path}.{POLICY_KWARGS}"))
    if config.draft is None:
        application["deployments"] = [
            item for item in application.get("deployments", []) if item["name"] != "DraftWorker"
        ]
    return config
