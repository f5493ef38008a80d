"""A server in a process of its own, with deadlines short enough for a run of minutes."""

from __future__ import annotations

import asyncio
import os
import random
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from specdec.lab.bench.http import Endpoint
from specdec.lab.chaos.errors import ChaosError
from specdec.lab.chaos.plan import FleetSize, Pair, Role
from specdec.lab.chaos.requests import VOCAB_SIZE

START_LIMIT_S = 240.0
STOP_LIMIT_S = 60.0
SCALE_LIMIT_S = 60.0
IDLE_WAIT_S = 90.0
"""Longer than the last of all targets or coordinators takes to be replaced on two busy cores."""
MAX_NUM_SEQS = 8
"""Of a lane: a coordinator and a target less, and sequences have to wait."""
_SPECDEC = (sys.executable, "-c", "from specdec.cli import main; main()")
_GCS_ADDRESS = re.compile(r"--gcs-address=(\S+:\d+)")
_CHECKED = {"health_check_period_s": 1.0, "health_check_timeout_s": 2.0}
"""Serve replaces a replica that has missed three checks in a row."""
_WAITS = {"idle_wait_s": IDLE_WAIT_S, "max_num_seqs": MAX_NUM_SEQS}
_SIMULATED: dict[str, Any] = {
    "target": {"model": "simulated-target", "kv_capacity_tokens": 1_000_000},
    "draft": {"model": "simulated-draft", "kv_capacity_tokens": 1_000_000},
    "simulation": {
        # Smooth laws give greedy and sampled texts alike.
        "law": "sampled",
        "acceptance_rate": 0.8,
        "vocab_size": VOCAB_SIZE,
        "target": {"step_s": 0.03},
        "draft": {"step_s": 0.004},
    },
    "coordinator": {"draft_timeout_s": 1.0, "target_timeout_s": 1.5, **_WAITS},
}
_REAL: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "pin_threads": False,
    "kv_capacity_tokens": 8192,
}
_SMOLLM2: dict[str, Any] = {
    "target": {"model": "smollm2", **_REAL},
    "draft": {"model": "smollm2-draft", **_REAL},
    "coordinator": {"draft_timeout_s": 3.0, "target_timeout_s": 8.0, **_WAITS},
}
_PAIRS: dict[Pair, dict[str, Any]] = {"simulated": _SIMULATED, "smollm2": _SMOLLM2}


class ServerProcess:
    """`specdec serve`; use as a context manager, entering waits until it is ready.

    Args:
        folder: for the deployment file, the token and the log.
        fleet: how many replicas.
        settings: ``KEY=VALUE`` of the deployment file, on top of all others.
        pair: what is served.
    """

    def __init__(
        self, folder: Path, fleet: FleetSize, settings: Sequence[str] = (), pair: Pair = "simulated"
    ) -> None:
        self._env = _private_environment(folder)
        http_port, grpc_port = free_port(), free_port()
        self.endpoint = Endpoint.parse(f"http://127.0.0.1:{http_port}")
        self.grpc_address = f"127.0.0.1:{grpc_port}"
        self.log_path = folder / "server.log"
        file = folder / "deployment.yaml"
        file.write_text(yaml.safe_dump(deployment(fleet, http_port, grpc_port, pair)), encoding="utf-8")
        self._command = [*_SPECDEC, "serve", str(file)]
        self._command += [word for setting in settings for word in ("--set", setting)]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ServerProcess:
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env,
                start_new_session=True,
            )
        try:
            self._wait_until_ready(self._process)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Ctrl-C; whatever it started and left behind is killed."""
        if self._process is None:
            return
        started = [self._process.pid, *descendants(self._process.pid)]
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        finally:
            for pid in started[1:]:
                if is_running(pid):
                    _kill(pid)

    async def resize(self, role: Role, number: int) -> None:
        """Have a role served by so many replicas from now on, by `specdec scale`.

        Raises:
            ChaosError: it failed.
        """
        assert self._process is not None
        # As willing to wait for a core as the replicas are: it must not take the streams' time.
        command = ["nice", "-n", "15", *_SPECDEC, "scale", f"{role}={number}"]
        address = ray_address(self._process.pid)
        process = await asyncio.create_subprocess_exec(
            *command,
            "--address",
            address,
            env=self._env,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            output, _ = await asyncio.wait_for(process.communicate(), SCALE_LIMIT_S)
        except TimeoutError as error:
            process.kill()
            raise ChaosError(f"scaling to {role}={number} took more than {SCALE_LIMIT_S:g} s") from error
        if process.returncode != 0:
            raise ChaosError(f"scaling to {role}={number} failed: {' '.join(output.decode().split())[-400:]}")

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline_s = time.monotonic() + START_LIMIT_S
        while "ready " not in (log := self.log_path.read_text(encoding="utf-8", errors="replace")):
            if process.poll() is not None:
                raise ChaosError(f"the server ended: {' '.join(log.split())[-400:]}")
            if time.monotonic() > deadline_s:
                raise ChaosError(f"the server was not ready in {START_LIMIT_S:g} s ({self.log_path})")
            time.sleep(0.1)


def deployment(fleet: FleetSize, http_port: int, grpc_port: int, pair: Pair = "simulated") -> dict[str, Any]:
    """A deployment file's tree."""
    args = {**_PAIRS[pair], "gateway": {"grpc_port": grpc_port}}
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": http_port},
        "logging_config": {"enable_access_log": False},
        "applications": [
            {
                "name": "specdec",
                "route_prefix": "/",
                "import_path": "specdec.cluster.app:build_app",
                "args": args,
                "deployments": [
                    {"name": "Coordinator", "num_replicas": fleet.num_coordinators, **_CHECKED},
                    {"name": "DraftWorker", "num_replicas": fleet.num_drafts, **_CHECKED},
                    {"name": "TargetWorker", "num_replicas": fleet.num_targets, **_CHECKED},
                ],
            }
        ],
    }


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on.

    Below those that the system hands out: a server binds it seconds later, and Ray asks for many meanwhile.
    """
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _private_environment(folder: Path) -> dict[str, str]:
    """Nobody else on the machine can reach this Ray."""
    token = folder / "ray_token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**env, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "PYTHONUNBUFFERED": "1"}


def is_running(pid: int) -> bool:
    """False also for one that has ended and was not waited for."""
    return _parent_and_state(pid)[1] not in ("", "Z", "X")


def ray_address(pid: int) -> str:
    """Of the private Ray of a `specdec serve` process, as it told its own processes.

    Raises:
        ChaosError: it runs none.
    """
    for descendant in descendants(pid):
        if found := _GCS_ADDRESS.search(_command_line(descendant)):
            return found[1]
    raise ChaosError("the server runs no Ray")


def descendants(pid: int) -> list[int]:
    """Processes below ``pid``, whatever group they are in."""
    parents = {
        int(entry.name): _parent_and_state(int(entry.name))[0]
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit()
    }
    found: list[int] = []
    todo = [pid]
    while todo:
        parent = todo.pop()
        below = [child for child, its_parent in parents.items() if its_parent == parent]
        found += below
        todo += below
    return found


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    except OSError:
        return ""


def _parent_and_state(pid: int) -> tuple[int, str]:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0, ""
    return int(fields[1]), fields[0]


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
