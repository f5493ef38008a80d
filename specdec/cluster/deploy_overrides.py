"""Settings of flags and ``--set`` put into the plain tree of a deployment file."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from specdec.cluster.deploy_tree import applications_of, gateway_application, name_of
from specdec.errors import ConfigError


def apply_overrides(values: object, overrides: Mapping[str, object]) -> dict[str, Any]:
    """Return a copy of ``values`` with each dotted path set to its value.

    A path starts with ``args`` (those of the application with the gateway), with ``applications.NAME`` or
    with a top-level key of the file, as in ``{"args.target.model": "smollm2", "http_options.port": 8001,
    "applications.large.args.draft": None}``. Sections on the way are created where they are absent or null.
    Paths apply in order.

    Raises:
        ConfigError: ``values`` is no deployment file, or a path leads through something that is no section.
    """
    if not isinstance(values, dict):
        raise ConfigError(f"a deployment file is a mapping with `applications`, got {values!r:.80}")
    tree: dict[str, Any] = copy.deepcopy(values)
    for dotted, value in overrides.items():
        node, (*sections, last) = _start(tree, dotted)
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


def _start(tree: dict[str, Any], dotted: str) -> tuple[Any, list[str]]:
    """Where a path begins, and what of it is left to go."""
    first, *rest = path = dotted.split(".")
    if first == "args":
        return gateway_application(tree), path
    if first == "applications" and len(rest) > 1:
        named = {name_of(application): application for application in applications_of(tree)}
        if rest[0] not in named:
            raise ConfigError(f"cannot set {dotted}: the applications are {', '.join(sorted(named))}")
        return named[rest[0]], rest[1:]
    return tree, path
