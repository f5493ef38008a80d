"""The HTTP servers compared: one interface over `specdec serve` and vLLM's OpenAI server."""

from __future__ import annotations

import json
import os
import subprocess
import time
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.peers import processes
from tests.e2e.harness import Server as SpecdecProcess
from tests.e2e.harness import free_port, is_running

START_TIMEOUT_S = 900.0
"""vLLM compiles its graphs at the first start."""
HEALTH_TIMEOUT_S = 60.0
SETTLE_S = 1.0
"""After a pause, timers that went off meanwhile get this long."""


@dataclass
class Server:
    """A loaded server, paused unless it is measured."""

    name: str
    url: str
    model: str
    pid: int
    log_path: Path

    def wait_until_ready(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not self._is_healthy():
            if not is_running(self.pid) or time.monotonic() > deadline_s:
                tail = self.log_path.read_text()[-3000:]
                raise RuntimeError(f"{self.name} is not ready; the end of {self.log_path}:\n{tail}")
            time.sleep(0.5)

    def resume(self) -> None:
        processes.resume(self.pid)
        time.sleep(SETTLE_S)
        self.wait_until_ready(HEALTH_TIMEOUT_S)

    def pause(self) -> None:
        processes.pause(self.pid)

    def stop(self) -> None:
        processes.stop(self.pid)

    def _is_healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=10).status_code == 200
        except httpx.HTTPError:
            return False


def start_specdec(folder: Path, target: str, draft: str, dtype: str, gamma: int | str) -> Server:
    """With its draft; plain decoding is asked for by the request."""
    folder.mkdir()
    models = {"target": {"model": target, "dtype": dtype}, "draft": {"model": draft, "dtype": dtype}}
    process = SpecdecProcess(
        folder, {**models, "served_model_name": "target", "speculation": {"num_speculative_tokens": gamma}}
    )
    return Server("specdec", process.url, "target", process.process.pid, process.log_path)


def start_vllm(
    folder: Path, python: Path, target: str, dtype: str, *, draft: str | None = None, gamma: int = 0
) -> Server:
    """Plain, or with the same draft.

    Prefix caching is off, and so are the sampling defaults of the model's folder: the request alone decides.
    """
    folder.mkdir()
    name = "vllm_draft" if draft else "vllm"
    port = free_port()
    speculation: dict[str, Any] = {"method": "draft_model", "model": draft, "num_speculative_tokens": gamma}
    command = [
        *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", target, "--dtype", dtype),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "target"),
        *("--no-enable-prefix-caching", "--generation-config", "vllm", "--max-model-len", "4096"),
        *("--max-num-seqs", "32"),
        *(("--speculative-config", json.dumps(speculation)) if draft else ()),
    ]
    log_path = folder / "server.log"
    with log_path.open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=_vllm_env(python), start_new_session=True
        )
    return Server(name, f"http://127.0.0.1:{port}", "target", process.pid, log_path)


def preloads(python: Path) -> list[str]:
    """What vLLM asks to preload for its best speed, as far as it is here: Intel's OpenMP and tcmalloc."""
    libraries = python.parent.parent / "lib"  # of the environment
    found = [libraries / name for name in ("libiomp5.so", "libtcmalloc_minimal.so.4")]
    system = find_library("tcmalloc_minimal")
    paths = [str(path) for path in found if path.exists()]
    return paths + ([system] if system and len(paths) < len(found) else [])


def _vllm_env(python: Path) -> dict[str, str]:
    """Both it and specdec may use every core; vLLM leaves one free unless told otherwise."""
    return {
        **{key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        "LD_PRELOAD": ":".join(preloads(python)),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
