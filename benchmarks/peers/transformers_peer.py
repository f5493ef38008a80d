"""The process that runs `in_process.py`, paused unless it is measured."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.peers import processes


class TransformersPeer:
    name = "transformers"

    def __init__(self, folder: Path, python: Path, target: str, draft: str, dtype: str, gamma: int) -> None:
        folder.mkdir()
        script = str(Path(__file__).with_name("in_process.py"))
        with (folder / "peer.log").open("w") as log:
            self._process = subprocess.Popen(
                [str(python), script, target, draft, dtype, str(gamma)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self._read()

    @property
    def pid(self) -> int:
        return self._process.pid

    def generate(self, prompts: list[list[int]], max_tokens: int, *, is_assisted: bool) -> dict[str, float]:
        request = {"prompts": prompts, "max_tokens": max_tokens, "is_assisted": is_assisted}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return dict(self._read())

    def resume(self) -> None:
        processes.resume(self.pid)

    def pause(self) -> None:
        processes.pause(self.pid)

    def stop(self) -> None:
        processes.stop(self.pid, timeout_s=10.0)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("transformers' process ended; its log is beside the servers'")
        return dict(json.loads(line))
