"""Deploy, measure, deploy the next."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Protocol, TypeVar

from rich.table import Table

from specdec import __version__
from specdec.gateway.backend import Backend
from specdec.lab.errors import BenchError
from specdec.lab.pipeline.measure import Choice, Measured, generating, measure
from specdec.lab.pipeline.plan import FIXED_GAMMAS, Figure, Scenario
from specdec.types import Pipeline

READY_TIMEOUT_S = 30.0
MAX_ATTEMPTS = 2
WARM_UP_S = 0.5
ADAPTING_S = 12.0
"""What a deployment gets that has to find out what pays, before it is measured."""


class StartedBackend(Backend, Protocol):
    def start(self) -> None:
        """Look for coordinators, from now on."""
        ...

    async def close(self) -> None:
        """And no longer."""
        ...


Attach = Callable[[dict[str, object]], AbstractContextManager[Callable[[], StartedBackend]]]
"""Serves a deployment file's tree while the context lasts, and makes a way in."""
Results = dict[tuple[str, Choice], Measured]
Samples = dict[Choice, list[Measured]]
Found = TypeVar("Found")


def run(
    scenarios: Sequence[Scenario],
    attach: Attach,
    *,
    rounds: int,
    counted_s: float,
    on_step: Callable[[str], None],
) -> Results:
    """Measure every choice of every scenario ``rounds`` times, alternately, and take medians.

    Args:
        scenarios: in order.
        attach: serves them.
        rounds: at least 1.
        counted_s: seconds of one measurement.
        on_step: told what is being done.
    """
    results: Results = {}
    for scenario in scenarios:
        for choices, gamma in ((scenario.fixed, max(FIXED_GAMMAS)), (scenario.adaptive, "auto")):
            if not choices:
                continue
            on_step(f"{scenario.name}, γ = {gamma}: {len(choices)} choices")
            samples = in_process_of_its_own(
                _measure_deployment, scenario, choices, gamma, attach, rounds, counted_s
            )
            results |= {(scenario.name, choice): _median(measured) for choice, measured in samples.items()}
    return results


def in_process_of_its_own(function: Callable[..., Found], *args: object) -> Found:
    """A process starts one Ray and ends: starting the next in the same one has failed.

    Raises:
        BenchError: it failed twice.
    """
    failures: list[str] = []
    while len(failures) < MAX_ATTEMPTS:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            try:
                return pool.submit(function, *args).result()
            except Exception as error:  # whatever Ray raises when it does not start
                failures.append(f"{type(error).__name__}: {error}")
    raise BenchError(f"a deployment failed: {failures[-1]}")


def _measure_deployment(
    scenario: Scenario,
    choices: Sequence[Choice],
    gamma: int | str,
    attach: Attach,
    rounds: int,
    counted_s: float,
) -> Samples:
    with attach(deployment(scenario, gamma)) as make_backend:
        return asyncio.run(_measure_all(scenario, choices, make_backend, rounds=rounds, counted_s=counted_s))


def deployment(scenario: Scenario, gamma: int | str, pipeline: Pipeline = "auto") -> dict[str, object]:
    """A deployment file's tree."""
    args = {
        "target": {"model": "simulated-target", "kv_capacity_tokens": 10**9},
        "draft": {"model": "simulated-draft", "kv_capacity_tokens": 10**9},
        "simulation": scenario.simulation.model_dump(),
        "speculation": {"num_speculative_tokens": gamma, "pipeline": pipeline},
        "coordinator": {"max_num_seqs": max(32, scenario.num_sequences)},
        "gateway": {"grpc_port": _free_port()},
    }
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": _free_port()},
        "logging_config": {"enable_access_log": False},
        "applications": [
            {
                "name": "specdec",
                "route_prefix": "/",
                "import_path": "specdec.cluster.app:build_app",
                "args": args,
                "deployments": [
                    {"name": "TargetWorker", "num_replicas": scenario.num_targets},
                    {"name": "DraftWorker", "num_replicas": scenario.num_drafts},
                ],
            }
        ],
    }


async def _measure_all(
    scenario: Scenario,
    choices: Sequence[Choice],
    make_backend: Callable[[], StartedBackend],
    *,
    rounds: int,
    counted_s: float,
) -> Samples:
    samples: Samples = {choice: [] for choice in choices}
    backend = make_backend()
    backend.start()
    try:
        await until_ready(backend, scenario)
        for choice in choices:
            if choice.gamma is None:
                async with generating(backend, choice, scenario.simulation, scenario.num_sequences):
                    await asyncio.sleep(ADAPTING_S)
        for number in range(rounds):
            for choice, measured in samples.items():
                measured.append(
                    await measure(
                        backend,
                        choice,
                        scenario.simulation,
                        scenario.num_sequences,
                        warm_up_s=WARM_UP_S,
                        counted_s=counted_s,
                        first_prompt=number * scenario.num_sequences,
                    )
                )
        return samples
    finally:
        await backend.close()


async def until_ready(backend: Backend, scenario: Scenario) -> None:
    """Until a coordinator has all workers of the scenario.

    Raises:
        BenchError: none has within `READY_TIMEOUT_S`.
    """
    wanted = (scenario.num_targets, scenario.num_drafts)
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while wanted not in [(len(status.targets), len(status.drafts)) for status in backend.statuses()]:
        if time.monotonic() > deadline_s:
            raise BenchError(f"no coordinator with all workers within {READY_TIMEOUT_S:g} s")
        await asyncio.sleep(0.1)


def _median(samples: Sequence[Measured]) -> Measured:
    return Measured(
        **{
            item.name: statistics.median(getattr(sample, item.name) for sample in samples)
            for item in fields(Measured)
        }
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def table(lines: Sequence[Figure]) -> Table:
    """What was asked for beside what was reached."""
    result = Table("measure", title="simulated devices in separate actors")
    for heading in ("reached", "wanted", "aim"):
        result.add_column(heading, justify="right")
    for line in lines:
        wanted = f"≥ {line.at_least:.2f}" if line.at_least is not None else f"≤ {line.at_most:.1f}"
        style = "green" if line.is_reached else "red"
        result.add_row(line.name, f"[{style}]{line.value:.2f}[/{style}]", wanted, f"{line.aim:.2f}")
    return result


def write_json(path: Path, results: Results, lines: Sequence[Figure], settings: dict[str, object]) -> None:
    """All figures, and all that they were made of.

    Raises:
        BenchError: the file cannot be written.
    """
    content = {
        "specdec": __version__,
        **settings,
        "figures": [asdict(line) for line in lines],
        "measured": [
            {"scenario": name, "choice": str(choice), **asdict(measured)}
            for (name, choice), measured in results.items()
        ],
    }
    try:
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise BenchError(f"cannot write {path}: {error.strerror}") from error
