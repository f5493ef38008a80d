"""The applications in the plain tree of a deployment file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from specdec.errors import ConfigError

APP_IMPORT_PATH = "specdec.cluster.app:build_app"
PAIR_IMPORT_PATH = "specdec.cluster.app:build_pair"

Application = dict[str, Any]


def applications_of(tree: Mapping[str, Any]) -> list[Application]:
    """All of them, in the file's order.

    Raises:
        ConfigError: not exactly one has the gateway, one is not built by specdec, or two have one name.
    """
    applications = tree.get("applications")
    is_list = isinstance(applications, list) and all(isinstance(item, dict) for item in applications)
    if not is_list or not applications:
        raise ConfigError("`applications` must list the application that builds specdec")
    for index, application in enumerate(applications):
        if application.get("import_path") not in (APP_IMPORT_PATH, PAIR_IMPORT_PATH):
            raise ConfigError(
                f"applications[{label(application, index)}].import_path must be {APP_IMPORT_PATH!r}, or "
                f"{PAIR_IMPORT_PATH!r} of a further pair, got {application.get('import_path')!r}"
            )
    if sum(has_gateway(application) for application in applications) != 1:
        raise ConfigError(f"`applications` must list exactly one with import_path {APP_IMPORT_PATH!r}")
    for name, count in Counter(name_of(application) for application in applications).items():
        if count > 1:
            raise ConfigError(f"`applications`: {name!r} is the name of {count} of them")
    return list(applications)


def gateway_application(tree: Mapping[str, Any]) -> Application:
    """The one with the gateway; raises as `applications_of` does."""
    return next(application for application in applications_of(tree) if has_gateway(application))


def has_gateway(application: Mapping[str, Any]) -> bool:
    """Whether it has a gateway besides its pair."""
    return application.get("import_path") == APP_IMPORT_PATH


def name_of(application: Mapping[str, Any]) -> str:
    """Its name; Serve's own for one that has none."""
    return str(application.get("name", "default"))


def label(item: object, index: int) -> str:
    """An item of a list by its name where it has one: ``deployments[DraftWorker]``."""
    name = item.get("name") if isinstance(item, Mapping) else None
    return name if isinstance(name, str) else str(index)
