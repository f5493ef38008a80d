"""Deployment files: Ray Serve config files for specdec, checked before anything starts.

Serve ignores unknown keys in most places, so a misspelt ``num_replicaz`` deploys something other than what
was asked for. Here every key is checked against Serve's own schema, and ``args`` against
:class:`specdec.config.AppConfig`. The file stays an ordinary Serve config: ``serve deploy`` accepts it.

Nothing here talks to a cluster.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from ray.serve.schema import ServeDeploySchema

from specdec.cluster.autoscaling import AutoscalingSettings
from specdec.cluster.autoscaling_checks import autoscaling_problems, settings_problems
from specdec.config import AppConfig, parse_config
from specdec.errors import ConfigError

APP_IMPORT_PATH = "specdec.cluster.app:build_app"
DEPLOYMENT_NAMES = ("Gateway", "Coordinator", "DraftWorker", "TargetWorker")
POLICY_KWARGS = "autoscaling_policy.policy_kwargs"


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
    """A checked deployment file.

    ``schema`` is what Serve deploys; its one application's ``args`` are the plain tree behind ``app``.
    """

    schema: ServeDeploySchema
    app: AppConfig


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
    application = _only_application(tree)
    app_path = f"applications[{_label(application, 0)}]"
    args_path = f"{app_path}.args"
    _raise_if_any(
        [
            *_unknown_keys(tree, ServeDeploySchema, ""),
            *_unknown_keys(application.get("args", {}), AppConfig, args_path),
            *_deployment_problems(application),
            *autoscaling_problems(application, app_path),
            *_unknown_keys(_policy_kwargs(application), AutoscalingSettings, f"{app_path}.{POLICY_KWARGS}"),
            *_grpc_proxy_problems(tree),
            *_tls_problems(tree),
        ]
    )
    try:
        app = parse_config(application.get("args", {}))
    except ConfigError as error:
        raise ConfigError(f"{args_path}: {error}") from error
    if application.get("autoscaling_policy") is not None:
        _raise_if_any([*settings_problems(_policy_kwargs(application), app, f"{app_path}.{POLICY_KWARGS}")])

    http_options = tree.setdefault("http_options", {})
    if isinstance(http_options, dict):
        http_options.setdefault("host", "127.0.0.1")
    if app.draft is None:
        application["deployments"] = [
            item for item in application.get("deployments", []) if item["name"] != "DraftWorker"
        ]
    try:
        schema = ServeDeploySchema.model_validate(tree)
    except ValidationError as error:
        _raise_if_any([f"{_located(tree, item['loc'])}: {item['msg']}" for item in error.errors()])
        raise
    return DeployConfig(schema=schema, app=app)


def apply_overrides(values: object, overrides: Mapping[str, object]) -> dict[str, Any]:
    """Return a copy of ``values`` with each dotted path set to its value.

    A path starts with ``args`` (those of the one application) or with a top-level key of the file, as in
    ``{"args.target.model": "smollm2", "args.draft": None, "http_options.port": 8001}``. Sections on the way
    are created where they are absent or null. Paths apply in order.

    Raises:
        ConfigError: ``values`` is no deployment file, or a path leads through something that is no section.
    """
    if not isinstance(values, dict):
        raise ConfigError(f"a deployment file is a mapping with `applications`, got {values!r:.80}")
    tree: dict[str, Any] = copy.deepcopy(values)
    for dotted, value in overrides.items():
        *sections, last = dotted.split(".")
        node: Any = _only_application(tree) if dotted.split(".")[0] == "args" else tree
        for section in sections:
            if node.get(section) is None:
                node[section] = {}
            node = node[section]
            if not isinstance(node, dict):
                raise ConfigError(f"cannot set {dotted}: {section} is {node!r:.80}, not a section")
        node[last] = value
    return tree


def parse_settings(settings: Iterable[str]) -> dict[str, object]:
    """``KEY=VALUE`` as overrides for `apply_overrides`; a value is read as YAML: 4, true, null, [1, 2].

    Raises:
        ConfigError: there is no ``=``, no key, or the value is not YAML.
    """
    overrides: dict[str, object] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not all(key.split(".")):
            raise ConfigError(f"--set {setting!r}: KEY=VALUE is expected, like args.target.dtype=float32")
        try:
            overrides[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {setting!r}: the value is not YAML") from error
    return overrides


def _only_application(tree: dict[str, Any]) -> dict[str, Any]:
    applications = tree.get("applications")
    if not (isinstance(applications, list) and len(applications) == 1 and isinstance(applications[0], dict)):
        raise ConfigError("`applications` must list exactly one application, the one that builds specdec")
    application: dict[str, Any] = applications[0]
    if application.get("import_path") != APP_IMPORT_PATH:
        raise ConfigError(
            f"applications[{_label(application, 0)}].import_path must be {APP_IMPORT_PATH!r}, "
            f"got {application.get('import_path')!r}"
        )
    return application


def _unknown_keys(values: object, model: type[BaseModel], path: str) -> Iterator[str]:
    """Yield a message for each key under ``values`` that ``model`` does not declare, at any depth.

    Values of the wrong shape are passed over: validation names those.
    """
    if not isinstance(values, Mapping):
        return
    for key, value in values.items():
        here = f"{path}.{key}" if path else str(key)
        field = model.model_fields.get(key)
        if field is None:
            yield f"{here}: unknown key; {_allowed(str(key), model.model_fields)}"
            continue
        for nested in _models_in(field.annotation):
            if isinstance(value, list):
                for index, item in enumerate(value):
                    yield from _unknown_keys(item, nested, f"{here}[{_label(item, index)}]")
            else:
                yield from _unknown_keys(value, nested, here)


def _models_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _deployment_problems(application: dict[str, Any]) -> Iterator[str]:
    path = f"applications[{_label(application, 0)}].deployments"
    deployments = application.get("deployments", [])
    if not isinstance(deployments, list):
        yield f"{path}: must be a list, got {deployments!r:.80}"
        return
    seen = set()
    for index, item in enumerate(deployments):
        name = item.get("name") if isinstance(item, dict) else None
        if not isinstance(name, str):
            yield f"{path}[{index}]: must be a mapping with a name, got {item!r:.80}"
        elif name not in DEPLOYMENT_NAMES:
            yield f"{path}[{index}].name: unknown deployment {name}; {_allowed(name, DEPLOYMENT_NAMES)}"
        elif name in seen:
            yield f"{path}[{index}].name: {name} is listed twice"
        seen.add(name)


def _policy_kwargs(application: dict[str, Any]) -> object:
    policy = application.get("autoscaling_policy")
    return policy.get("policy_kwargs", {}) if isinstance(policy, dict) else {}


def _grpc_proxy_problems(tree: dict[str, Any]) -> Iterator[str]:
    options = tree.get("grpc_options")
    if isinstance(options, dict) and options.get("grpc_servicer_functions"):
        # Serve's gRPC proxy binds every interface, without TLS or authentication.
        yield (
            "grpc_options.grpc_servicer_functions: must be empty; each Gateway serves gRPC itself, "
            "at args.gateway.grpc_host and grpc_port"
        )


def _tls_problems(tree: dict[str, Any]) -> Iterator[str]:
    options = tree.get("http_options")
    if isinstance(options, dict) and bool(options.get("ssl_certfile")) != bool(options.get("ssl_keyfile")):
        # Serve takes a key without a certificate for no TLS at all.
        yield "http_options.ssl_certfile, ssl_keyfile: they go together"


def _allowed(name: str, names: Iterable[str]) -> str:
    known = sorted(names)
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"{hint}(allowed: {', '.join(known)})"


def _label(item: object, index: int) -> str:
    """An item of a list by its name where it has one: ``deployments[DraftWorker]``."""
    name = item.get("name") if isinstance(item, Mapping) else None
    return name if isinstance(name, str) else str(index)


def _located(tree: object, location: tuple[int | str, ...]) -> str:
    """A pydantic error location in the notation of :func:`_unknown_keys`."""
    path, node = "", tree
    for part in location:
        if isinstance(part, int):
            node = node[part] if isinstance(node, list) and part < len(node) else None
            path += f"[{_label(node, part)}]"
        else:
            node = node.get(part) if isinstance(node, Mapping) else None
            path += f".{part}" if path else part
    return path or "the file"


def _raise_if_any(problems: list[str]) -> None:
    if problems:
        raise ConfigError("invalid deployment file:" + "".join(f"\n  - {problem}" for problem in problems))
