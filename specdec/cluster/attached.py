"""A deployment of our own with this process in a gateway's place: for measurements beside HTTP and gRPC."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ray import serve

from specdec.cluster.backend import ServeBackend
from specdec.cluster.deploy_config import parse_deploy_config
from specdec.cluster.server import RunningServer

READY_TIMEOUT_S = 120.0


@contextmanager
def attached(tree: dict[str, object]) -> Iterator[Callable[[], ServeBackend]]:
    """Serve a deployment file's tree on a private Ray until the context ends.

    Yields:
        Makes a backend; to be called, and `ServeBackend.start`ed, in a running event loop.

    Raises:
        ConfigError: the tree is wrong, or a worker cannot start.
        ServiceUnavailable: it is not ready in time.
    """
    deploy = parse_deploy_config(tree)
    with RunningServer(deploy) as server:
        server.wait_until_ready(READY_TIMEOUT_S)
        yield lambda: ServeBackend(serve.get_deployment_handle("Coordinator", deploy.app_name), deploy.app)
