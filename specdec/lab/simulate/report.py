"""Simulations for people (a table, a plot) and for programs (JSON)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from specdec import __version__
from specdec.lab.simulate.errors import SimulationError
from specdec.lab.simulate.scenario import Scenario
from specdec.lab.simulate.simulate import Simulation, best_of, simulate
from specdec.speculation.policy import expected_tokens

ALPHAS = (0.2, 0.4, 0.6, 0.8, 0.9)
"""Where runs are put beside the formula."""
MAX_CURVES = 3
"""Gammas that are."""


def table(simulations: Sequence[Simulation]) -> Table:
    """One row per gamma and pipeline, the fastest one in colour and with a star."""
    best = best_of(simulations)
    result = Table(
        title=_title(best.scenario),
        caption=_CAPTION,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,  # so that a terminal of 80 columns is wide enough
    )
    for name in _COLUMNS:
        result.add_column(name, justify="left" if name == "pipeline" else "right")
    for simulation in simulations:
        is_best = simulation is best
        result.add_row(*_cells(simulation, is_best), style="green" if is_best else None)
    return result


_COLUMNS = (
    "γ",
    "pipeline",
    "tokens/s",
    "ideal",
    "TPOT\nms",
    "rounds",
    "E[N]",
    "acc-\nepted",
    "pre-\npared",
    "draft\nbusy",
    "target\nbusy",
)
_CAPTION = (
    "* most tokens/s. ideal: E[N] / (γ t_d + t_v), drafting in turn. E[N]: tokens per spec step. "
    "accepted: of drafted tokens. prepared: of blocks asked for."
)


def _cells(simulation: Simulation, is_best: bool) -> Iterator[str]:
    scenario = simulation.scenario
    yield str(scenario.gamma)
    yield "plain" if scenario.gamma == 0 else scenario.pipeline
    yield f"{simulation.tokens_per_s:.1f}" + ("*" if is_best else " ")
    yield _or_dash(scenario.ideal_tokens_per_s, ".1f")
    yield _or_dash(simulation.tpot_s and 1000 * simulation.tpot_s, ".2f")
    yield str(simulation.num_rounds)
    yield f"{simulation.mean_acceptance_length:.2f}"
    yield _or_dash(simulation.draft_acceptance_rate, ".2f")
    yield _or_dash(_prepared(simulation), ".2f")
    yield f"{simulation.utilisation('draft'):.0%}"
    yield f"{simulation.utilisation('target'):.0%}"


def _prepared(simulation: Simulation) -> float | None:
    """Drafting in turn prepares nothing: no figure is better than a zero that reads like one."""
    return None if simulation.scenario.pipeline == "serial" else simulation.prepared_share


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _title(scenario: Scenario) -> str:
    acceptance = (
        f"profile {', '.join(f'{rate:g}' for rate in scenario.profile)}"
        if scenario.profile
        else f"α = {scenario.acceptance_rate:g}"
    )
    parts = [
        f"{scenario.law}, {acceptance}",
        f"draft {_milliseconds(scenario.draft.step_s, scenario.draft.token_s)}",
        f"target {_milliseconds(scenario.target.step_s, scenario.target.token_s)}",
        f"{scenario.num_sequences} × {scenario.num_tokens} tokens",
    ]
    if scenario.rpc_s:
        parts.append(f"network {1000 * scenario.rpc_s:g} ms each way")
    if (scenario.num_targets, scenario.num_drafts) != (1, 1):
        parts.append(f"{scenario.num_targets} targets, {scenario.num_drafts} drafts")
    return "; ".join(parts)


def _milliseconds(step_s: float, token_s: float) -> str:
    per_token = f" + {1000 * token_s:g} ms/token" if token_s else ""
    return f"{1000 * step_s:g} ms{per_token}"


def as_json(simulations: Sequence[Simulation]) -> dict[str, Any]:
    """Every figure, times in seconds, with the scenario of each run."""
    return {"specdec_version": __version__, "runs": [_run(simulation) for simulation in simulations]}


def _run(simulation: Simulation) -> dict[str, Any]:
    scenario = asdict(simulation.scenario)
    scenario |= {
        role: getattr(simulation.scenario, role).model_dump(mode="json") for role in ("draft", "target")
    }
    return {
        "scenario": scenario,
        "tokens_per_s": simulation.tokens_per_s,
        "ideal_tokens_per_s": simulation.scenario.ideal_tokens_per_s,
        "elapsed_s": simulation.elapsed_s,
        "tpot_s": simulation.tpot_s,
        "num_tokens": simulation.num_tokens,
        "num_rounds": simulation.num_rounds,
        "mean_acceptance_length": simulation.mean_acceptance_length,
        "draft_acceptance_rate": simulation.draft_acceptance_rate,
        "prepared_share": simulation.prepared_share,
        "draft_utilisation": simulation.utilisation("draft"),
        "target_utilisation": simulation.utilisation("target"),
    }


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write it.

    Raises:
        SimulationError: the file cannot be written.
    """
    try:
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise SimulationError(f"--json: cannot write {path}: {error}") from error


