"""A real `specdec serve` process per fixture: started, watched and stopped as an operator would."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import grpc
import httpx
import yaml

from specdec.gateway.proto import generation_pb2 as pb
from specdec.gateway.proto import generation_pb2_grpc as pb_grpc

T = TypeVar("T")

KV_CAPACITY_TOKENS = 16_384
"""Of a model whose test asks for no other. It is claimed at start, and gigabytes of memory take seconds."""
START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def specdec_command() -> str:
    return str(Path(sys.executable).parent / "specdec")


def private_env(folder: Path) -> dict[str, str]:
    """The environment of a server that shares no credentials with anything else on the machine."""
    token = folder / "ray_token"
    if not token.exists():
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
    env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    return {**env, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "PYTHONUNBUFFERED": "1"}


class Server:
    """A served pair.

    Args:
        folder: for its configuration and log.
        args: the `AppConfig` tree; ports are added.
        flags: of `specdec serve`.
        environment: of the process, besides this one's.
    """

    def __init__(
        self,
        folder: Path,
        args: dict[str, Any],
        flags: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.http_port, self.grpc_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.http_port}"
        self.grpc_address = f"127.0.0.1:{self.grpc_port}"
        self.log_path = folder / "server.log"
        config = folder / "deployment.yaml"
        config.write_text(yaml.safe_dump(self._deployment(args)))
        with self.log_path.open("w") as log:
            self.process = subprocess.Popen(
                [specdec_command(), "serve", str(config), *flags],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**private_env(folder), **(environment or {})},
                start_new_session=True,
            )

    def _deployment(self, args: dict[str, Any]) -> dict[str, Any]:
        models = {
            role: {"kv_capacity_tokens": KV_CAPACITY_TOKENS, **args[role]}
            for role in ("target", "draft")
            if args.get(role)
        }
        gateway = {**args.get("gateway", {}), "grpc_port": self.grpc_port}
        return {
            "http_options": {"host": "127.0.0.1", "port": self.http_port},
            "logging_config": {"enable_access_log": False},
            "applications": [
                {
                    "name": "specdec",
                    "route_prefix": "/",
                    "import_path": "specdec.cluster.app:build_app",
                    "args": {**args, **models, "gateway": gateway},
                }
            ],
        }

    def wait_until_ready(self) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while "ready " not in self.log():
            assert self.process.poll() is None, f"the server ended:\n{self.log()}"
            assert time.monotonic() < deadline_s, f"not ready in {START_TIMEOUT_S} s:\n{self.log()}"
            time.sleep(0.1)

    def log(self) -> str:
        return self.log_path.read_text()

    def stop(self) -> None:
        """Ctrl-C; then nothing it started may be left."""
        processes = [self.process.pid, *descendants(self.process.pid)]
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(STOP_TIMEOUT_S)
            wait_for(lambda: not [pid for pid in processes if is_running(pid)], 10.0)
        finally:
            for pid in processes:
                if is_running(pid):
                    os.kill(pid, signal.SIGKILL)

    def status(self) -> dict[str, Any]:
        """The one coordinator's status."""
        (coordinator,) = httpx.get(f"{self.url}/status", timeout=10).json()["coordinators"]
        return dict(coordinator)

    def settled(self) -> dict[str, Any]:
        """The status once all that was served is counted: polls twice a second lie between here and there."""
        readings: list[tuple[int, ...]] = []
        counted = ("num_output_tokens", "num_draft_tokens", "num_running", "num_waiting")

        def is_settled() -> bool:
            status = self.status()
            readings.append(tuple(status[name] for name in counted))
            time.sleep(0.4)
            return len(readings) > 3 and len(set(readings[-4:])) == 1 and readings[-1][2:] == (0, 0)

        wait_for(is_settled, 60, "all is counted")
        return self.status()

    def workers(self, role: str) -> list[dict[str, Any]]:
        return list(self.status()[f"{role}s"])

    def stub(self) -> pb_grpc.GenerationServiceStub:
        return pb_grpc.GenerationServiceStub(grpc.insecure_channel(self.grpc_address))

    def is_idle(self) -> bool:
        """No sequence anywhere, no KV cache in use on any worker."""
        status = self.status()
        workers = [*status["targets"], *status["drafts"]]
        counts = [status["num_running"], status["num_waiting"]]
        counts += [worker[key] for worker in workers for key in ("num_sequences", "kv_tokens_in_use")]
        return sum(counts) == 0


def ids_of(answer: pb.GenerateResponse) -> list[int]:
    """The token ids of its one choice."""
    (choice,) = answer.choices
    return list(choice.token_ids)


def wait_for(condition: Any, timeout_s: float, what: str = "") -> float:
    """Seconds until the condition held; fails after ``timeout_s``."""
    started_s = time.monotonic()
    while not condition():
        assert time.monotonic() - started_s < timeout_s, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)
    return time.monotonic() - started_s


def wait_for_value(read: Callable[[], T | None], timeout_s: float, what: str) -> T:
    """The first reading there was: what is there in one may be gone in the next."""
    found: list[T] = []

    def is_there() -> bool:
        value = read()
        found.extend([] if value is None else [value])
        return bool(found)

    wait_for(is_there, timeout_s, what)
    return found[0]


def descendants(pid: int) -> list[int]:
    """Process ids below ``pid``, from /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found: list[int] = []
    todo = [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def is_running(pid: int) -> bool:
    try:
        return (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]) != "Z"
    except OSError:
        return False


def chat(
    text: str,
    *,
    max_tokens: int = 64,
    gamma: int | None = None,
    temperature: float = 0.0,
    seed: int | None = None,
    mode: str | None = None,
    ignore_eos: bool = False,
) -> pb.GenerateRequest:
    """A gRPC request with metrics on: its answer tells ids and acceptance."""
    request = pb.GenerateRequest(
        messages=pb.ChatMessages(messages=[pb.ChatMessage(role="user", content=text)]),
        sampling=pb.SamplingOptions(temperature=temperature, max_tokens=max_tokens, ignore_eos=ignore_eos),
        speculative=pb.SpeculativeOptions(metrics=True),
    )
    if gamma is not None:
        request.speculative.num_speculative_tokens = gamma
    if seed is not None:
        request.sampling.seed = seed
    if mode is not None:
        request.speculative.mode = pb.VerificationMode.Value(f"VERIFICATION_MODE_{mode.upper()}")
    return request
