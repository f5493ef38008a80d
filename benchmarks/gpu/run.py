"""Everything there is to know of the engine on this GPU, in under eight minutes.

`python -m benchmarks.gpu.run` builds its models itself, with random weights; `--cpu --tiny` runs the same
code on the CPU in seconds. Results go to `$OUT/gpu.json`, or to `benchmarks/results/gpu.json`, after every
section, and as Markdown tables to standard output. The exit status is 1 if something was not exact.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.gpu import exactness, times
from benchmarks.gpu.settings import Budget, Settings, gpu_settings, tiny_settings
from specdec.engine.threads import set_num_threads

BUDGETS_S = {"exactness": 150.0, "steps": 120.0, "texts": 90.0, "roofline": 20.0}


class Run:
    """Sections in order; one that fails is noted, and the others go on."""

    def __init__(self, settings: Settings, file: Path, budget_scale: float) -> None:
        self._settings = settings
        self._file = file
        self._budget_scale = budget_scale
        self._pair: times.Pair | None = None
        self.figures: dict[str, Any] = {"machine": machine(settings.device), "sections": {}}

    @property
    def is_exact(self) -> bool:
        sections = self.figures["sections"]
        return not any(
            "error" in section or section.get("failures")
            for section in sections.values()
            if isinstance(section, dict)
        )

    def section(self, name: str) -> None:
        started_s = time.perf_counter()
        budget = Budget(self._budget_scale * BUDGETS_S[name])
        try:
            found = self._measured(name, budget)
        except Exception as error:  # the other sections are still worth having
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"[:2000]}
        self.figures["sections"][name] = found
        self.figures.setdefault("seconds", {})[name] = round(time.perf_counter() - started_s, 1)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps(self.figures, indent=2) + "\n")

    def _measured(self, name: str, budget: Budget) -> Any:
        steps = self.figures["sections"].get("steps", {})
        measures: dict[str, Callable[[], Any]] = {
            "exactness": lambda: exactness.check(self._settings, budget),
            "steps": lambda: self._steps(budget),
            "texts": lambda: times.texts(self.pair, budget),
            "roofline": lambda: times.roofline(self._settings, steps if "verify" in steps else None),
        }
        return measures[name]()

    def _steps(self, budget: Budget) -> dict[str, Any]:
        found = times.steps(self.pair, budget)
        return found | {"projected": times.projected(found)}

    @property
    def pair(self) -> times.Pair:
        if self._pair is None:
            self._pair = times.Pair(self._settings)
        return self._pair


def machine(device: torch.device) -> dict[str, Any]:
    is_cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_cuda else platform.machine(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "command": "python -m benchmarks.gpu.run " + " ".join(sys.argv[1:]),
    }


# Tables ---------------------------------------------------------------------------------------------------


def print_tables(figures: dict[str, Any]) -> None:
    print(f"\n{figures['machine']}\n\nseconds per section: {figures['seconds']}")
    for name, section in figures["sections"].items():
        print(f"\n## {name}\n")
        if isinstance(section, list):
            print_table(section)
            continue
        for key, value in section.items():
            if isinstance(value, list) and value and isinstance(value[0], dict):
                print(f"### {key}\n")
                print_table(value)
            else:
                print(f"- {key}: {value}")


def print_table(rows: list[dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join(_cell(row.get(column, "")) for column in columns) + " |")
    print()


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", action="store_true", help="run on the CPU")
    parser.add_argument(
        "--tiny", action="store_true", help="tiny models and few repeats: a test of this program"
    )
    parser.add_argument("--target", default="8b", help="a shape (100m, 1b, 8b) or a folder of real weights")
    parser.add_argument("--draft", default="100m", help="likewise; with the target's vocabulary")
    parser.add_argument("--exactness", default="1b", help="likewise: the model whose text is checked")
    parser.add_argument("--sections", nargs="+", default=list(BUDGETS_S), choices=BUDGETS_S)
    parser.add_argument("--budget-scale", type=float, default=1.0, help="factor on every section's seconds")
    args = parser.parse_args(arguments)
    if not args.cpu and not torch.cuda.is_available():
        parser.error("no CUDA device is visible; --cpu --tiny tests this program without one")
    device = torch.device("cpu" if args.cpu else "cuda:0")
    settings = (
        tiny_settings(device) if args.tiny else gpu_settings(device, args.target, args.draft, args.exactness)
    )
    if args.tiny:
        set_num_threads(1)  # threads would only wait for each other
    folder = Path(os.environ.get("OUT") or Path(__file__).parent.parent / "results")
    run = Run(settings, folder / "gpu.json", args.budget_scale)
    for name in args.sections:
        run.section(name)
    print_tables(run.figures)
    return 0 if run.is_exact else 1


if __name__ == "__main__":
    sys.exit(main())
