"""Which replicas run, as Serve's controller last told this process.

A module of its own because Serve pickles the router class by value: what `specdec.cluster.router` defines
exists once per router, what it imports exists once per process.
"""

from __future__ import annotations

from specdec.errors import WorkerError

_replicas: dict[tuple[str, str], tuple[str, ...]] = {}


class ReplicaGone(WorkerError):
    """The replica a call was pinned to does not run any more."""


def publish(app_name: str, deployment_name: str, replica_ids: tuple[str, ...]) -> None:
    """Take note of a deployment's running replicas."""
    _replicas[app_name, deployment_name] = replica_ids


def known_replicas(app_name: str, deployment_name: str) -> tuple[str, ...]:
    """Ids of the running replicas of a deployment that this process has called at least once."""
    return _replicas.get((app_name, deployment_name), ())
