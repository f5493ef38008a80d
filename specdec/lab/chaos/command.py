"""`specdec bench chaos`: options, and where the results go."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from specdec.lab.chaos.errors import ChaosError

if TYPE_CHECKING:
    from specdec.lab.chaos.plan import Action, Pair, Plan
    from specdec.lab.chaos.run import Outcome


def chaos(
    minutes: Annotated[float, typer.Option(min=0.1, help="Of load under faults.")] = 3.0,
    seed: Annotated[int, typer.Option(help="Of requests and faults.")] = 0,
    streams: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 16,
    faults: Annotated[str, typer.Option(help="Any of kill, hang and scale.")] = "kill,hang,scale",
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two faults, on average.")] = 6.0,
    coordinators: Annotated[int, typer.Option(min=1)] = 2,
    drafts: Annotated[int, typer.Option(min=1)] = 2,
    targets: Annotated[int, typer.Option(min=1)] = 2,
    pair: Annotated[str, typer.Option(help="simulated, or smollm2 (float32, slow).")] = "simulated",
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any setting of the deployment, as for serve."),
    ] = None,
    logs: Annotated[
        Path | None, typer.Option(help="Existing folder for deployment file and server log; default: none.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
) -> None:
    """Kill, hang and scale what serves streams, and compare every text with its undisturbed one."""
    # Imported here: the other commands need no gRPC.
    from specdec.lab.chaos import report
    from specdec.lab.chaos.plan import FleetSize, Plan

    plan = Plan(
        duration_s=60 * minutes,
        seed=seed,
        num_streams=streams,
        actions=parse_faults(faults),
        interval_s=interval,
        fleet=FleetSize(num_coordinators=coordinators, num_drafts=drafts, num_targets=targets),
        pair=parse_pair(pair),
    )
    outcome = _serve_and_run(plan, setting or [], logs)
    result = report.make_report(outcome)
    console = Console()
    console.print(report.summary_table(result))
    console.print(report.fault_table(result))
    for line in (*result.differences, *(f"{count} × {text}" for text, count in result.failures.items())):
        console.print(escape(line), soft_wrap=True)
    if json_file is not None:
        report.write_json(json_file, report.as_json(result, outcome))
    for problem in result.problems:
        console.print("[red]problem:[/red]", escape(problem), soft_wrap=True)
    if result.problems:
        raise typer.Exit(1)


def _serve_and_run(plan: Plan, settings: list[str], logs: Path | None) -> Outcome:
    import asyncio
    import tempfile

    from specdec.lab.chaos.run import run_chaos
    from specdec.lab.chaos.server import ServerProcess

    console = Console(stderr=True, highlight=False)
    with (
        tempfile.TemporaryDirectory(prefix="specdec-chaos-") as folder,
        console.status("starting") as status,
        ServerProcess(logs or Path(folder), plan.fleet, settings, plan.pair) as server,
    ):

        def on_step(text: str) -> None:
            status.update("running")
            console.print(escape(text), soft_wrap=True)

        return asyncio.run(run_chaos(server, plan, on_step))


def parse_faults(text: str) -> tuple[Action, ...]:
    """``kill,hang,scale`` as actions: a hang may end, or last until the process is replaced.

    Raises:
        ChaosError: another word, or none.
    """
    actions: dict[str, tuple[Action, ...]] = {
        "kill": ("kill",),
        "hang": ("hang", "freeze"),
        "scale": ("scale-up", "scale-down"),
    }
    words = [word.strip() for word in text.split(",")]
    if not set(words) <= set(actions):
        raise ChaosError(f"--faults {text!r}: {', '.join(actions)} are there, separated by commas")
    return tuple(action for name, members in actions.items() if name in words for action in members)


def parse_pair(text: str) -> Pair:
    """The name of a pair.

    Raises:
        ChaosError: another name.
    """
    pairs: dict[str, Pair] = {"simulated": "simulated", "smollm2": "smollm2"}
    if text not in pairs:
        raise ChaosError(f"--pair {text!r}: {' or '.join(pairs)} is expected")
    return pairs[text]
