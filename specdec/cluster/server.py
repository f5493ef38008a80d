"""`specdec serve`: start or join Ray, deploy, wait until requests are served, stop what was started."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

import httpx
import ray
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ApplicationStatus, DeploymentStatus

from specdec.cluster.deploy_config import DeployConfig
from specdec.cluster.exposure import check_certificates
from specdec.errors import ConfigError, ServiceUnavailable

MIN_LOGICAL_CPUS = 8
"""Ray's CPUs are book-keeping; Serve's own actors need a few even on a small machine."""
POLL_S = 0.25
SERVE_ENVIRONMENT = {
    # One event loop per replica instead of three that hand every message on to each other.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    # The HTTP proxy reads gateways' answers over gRPC, not one Ray object per frame.
    "RAY_SERVE_PROXY_USE_GRPC": "1",
}
"""Read by every process of Serve at its start; see docs/decisions/0010-way-to-the-client.md."""
PRIVATE_ENVIRONMENT = {
    # Serve's controller looks after everything ten times a second otherwise: 4 % of one of few cores.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
}
"""In addition, where this machine is the whole cluster."""
MAX_ERROR_CHARS = 400


class RunningServer:
    """A deployed application; use as a context manager, leaving stops all that was started here.

    Args:
        config: a checked deployment file.
        address: of a Ray cluster to join; None starts a private one on this machine.
    """

    def __init__(self, config: DeployConfig, address: str | None = None) -> None:
        self._config = config
        self._address = address
        self._app_name = config.schema.applications[0].name
        self._is_ours = False
        """Whether this process put the application on a cluster it joined: only then it takes it off."""

    @property
    def http_url(self) -> str:
        options = self._config.schema.http_options
        prefix = (self._config.schema.applications[0].route_prefix or "").rstrip("/")
        scheme = "https" if options.ssl_certfile else "http"
        return f"{scheme}://{_reachable(options.host)}:{options.port}{prefix}"

    @property
    def grpc_address(self) -> str:
        gateway = self._config.app.gateway
        return f"{_reachable(gateway.grpc_host)}:{gateway.grpc_port}"

    def __enter__(self) -> RunningServer:
        if self._address is None:
            self._check_ports()
            check_certificates(self._config)
        try:
            with _no_signal_lost():
                _start_ray(self._address)
            self._deploy()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def wait_until_ready(
        self, timeout_s: float, on_status: Callable[[str], None] = lambda text: None
    ) -> None:
        """Return when a request sent now would be served, with every replica that was asked for.

        A target alone would do to serve, but a draft that cannot be loaded would then go unnoticed.

        Raises:
            ConfigError: a worker cannot start; the message is its own.
            ServiceUnavailable: not ready within ``timeout_s``.
        """
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            self._raise_if_failed()
            if self._is_running() and self._is_healthy():
                return
            on_status(self._progress())
            time.sleep(POLL_S)
        raise ServiceUnavailable(f"not ready within {timeout_s:g} s: {self._progress()}")

    def _deploy(self) -> None:
        schema = self._config.schema
        running = set(serve.status().applications) if self._address else set()
        if others := sorted(running - {self._app_name}):
            # Serve takes a file for the whole cluster and would remove what it does not name.
            raise ConfigError(
                f"this cluster serves other applications ({', '.join(others)}); "
                "use `serve deploy` with one file that names them all"
            )
        serve.start(
            proxy_location=schema.proxy_location,
            http_options=schema.http_options.model_dump(),
            grpc_options=schema.grpc_options.model_dump(),
            logging_config=schema.logging_config,
        )
        # What `serve run CONFIG` does; `serve.run` takes no deployment file.
        _get_global_client().deploy_apps(schema, _blocking=False)
        self._is_ours = self._app_name not in running

    def _stop(self) -> None:
        if self._address is not None and self._is_ours:
            serve.delete(self._app_name)
        ray.shutdown()

    def _check_ports(self) -> None:
        options, gateway = self._config.schema.http_options, self._config.app.gateway
        for key, host, port in (
            ("http port", options.host, options.port),
            ("gRPC port", gateway.grpc_host, gateway.grpc_port),
        ):
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((host, port))
                except OSError as error:
                    raise ConfigError(f"{key}: cannot listen on {host}:{port} ({error.strerror})") from error

    def _raise_if_failed(self) -> None:
        app = serve.status().applications.get(self._app_name)
        if app and app.status == ApplicationStatus.DEPLOY_FAILED:
            causes = [
                f"{name}: {_root_cause(status.message)}"
                for name, status in app.deployments.items()
                if status.status == DeploymentStatus.DEPLOY_FAILED
            ]
            raise ConfigError(f"the deployment failed: {'; '.join(causes) or _root_cause(app.message)}")

    def _is_running(self) -> bool:
        app = serve.status().applications.get(self._app_name)
        return app is not None and app.status == ApplicationStatus.RUNNING

    def _progress(self) -> str:
        app = serve.status().applications.get(self._app_name)
        if app is None or not app.deployments:
            return "starting Ray Serve"
        waiting = [name for name, status in app.deployments.items() if status.status != "HEALTHY"]
        return f"starting {', '.join(waiting)}" if waiting else "waiting for the first heartbeat"

    def _is_healthy(self) -> bool:
        try:
            # Our own server at our own address; its certificate names the host that clients use.
            return httpx.get(f"{self.http_url}/health", timeout=2.0, verify=False).status_code == 200
        except httpx.HTTPError:
            return False


def _reachable(host: str) -> str:
    """The host as a client on this machine writes it."""
    if host in ("0.0.0.0", "::", ""):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def _start_ray(address: str | None) -> None:
    # What Serve tells its driver is for its own log files; people get our lines.
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    settings = SERVE_ENVIRONMENT if address else {**SERVE_ENVIRONMENT, **PRIVATE_ENVIRONMENT}
    for name, value in settings.items():
        os.environ.setdefault(name, value)  # a private Ray's processes inherit it
    if address is not None:
        ray.init(address=address, namespace="serve", log_to_driver=False, logging_level="ERROR")
        return
    ray.init(
        address="local",  # never a cluster that happens to be running
        namespace="serve",
        num_cpus=max(MIN_LOGICAL_CPUS, os.cpu_count() or 1),
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )


@contextmanager
def _no_signal_lost() -> Iterator[None]:
    """Raise KeyboardInterrupt at the end for a SIGTERM or SIGINT that came and ended nothing.

    Ray's own handler raises, and what is raised while Python forks is ignored, but for a traceback. The
    wake-up descriptor is told of every signal, whatever becomes of its handler.
    """
    if threading.current_thread() is not threading.main_thread():  # others get no signals
        yield
        return
    reader, writer = socket.socketpair()
    with reader, writer:
        reader.setblocking(False)
        writer.setblocking(False)
        descriptor = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        hook, sys.unraisablehook = sys.unraisablehook, _ignore_exits
        try:
            yield
        finally:
            signal.set_wakeup_fd(descriptor)
            sys.unraisablehook = hook
        with suppress(BlockingIOError):
            if {signal.SIGTERM, signal.SIGINT} & set(reader.recv(4096)):
                raise KeyboardInterrupt


def _ignore_exits(unraisable: Any) -> None:
    if not issubclass(unraisable.exc_type, SystemExit | KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)


def _root_cause(message: str) -> str:
    """The sentence a person needs out of a message of Serve's, which carries whole tracebacks."""
    lines = [line.strip() for line in message.splitlines()]
    ours = [line for line in lines if line.startswith("specdec.errors.")]
    if ours:
        return ours[-1].partition(": ")[2][:MAX_ERROR_CHARS]
    if "ActorDiedError" in message or "actor died" in message.lower():
        return "its process died while it started (out of memory?); see its log in Ray's session folder"
    errors = [line for line in lines if "Error" in line.split(":")[0]]
    return (errors or lines or ["no reason given"])[-1][:MAX_ERROR_CHARS]
