"""`specdec simulate`: options, and where the results go."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from specdec.config import MAX_SPECULATIVE_TOKENS
from specdec.lab.simulate.errors import SimulationError

if TYPE_CHECKING:
    from specdec.lab.simulate.scenario import Gamma, Scenario
    from specdec.lab.simulate.simulate import Simulation
    from specdec.types import Pipeline

_RANGE = re.compile(r"(\d+)\.\.(\d+)")


def simulate(
    alpha: Annotated[
        float, typer.Option(help="Acceptance rate: how likely the next draft token is accepted.")
    ] = 0.8,
    profile: Annotated[
        str | None,
        typer.Option(help="Instead: how likely the first, second, ... token of a block is, if reached."),
    ] = None,
    law: Annotated[str, typer.Option(help="greedy, or sampled: smooth laws in rejection mode.")] = "greedy",
    draft_step_ms: Annotated[float, typer.Option(help="A draft forward, whatever it is fed.")] = 2.0,
    draft_token_ms: Annotated[float, typer.Option(help="More for each token it is fed.")] = 0.0,
    target_step_ms: Annotated[float, typer.Option(help="A target forward.")] = 16.0,
    target_token_ms: Annotated[float, typer.Option(help="More for each token it is fed.")] = 0.0,
    rpc_ms: Annotated[float, typer.Option(help="Network, one way.")] = 0.0,
    sequences: Annotated[int, typer.Option(help="Decoded at a time.")] = 1,
    tokens: Annotated[int, typer.Option(help="Output tokens of each sequence.")] = 1000,
    prompt_tokens: Annotated[int, typer.Option(help="Prompt tokens of each.")] = 16,
    gamma: Annotated[
        str,
        typer.Option(help="Draft tokens per round: numbers, ranges like 1..8, auto; 0 is plain decoding."),
    ] = "0,1,2,3,4,6,8,auto",
    pipeline: Annotated[
        str, typer.Option(help="serial, lookahead, auto, or both: the first two of them.")
    ] = "both",
    branches: Annotated[int, typer.Option(help="Outcomes per sequence to prepare for, at most.")] = 8,
    targets: Annotated[int, typer.Option(help="Target workers.")] = 1,
    drafts: Annotated[int, typer.Option(help="Draft workers.")] = 1,
    seed: Annotated[int, typer.Option(help="Of laws, prompts and draws.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Write all figures there as JSON.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw them there; needs matplotlib (the extra bench).")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write every forward and round there, for ui.perfetto.dev.")
    ] = None,
) -> None:
    """Run the real coordinator on simulated devices in virtual time, to choose gamma and workers."""
    # Imported here: the other commands need no torch.
    from specdec.lab.bench.report import require_matplotlib
    from specdec.lab.simulate import report
    from specdec.lab.simulate.scenario import Scenario, as_law, step_times
    from specdec.lab.simulate.simulate import sweep
    from specdec.lab.simulate.trace import write_trace

    base = Scenario(
        acceptance_rate=alpha,
        profile=_parse_profile(profile),
        law=as_law(law),
        draft=step_times("draft", draft_step_ms, draft_token_ms),
        target=step_times("target", target_step_ms, target_token_ms),
        rpc_s=rpc_ms / 1000,
        num_sequences=sequences,
        num_tokens=tokens,
        num_prompt_tokens=prompt_tokens,
        lookahead_branches=branches,
        num_targets=targets,
        num_drafts=drafts,
        seed=seed,
    )
    scenarios = sweep(base, _parse_gammas(gamma), _parse_pipelines(pipeline))
    if plot is not None:
        require_matplotlib()
    simulations = _run_all(scenarios)
    Console().print(report.table(simulations))
    if json is not None:
        report.write_json(json, report.as_json(simulations))
    if trace is not None:
        write_trace(trace, simulations)
    if plot is not None:
        report.write_plot(plot, simulations, report.lengths_of_runs(simulations))


def _run_all(scenarios: list[Scenario]) -> list[Simulation]:
    from specdec.lab.simulate.simulate import simulate as run

    simulations = []
    with Console(stderr=True).status("") as status:
        for scenario in scenarios:
            status.update(f"simulating {scenario.name}")
            simulations.append(run(scenario))
    return simulations


def _parse_gammas(text: str) -> list[Gamma]:
    gammas: list[Gamma] = []
    for part in (part.strip() for part in text.split(",")):
        if part == "auto":
            gammas.append("auto")
        elif part.isdecimal():
            gammas.append(int(part))
        elif found := _RANGE.fullmatch(part):
            gammas += range(int(found[1]), min(int(found[2]), MAX_SPECULATIVE_TOKENS + 1) + 1)
        else:
            raise SimulationError(
                f"--gamma {text!r}: numbers, ranges like 1..8 or auto, separated by commas, are expected"
            )
    if not gammas:
        raise SimulationError(f"--gamma {text!r}: the range is empty")
    return gammas


def _parse_pipelines(text: str) -> list[Pipeline]:
    from specdec.lab.simulate.scenario import as_pipeline

    return ["serial", "lookahead"] if text == "both" else [as_pipeline(text)]


def _parse_profile(text: str | None) -> tuple[float, ...]:
    if text is None:
        return ()
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise SimulationError(f"--profile {text!r}: numbers separated by commas are expected") from error
