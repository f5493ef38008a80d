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
from ray.serve._private.application_state import StatusOverview
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
    # A replica that hangs is killed, not asked to finish: its device is wanted by its replacement.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    # By default Ray starts its workers at nice 15: whatever else runs would come before the models.
    "RAY_worker_niceness": "0",
}
"""Read by Ray and every process of Serve at its start; see docs/decisions/0010-way-to-the-client.md."""
PRIVATE_ENVIRONMENT = {
    # Serve's controller looks after everything ten times a second otherwise: 4 % of one of few cores.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
}
"""In addition, where this machine is the whole cluster."""
MAX_ERROR_CHARS = 400


class RunningServer:
    """A deployed file's applications; use as a context manager, leaving stops all that was started here.

    Args:
        config: a checked deployment file.
        address: of a Ray cluster to join; None starts a private one on this machine.
    """

    def __init__(self, config: DeployConfig, address: str | None = None) -> None:
        self._config = config
        self._address = address
        self._ours: set[str] = set()
        """Applications that this process put on a cluster it joined: only these it takes off."""

    @property
    def http_url(self) -> str:
        options = self._config.schema.http_options
        prefix = (self._config.gateway_application.route_prefix or "").rstrip("/")
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
        """Return when a request to any pair would be served, with every replica that was asked for.

        A target alone would do to serve, but a draft that cannot be loaded would then go unnoticed.

        Raises:
            ConfigError: a worker cannot start; the message is its own.
            ServiceUnavailable: not ready within ``timeout_s``.
        """
        deadline_s = time.monotonic() + timeout_s
        progress = ""
        while time.monotonic() < deadline_s:
            apps = self._applications()
            self._raise_if_failed(apps)
            is_running = self._is_running(apps)
            unserved = self._unserved() if is_running else []
            if is_running and not unserved:
                return
            progress = self._progress(apps, unserved)
            on_status(progress)
            time.sleep(POLL_S)
        raise ServiceUnavailable(f"not ready within {timeout_s:g} s: {progress}")

    def _deploy(self) -> None:
        schema = self._config.schema
        running = set(serve.status().applications) if self._address else set()
        names = set(self._config.apps)
        if others := sorted(running - names):
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
        self._ours = names - running

    def _stop(self) -> None:
        if self._address is not None:
            for name in self._ours:
                serve.delete(name)
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

    def _raise_if_failed(self, apps: list[StatusOverview]) -> None:
        for app in apps:
            if app.app_status.status == ApplicationStatus.DEPLOY_FAILED:
                causes = [
                    f"{deployment.name}: {_root_cause(deployment.message)}"
                    for deployment in app.deployment_statuses
                    if deployment.status == DeploymentStatus.DEPLOY_FAILED
                ]
                where = f" of {app.name}" if self._config.other_pairs else ""
                reason = "; ".join(causes) or _root_cause(app.app_status.message)
                raise ConfigError(f"the deployment{where} failed: {reason}")

    def _is_running(self, apps: list[StatusOverview]) -> bool:
        return len(apps) == len(self._config.apps) and all(
            app.app_status.status == ApplicationStatus.RUNNING for app in apps
        )

    def _progress(self, apps: list[StatusOverview], unserved: list[str]) -> str:
        if not any(app.deployment_statuses for app in apps):
            return "starting Ray Serve"
        waiting = [
            f"{deployment.name} of {app.name}" if self._config.other_pairs else deployment.name
            for app in apps
            for deployment in app.deployment_statuses
            if deployment.status != DeploymentStatus.HEALTHY
        ]
        if waiting:
            return f"starting {', '.join(waiting)}"
        return f"waiting until the gateway serves {', '.join(unserved)}" if unserved else "starting"

    def _applications(self) -> list[StatusOverview]:
        """Those of the file that Serve knows of.

        `serve.status` pickles every deployment's router anew: seconds of CPU in the course of a start.
        """
        known = _get_global_client().list_serve_statuses()
        return [app for app in known if app.name in self._config.apps]

    def _unserved(self) -> list[str]:
        """Models that the gateway does not serve, or not yet."""
        try:
            # Our own server at our own address; its certificate names the host that clients use.
            answer = httpx.get(f"{self.http_url}/health", timeout=2.0, verify=False)
            ready = set(answer.json()["ready_models"]) if answer.status_code == 200 else set()
        except (httpx.HTTPError, ValueError, KeyError):
            ready = set()
        return [app.model_name for app in self._config.apps.values() if app.model_name not in ready]


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
