"""CPU time per output token of every process of a served system, and the time of a round.

The target is a random model of one tiny layer with SmolLM2's vocabulary unless one is named, so that what is
left is the way from target to client. CPU time tells more than wall time on a machine that does other things.

    python -m benchmarks.serving_cost --streams 1 8 32
    python -m benchmarks.serving_cost --target smollm2 --setting RAY_SERVE_PROXY_USE_GRPC=0
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import torch
import yaml
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.common import save
from specdec.models import load_tokenizer

WARM_UP_S = 2.0
MAX_TOKENS = 8000
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PROCESSES = {
    "ServeReplica:specdec:Gateway": "gateway",
    "ServeReplica:specdec:Coordinator": "coordinator",
    "ServeReplica:specdec:TargetWorker": "target",
    "ServeReplica:specdec:DraftWorker": "draft",
    "ProxyActor": "proxy",
    "haproxy": "haproxy",
    "ServeController": "controller",
}
"""Part of a command line to what it is called here; all others are ``ray``."""


def tiny_target(folder: Path) -> str:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    load_tokenizer("smollm2").save_pretrained(folder)
    return str(folder)


class Server:
    """`specdec serve` with a deployment file of its own."""

    def __init__(self, folder: Path, args: dict[str, Any], settings: dict[str, str]) -> None:
        self.port, grpc_port = free_port(), free_port()
        deployment = {
            "http_options": {"host": "127.0.0.1", "port": self.port},
            "logging_config": {"enable_access_log": False},
            "applications": [
                {
                    "name": "specdec",
                    "route_prefix": "/",
                    "import_path": "specdec.cluster.app:build_app",
                    "args": {**args, "gateway": {**args.get("gateway", {}), "grpc_port": grpc_port}},
                }
            ],
        }
        config = folder / "deployment.yaml"
        config.write_text(yaml.safe_dump(deployment))
        command = [str(Path(sys.executable).parent / "specdec"), "serve", str(config)]
        self._process = subprocess.Popen(
            command, env={**os.environ, **settings}, stdout=subprocess.DEVNULL, cwd=folder
        )

    def wait_until_ready(self, timeout_s: float = 180.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s and self._process.poll() is None:
            try:
                if httpx.get(f"http://127.0.0.1:{self.port}/health", timeout=2).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.5)
        raise RuntimeError("the server did not become ready")

    def status(self) -> dict[str, Any]:
        (coordinator,) = httpx.get(f"http://127.0.0.1:{self.port}/status", timeout=10).json()["coordinators"]
        return dict(coordinator)

    def cpu_s(self) -> Counter[str]:
        """CPU seconds so far, by process."""
        return cpu_s_of([self._process.pid, *descendants(self._process.pid)])

    def stop(self) -> None:
        self._process.send_signal(signal.SIGINT)
        self._process.wait(60)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def stat_fields(pid: str | int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def descendants(pid: int) -> list[int]:
    parents = {
        int(entry.name): int(fields[1])
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and (fields := stat_fields(entry.name))
    }
    found, todo = [], [pid]
    while todo:
        parent = todo.pop()
        below = [child for child, its_parent in parents.items() if its_parent == parent]
        found += below
        todo += below
    return found


def cpu_s_of(pids: list[int]) -> Counter[str]:
    used: Counter[str] = Counter()
    for pid in pids:
        if fields := stat_fields(pid):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            name = next((name for part, name in PROCESSES.items() if part in command), "ray")
            used[name] += (int(fields[11]) + int(fields[12])) / TICKS_PER_S
    return used


class Client:
    """Reads one stream after the other with as little work as possible."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.num_events = 0

    async def read_for_ever(self, number: int) -> None:
        body = json.dumps(
            {
                "messages": [{"role": "user", "content": f"Write a very long story, number {number}."}],
                "stream": True,
                "temperature": 0.0,
                "max_tokens": MAX_TOKENS,
                "ignore_eos": True,
            }
        )
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            try:
                writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
                while data := await reader.read(1 << 16):
                    self.num_events += data.count(b'"content":"')
                    if b"[DONE]" in data:
                        break
            finally:
                writer.close()


async def measure(server: Server, num_streams: int, window_s: float) -> dict[str, Any]:
    client = Client(server.port)
    readers = [asyncio.create_task(client.read_for_ever(number)) for number in range(num_streams)]
    await asyncio.sleep(WARM_UP_S)
    before, events, cpu, started_s = server.status(), client.num_events, server.cpu_s(), time.perf_counter()
    await asyncio.sleep(window_s)
    elapsed_s, cpu_after, events_after = time.perf_counter() - started_s, server.cpu_s(), client.num_events
    after = server.status()
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    num_tokens = after["num_output_tokens"] - before["num_output_tokens"]
    num_rounds = after["targets"][0]["num_calls"] - before["targets"][0]["num_calls"]
    used = {name: cpu_after[name] - cpu[name] for name in cpu_after}
    per_token = {name: round(1e3 * seconds / num_tokens, 3) for name, seconds in sorted(used.items())}
    models = per_token.get("target", 0.0) + per_token.get("draft", 0.0)
    return {
        "streams": num_streams,
        "round_ms": round(1e3 * elapsed_s / num_rounds, 2),
        "tokens_per_s": round(num_tokens / elapsed_s, 1),
        "events_per_s": round((events_after - events) / elapsed_s, 1),
        "cpu_ms_per_token": per_token,
        "cpu_ms_per_token_without_workers": round(sum(per_token.values()) - models, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", help="a model; a tiny random one by default")
    parser.add_argument("--draft")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--window", type=float, default=6.0, help="seconds")
    parser.add_argument(
        "--setting", action="append", default=[], help="NAME=VALUE in the server's environment"
    )
    parser.add_argument("--args", default="{}", help="more of the configuration, as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        args: dict[str, Any] = {"target": {"model": options.target or tiny_target(folder / "target")}}
        if options.target is None:
            args["target"] |= {"dtype": "float32", "num_threads": 1}
        if options.draft:
            args["draft"] = {"model": options.draft}
        for section, values in json.loads(options.args).items():
            args[section] = {**args.get(section, {}), **values}
        server = Server(folder, args, dict(setting.split("=", 1) for setting in options.setting))
        try:
            server.wait_until_ready()
            figures = [asyncio.run(measure(server, count, options.window)) for count in options.streams]
        finally:
            server.stop()
    for row in figures:
        print(json.dumps(row))
    save("serving_cost", {"target": options.target or "tiny", "settings": options.setting, "rows": figures})


if __name__ == "__main__":
    main()
