"""`specdec bench`: options, progress and where the results go."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from specdec.lab.bench import prompts as prompt_sources
from specdec.lab.bench import report
from specdec.lab.bench.bench import Plan, measure_levels, prepare
from specdec.lab.bench.figures import Figures
from specdec.lab.bench.http import Endpoint
from specdec.lab.bench.load import Load
from specdec.lab.bench.prompts import Body
from specdec.lab.errors import BenchError

app = typer.Typer(help="Measure a served model.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Without it a single command would take the group's place."""


@app.command()
def serve(
    url: Annotated[str, typer.Option(help="Server, like http://127.0.0.1:8000, with or without /v1.")],
    model: Annotated[
        str | None, typer.Option(help="Model to ask for; default: the first one served.")
    ] = None,
    concurrency: Annotated[
        str, typer.Option(help="Numbers of streams at a time, one level each.")
    ] = "1,8,32",
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Requests per level; default: four per stream, at least eight.")
    ] = None,
    prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Length of made-up prompts, roughly; the JSON has the server's count.")
    ] = 64,
    prompts_file: Annotated[
        Path | None,
        typer.Option(help="Prompts instead, one a line: text, or JSON with 'prompt' or 'messages'."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0)] = 0.0,
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos", help="Every answer has max-tokens tokens; specdec and vLLM know it."),
    ] = False,
    api_key: Annotated[str | None, typer.Option(envvar="SPECDEC_API_KEY", show_envvar=True)] = None,
    extra_body: Annotated[
        str | None, typer.Option(help="JSON object of further request fields, for what one server knows.")
    ] = None,
    request_timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds until a request is given up and counted as an error.")
    ] = 600.0,
    idle_timeout: Annotated[float, typer.Option(min=0.1, help="Likewise, without anything arriving.")] = 60.0,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before each level, not counted.")] = 1,
    output: Annotated[Path | None, typer.Option(help="Write all figures there as JSON.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw them there; needs matplotlib (the extra bench).")
    ] = None,
) -> None:
    """Load any OpenAI-compatible server and report throughput, TTFT, TPOT and acceptance."""
    plan = Plan(_parse_levels(concurrency), num_prompts, warmup)
    load = Load(
        endpoint=Endpoint.parse(url),
        model=model or "",
        max_tokens=max_tokens,
        temperature=temperature,
        ignore_eos=ignore_eos,
        api_key=api_key,
        extra_body=_parse_extra_body(extra_body),
        request_timeout_s=request_timeout,
        idle_timeout_s=idle_timeout,
    )
    prompts = (
        prompt_sources.from_file(prompts_file) if prompts_file else prompt_sources.made_up(prompt_tokens)
    )
    if plot is not None:
        report.require_matplotlib()
    settings, levels = asyncio.run(_measure(load, plan, prompts, model))
    title = f"{settings['model']} at {url}"
    Console().print(report.table(levels, title))
    if output is not None:
        report.write_json(output, report.as_json(levels, {"url": url, **settings}))
    if plot is not None:
        report.write_plot(plot, levels, title)
    _fail_if_nothing_succeeded(levels)


async def _measure(
    load: Load, plan: Plan, prompts: Iterator[Body], model: str | None
) -> tuple[dict[str, Any], list[Figures]]:
    load, served = await prepare(load, model)
    console = Console(stderr=True)
    columns = (
        TextColumn(f"{served.name}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests"),
        TimeRemainingColumn(),
    )
    # Two drawings a second: the bar must not cost what it measures.
    with Progress(*columns, console=console, refresh_per_second=2, transient=True) as progress:
        task = progress.add_task("", total=plan.total)
        levels = await measure_levels(load, served, plan, prompts, lambda: progress.advance(task))
    settings = {
        "model": served.name,
        "owned_by": served.owner,
        "max_tokens": load.max_tokens,
        "temperature": load.temperature,
        "ignore_eos": load.ignore_eos,
        "extra_body": dict(load.extra_body),
        "num_warmup": plan.num_warmup,
    }
    return settings, levels


def _parse_levels(text: str) -> list[int]:
    try:
        levels = [int(part) for part in text.split(",")]
    except ValueError:
        levels = []
    if not levels or min(levels) < 1:
        raise BenchError(f"--concurrency {text!r}: positive numbers separated by commas are expected")
    return levels


def _parse_extra_body(text: str | None) -> dict[str, object]:
    if text is None:
        return {}
    try:
        content = json.loads(text)
    except ValueError as error:
        raise BenchError(f"--extra-body is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise BenchError("--extra-body: a JSON object is expected")
    return content


def _fail_if_nothing_succeeded(levels: list[Figures]) -> None:
    for level in levels:
        if not level.num_succeeded:
            raise BenchError(f"no request with {level.concurrency} streams succeeded: {level.first_error}")
