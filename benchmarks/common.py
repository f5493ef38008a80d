"""What every result carries: where, when and how it was made."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
RESULTS.mkdir(exist_ok=True)


def provenance() -> dict[str, Any]:
    def git(*args: str) -> str:
        return subprocess.run(["git", *args], capture_output=True, text=True).stdout.strip()

    cpu = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    return {
        "command": " ".join(["python -m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
        "commit": git("rev-parse", "--short", "HEAD")
        + ("+" if git("status", "--porcelain", "--", ".", ":!benchmarks/results") else ""),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cpu": f"{cpu}, {os.cpu_count()} cores",
        "python": platform.python_version(),
    }


def save(name: str, figures: dict[str, Any]) -> None:
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({**provenance(), **figures}, indent=2) + "\n")
    print(f"kept in {path.relative_to(RESULTS.parent.parent)}")
