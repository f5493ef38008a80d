"""What may be wrong with a deployment file: messages, each with the path of the key at fault."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel
from ray.serve.schema import ServeDeploySchema

from specdec.cluster.autoscaling import AutoscalingSettings
from specdec.cluster.autoscaling_checks import autoscaling_problems
from specdec.cluster.deploy_tree import PAIR_IMPORT_PATH, Application, has_gateway, label
from specdec.config import AppConfig
from specdec.errors import ConfigError

PAIR_DEPLOYMENT_NAMES = ("Coordinator", "DraftWorker", "TargetWorker")
DEPLOYMENT_NAMES = ("Gateway", *PAIR_DEPLOYMENT_NAMES)
POLICY_KWARGS = "autoscaling_policy.policy_kwargs"


def unknown_keys(values: object, model: type[BaseModel], path: str) -> Iterator[str]:
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
                    yield from unknown_keys(item, nested, f"{here}[{label(item, index)}]")
            else:
                yield from unknown_keys(value, nested, here)


def _models_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _deployment_problems(application: Application, path: str) -> Iterator[str]:
    path = f"{path}.deployments"
    names = DEPLOYMENT_NAMES if has_gateway(application) else PAIR_DEPLOYMENT_NAMES
    deployments = application.get("deployments", [])
    if not isinstance(deployments, list):
        yield f"{path}: must be a list, got {deployments!r:.80}"
        return
    seen = set()
    for index, item in enumerate(deployments):
        name = item.get("name") if isinstance(item, dict) else None
        if not isinstance(name, str):
            yield f"{path}[{index}]: must be a mapping with a name, got {item!r:.80}"
        elif name not in names:
            yield f"{path}[{index}].name: unknown deployment {name}; {_allowed(name, names)}"
        elif name in seen:
            yield f"{path}[{index}].name: {name} is listed twice"
        seen.add(name)


def policy_kwargs(application: Application) -> object:
    """What the file tells an application's autoscaling policy."""
    policy = application.get("autoscaling_policy")
    return policy.get("policy_kwargs", {}) if isinstance(policy, dict) else {}


def file_problems(tree: dict[str, Any]) -> Iterator[str]:
    """Yield a message for each key of the file, outside of ``args``, that would not do what it seems to."""
    yield from unknown_keys(tree, ServeDeploySchema, "")
    yield from _grpc_proxy_problems(tree)
    yield from _tls_problems(tree)


def application_problems(application: Application, path: str) -> Iterator[str]:
    """Yield a message for each setting of an application that Serve or specdec would pass over.

    Args:
        application: as it was read.
        path: how messages call it.
    """
    yield from unknown_keys(application.get("args", {}), AppConfig, f"{path}.args")
    yield from _deployment_problems(application, path)
    yield from autoscaling_problems(application, path)
    kwargs = policy_kwargs(application)
    yield from unknown_keys(kwargs, AutoscalingSettings, f"{path}.{POLICY_KWARGS}")
    if not has_gateway(application) and application.get("route_prefix", "/") is not None:
        yield f"{path}.route_prefix: must be null: its pair is served by the gateway of another application"


def pair_problems(first: str, configs: Mapping[str, AppConfig]) -> Iterator[str]:
    """Yield a message for each pair that the gateway would not serve.

    Args:
        first: name of the application with the gateway.
        configs: of all applications, by name.
    """
    path = f"applications[{first}].args.gateway.other_pairs"
    listed = configs[first].gateway.other_pairs
    further = [name for name in configs if name != first]
    for name, count in Counter(listed).items():
        if name not in further:
            yield f"{path}: no application {name!r} with import_path {PAIR_IMPORT_PATH!r} is in the file"
        if count > 1:
            yield f"{path}: {name!r} is listed twice"
    for name in further:
        if name not in listed:
            yield f"{path}: must list {name!r}, or nobody serves the pair of applications[{name}]"
    owners: dict[str, str] = {}
    for name, config in configs.items():
        owner = owners.setdefault(config.model_name, name)
        if owner != name:
            yield (
                f"applications[{name}].args.served_model_name: {config.model_name!r} is the name of "
                f"applications[{owner}] already"
            )


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


def located(tree: object, location: tuple[int | str, ...]) -> str:
    """A pydantic error location in the notation of :func:`unknown_keys`."""
    path, node = "", tree
    for part in location:
        if isinstance(part, int):
            node = node[part] if isinstance(node, list) and part < len(node) else None
            path += f"[{label(node, part)}]"
        else:
            node = node.get(part) if isinstance(node, Mapping) else None
            path += f".{part}" if path else part
    return path or "the file"


def raise_if_any(problems: Iterable[str]) -> None:
    """Raise a ConfigError that lists the problems, if there are any."""
    problems = list(problems)
    if problems:
        raise ConfigError("invalid deployment file:" + "".join(f"\n  - {problem}" for problem in problems))