@dataclass(frozen=True, slots=True)
class Point:
    """What a run says of the formula."""

    gamma: int
    acceptance_rate: float
    length: float
    """Tokens per spec step."""


def lengths_of_runs(simulations: Sequence[Simulation]) -> list[Point]:
    """Further runs at several acceptance rates, for up to three of the gammas."""
    asked = {gamma for run in simulations if isinstance(gamma := run.scenario.gamma, int)}
    gammas = sorted(asked - {0}) or [simulations[0].scenario.max_gamma]
    few = gammas if len(gammas) <= MAX_CURVES else [gammas[0], gammas[len(gammas) // 2], gammas[-1]]
    base = replace(
        simulations[0].scenario,
        profile=(),
        pipeline="serial",
        num_sequences=16,
        num_tokens=300,
        num_targets=1,
        num_drafts=1,
    )
    scenarios = [replace(base, acceptance_rate=alpha, gamma=gamma) for alpha in ALPHAS for gamma in few]
    return [_point(scenario) for scenario in scenarios]


def _point(scenario: Scenario) -> Point:
    assert isinstance(scenario.gamma, int)
    return Point(scenario.gamma, scenario.acceptance_rate, simulate(scenario).mean_acceptance_length)


def write_plot(path: Path, simulations: Sequence[Simulation], points: Sequence[Point]) -> None:
    """Throughput over gamma, and tokens per round over alpha, formula and runs.

    Raises:
        SimulationError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import (  # type: ignore[import-not-found, unused-ignore]
        FigureCanvasAgg,
    )
    from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    throughput, lengths = figure.subplots(1, 2)
    _plot_throughput(throughput, simulations)
    _plot_lengths(lengths, points)
    for axes in (throughput, lengths):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(_title(simulations[0].scenario), fontsize="medium")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise SimulationError(f"--plot: cannot write {path}: {error}") from error


def _plot_throughput(axes: Any, simulations: Sequence[Simulation]) -> None:
    """Over gamma; one that varies, and plain decoding, are levels."""
    fixed = [run for run in simulations if run.scenario.gamma not in ("auto", 0)]
    colors = {}
    for pipeline, runs in groupby(sorted(fixed, key=_pipeline), _pipeline):
        ordered = sorted(runs, key=lambda run: int(run.scenario.gamma))
        gammas = [run.scenario.gamma for run in ordered]
        (line,) = axes.plot(gammas, [run.tokens_per_s for run in ordered], marker="o", label=pipeline)
        colors[pipeline] = line.get_color()
    _plot_ideal(axes, fixed)
    for run in simulations:
        if run.scenario.gamma == "auto":
            color = colors.get(run.scenario.pipeline)
            axes.axhline(run.tokens_per_s, ls="--", color=color, label=f"auto, {run.scenario.pipeline}")
        elif run.scenario.gamma == 0:
            axes.axhline(run.tokens_per_s, ls=":", color="grey", label="plain decoding")
    axes.set(xlabel="γ, draft tokens per round", ylabel="tokens/s", ylim=(0, None))
    axes.xaxis.get_major_locator().set_params(integer=True)


def _pipeline(run: Simulation) -> str:
    return run.scenario.pipeline


def _plot_ideal(axes: Any, fixed: Sequence[Simulation]) -> None:
    ideal = {run.scenario.gamma: run.scenario.ideal_tokens_per_s for run in fixed}
    ordered = sorted(ideal.items(), key=lambda pair: int(pair[0]))
    if ordered:
        gammas, rates = zip(*ordered, strict=True)
        axes.plot(gammas, rates, color="black", lw=0.8, label="ideal, drafting in turn")


def _plot_lengths(axes: Any, points: Sequence[Point]) -> None:
    """The formula as curves, runs as points."""
    alphas = [step / 100 for step in range(101)]
    for gamma, of_gamma in groupby(sorted(points, key=lambda point: point.gamma), lambda point: point.gamma):
        (line,) = axes.plot(alphas, [expected_tokens(alpha, gamma) for alpha in alphas], label=f"γ = {gamma}")
        measured = list(of_gamma)
        axes.plot(
            [point.acceptance_rate for point in measured],
            [point.length for point in measured],
            ls="",
            marker="o",
            color=line.get_color(),
        )
    axes.set(xlabel="acceptance rate α", ylabel="tokens per spec step", xlim=(0, 1), ylim=(1, None))
    axes.set_title("(1 - α^(γ+1)) / (1 - α), and runs", fontsize="small")
