"""The ``specdec`` command."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specdec import __version__
from specdec.config import AppConfig, parse_config
from specdec.errors import ConfigError, SpecDecError
from specdec.lab.bench.command import app as bench_app
from specdec.lab.chaos.command import chaos
from specdec.lab.simulate.command import simulate

READY_TIMEOUT_S = 1800.0
"""Large models take their time to download and load; a failure ends the wait at once."""

app = typer.Typer(
    help="Exact speculative decoding with draft and target on separate devices.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
models_app = typer.Typer(help="Embedded models.", no_args_is_help=True)
app.add_typer(models_app, name="models")
app.add_typer(bench_app, name="bench")
app.command("simulate")(simulate)
bench_app.command("chaos")(chaos)

console = Console(stderr=True, highlight=False)
"""Messages for people; standard output is for results."""

Target = Annotated[str | None, typer.Option(help="Target model: embedded name, folder or Hugging Face id.")]
Draft = Annotated[str | None, typer.Option(help="Draft model, or 'none' for plain decoding.")]
Gamma = Annotated[
    str | None,
    typer.Option(
        "--num-speculative-tokens", help="Tokens to draft per round, or 'auto'; 0 is plain decoding."
    ),
]
Dtype = Annotated[str | None, typer.Option(help="bfloat16, float16 or float32, for both models.")]


def main() -> None:
    """Run the command; errors of our own are one line, not a traceback."""
    try:
        app()
    except SpecDecError as error:
        console.print("[red]error:[/red]", escape(str(error)), soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


@app.command()
def serve(
    config: Annotated[
        Path | None, typer.Argument(help="Deployment file; default: the embedded pair.")
    ] = None,
    target: Target = None,
    draft: Draft = None,
    num_speculative_tokens: Gamma = None,
    dtype: Dtype = None,
    host: Annotated[str | None, typer.Option(help="Interface for HTTP and gRPC.")] = None,
    http_port: Annotated[int | None, typer.Option()] = None,
    grpc_port: Annotated[int | None, typer.Option()] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(help="PEM certificate chain: HTTP and gRPC over TLS, with --tls-key.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM private key.")] = None,
    address: Annotated[
        str | None, typer.Option(envvar="RAY_ADDRESS", help="Ray cluster to join; default: start one here.")
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Any setting of the file, like args.speculation.pipeline=lookahead; of a further pair's "
            "application, like applications.NAME.args.target.dtype=float32. May be given again.",
        ),
    ] = None,
) -> None:
    """Serve draft/target pairs over HTTP and gRPC until Ctrl-C.

    Flags for models are for the pair of the application with the gateway.
    """
    # Imported here: the other commands need no Ray.
    from specdec.cluster.deploy_config import DeployConfig, default_deploy_config, load_deploy_config
    from specdec.cluster.deploy_overrides import parse_settings
    from specdec.cluster.exposure import exposures
    from specdec.cluster.server import RunningServer

    def load(overrides: dict[str, object]) -> DeployConfig:
        if config is not None:
            return load_deploy_config(config, overrides)
        return default_deploy_config(overrides, num_gpus=_count_gpus() if address is None else 0)

    overrides = _overrides(target, draft, num_speculative_tokens, host, http_port, grpc_port)
    overrides |= _tls_overrides(tls_cert, tls_key)
    overrides |= parse_settings(setting or [])
    deploy = load(overrides)
    if dtype is not None:
        models = ["target", "draft"] if deploy.app.draft else ["target"]
        deploy = load({**overrides, **{f"args.{model}.dtype": dtype for model in models}})
    for warning in exposures(deploy.schema.http_options, deploy.app.gateway):
        console.print(f"[yellow]warning:[/yellow] {warning}", soft_wrap=True)
    if address is None:
        for app_config in deploy.apps.values():
            _preflight(app_config)
    signals = _Signals()
    with console.status("starting Ray") as status, RunningServer(deploy, address) as server:
        signals.install()
        server.wait_until_ready(READY_TIMEOUT_S, lambda text: status.update(escape(text)))
        status.stop()
        console.print(
            f"[green]ready[/green]  HTTP {server.http_url}/v1  gRPC {server.grpc_address}  "
            f"{'; '.join(_describe(app_config) for app_config in deploy.apps.values())}  (Ctrl-C stops)",
            soft_wrap=True,
        )
        signals.wait()
        console.print("stopping")


@app.command()
def status(
    url: Annotated[str, typer.Argument(help="Of the deployment's HTTP.")] = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, typer.Option(envvar="SPECDEC_API_KEY", show_envvar=True)] = None,
) -> None:
    """Show coordinators and workers of all pairs: load, acceptance, round times, KV cache."""
    from specdec.lab import status as shown

    coordinators, absent = shown.read(url, api_key)
    output = Console()
    output.print(shown.coordinators_table(coordinators))
    output.print(shown.workers_table(coordinators))
    for pair in absent:
        output.print(f"the application {pair['application']} {pair['reason']}", markup=False, soft_wrap=True)


@app.command()
def scale(
    counts: Annotated[
        list[str],
        typer.Argument(
            metavar="ROLE=N...", help="Like draft=2 target=1; bounds, draft=1..4, where it scales by itself."
        ),
    ],
    address: Annotated[
        str, typer.Option(envvar="RAY_ADDRESS", help="Ray cluster; default: the one on this machine.")
    ] = "auto",
    app_name: Annotated[
        str | None,
        typer.Option("--app", help="Application whose pair it is; default: the one with the gateway."),
    ] = None,
) -> None:
    """Change numbers of replicas while serving; streams are moved, not cut."""
    from specdec.cluster.scaling import parse_counts
    from specdec.cluster.scaling import scale as change

    change(address, parse_counts(counts), app_name)
    console.print("asked for; [bold]specdec status[/bold] shows when it is so")


@bench_app.command("pipeline")
def bench_pipeline(
    only: Annotated[str | None, typer.Option(help="Scenarios whose name contains this.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of each choice; medians count.")] = 3,
    seconds: Annotated[float, typer.Option(min=0.5, help="Of one measurement.")] = 4.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
) -> None:
    """Measure drafting ahead and γ by measurement: real coordinator, simulated devices in separate actors."""
    from specdec.cluster.attached import attached
    from specdec.lab.pipeline import run as pipeline
    from specdec.lab.pipeline.plan import SCENARIOS, figures

    scenarios = [scenario for scenario in SCENARIOS if only is None or only in scenario.name]
    if not scenarios:
        raise ConfigError(f"--only {only!r}: one of {', '.join(scenario.name for scenario in SCENARIOS)}")
    with console.status("starting") as status:
        results = pipeline.run(
            scenarios,
            attached,
            rounds=rounds,
            counted_s=seconds,
            on_step=lambda text: status.update(escape(text)),
        )
    lines = list(figures(results))
    Console().print(pipeline.table(lines))
    if json_file is not None:
        pipeline.write_json(json_file, results, lines, {"rounds": rounds, "seconds": seconds})


@bench_app.command("scaling")
def bench_scaling(
    rounds: Annotated[int, typer.Option(min=1, help="Measurements and killed drafts; medians count.")] = 3,
    seconds: Annotated[float, typer.Option(min=0.5, help="Of one measurement.")] = 6.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
) -> None:
    """Measure what a second target or draft brings and what losing the only draft costs, simulated."""
    from dataclasses import asdict

    from specdec.cluster.attached import attached
    from specdec.lab.pipeline import run as pipeline
    from specdec.lab.pipeline import scaling

    with console.status("starting") as status:
        results = pipeline.run(
            scaling.SCENARIOS,
            attached,
            rounds=rounds,
            counted_s=seconds,
            on_step=lambda text: status.update(escape(text)),
        )
        status.update(f"killing a draft, {rounds} times")
        losses = scaling.lose_drafts(attached, rounds=rounds, counted_s=seconds)
    lines = list(scaling.scaling_figures(results, losses))
    Console().print(pipeline.table(lines))
    if json_file is not None:
        settings = {"rounds": rounds, "seconds": seconds, "losses": [asdict(loss) for loss in losses]}
        pipeline.write_json(json_file, results, lines, settings)


class _Signals:
    """Ctrl-C and SIGTERM: an interrupt while starting, an orderly end once `wait` is reached."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._is_waiting = False
        self.install()

    def install(self) -> None:
        """Again after Ray has started, which puts a handler of its own for SIGTERM."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)

    def wait(self) -> None:
        self._is_waiting = True
        self._stop.wait()

    def _on_signal(self, _signum: int, _frame: object) -> None:
        if not self._is_waiting or self._stop.is_set():
            raise KeyboardInterrupt
        self._stop.set()


def _overrides(
    target: str | None,
    draft: str | None,
    num_speculative_tokens: str | None,
    host: str | None,
    http_port: int | None,
    grpc_port: int | None,
) -> dict[str, object]:
    """Flags as dotted paths into a deployment file."""
    values: dict[str, object] = {}
    if target is not None:
        # The configured draft belongs to the configured target: another target needs another one.
        values |= {"args.target.model": target, "args.draft": None}
    if draft is not None:
        values |= {"args.draft": None if draft == "none" else {"model": draft}}
    if num_speculative_tokens is not None:
        values["args.speculation.num_speculative_tokens"] = num_speculative_tokens
    if host is not None:
        values |= {"http_options.host": host, "args.gateway.grpc_host": host}
    if http_port is not None:
        values["http_options.port"] = http_port
    if grpc_port is not None:
        values["args.gateway.grpc_port"] = grpc_port
    return values


def _tls_overrides(cert: Path | None, key: Path | None) -> dict[str, object]:
    """One pair of files for both doors; absolute, because they are read by processes with other folders."""
    if cert is None and key is None:
        return {}
    if cert is None or key is None:
        raise ConfigError("--tls-cert and --tls-key go together")
    cert_path, key_path = (str(path.expanduser().absolute()) for path in (cert, key))
    return {
        "http_options.ssl_certfile": cert_path,
        "http_options.ssl_keyfile": key_path,
        "args.gateway.grpc_tls_cert": cert_path,
        "args.gateway.grpc_tls_key": key_path,
    }


def _count_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _preflight(config: AppConfig) -> None:
    """Fetch embedded models and check the pair here, where an error is one clear line."""
    from specdec.models import check_pair, is_embedded, model_info, pull

    if config.simulation is not None:
        return
    names = [model.model for model in (config.target, config.draft) if model is not None]
    for name in names:
        if is_embedded(name):
            pull(name, console=console)
    # The embedded ones fit each other; to read them would take transformers, which takes seconds to import.
    if not all(is_embedded(name) for name in names):
        if config.draft is None:
            model_info(config.target.model)
        else:
            check_pair(config.target.model, config.draft.model)
    if config.draft is None:
        console.print("no draft model: plain decoding")


def _describe(config: AppConfig) -> str:
    if config.draft is None:
        return f"target {config.target.model}"
    gamma = config.speculation.num_speculative_tokens
    return f"target {config.target.model}, draft {config.draft.model}, γ = {gamma}"


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to say to the model.")],
    target: Target = None,
    draft: Draft = None,
    num_speculative_tokens: Annotated[str, typer.Option(help="Or 'auto'.")] = "2",
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0)] = 0.0,
    seed: Annotated[int | None, typer.Option(min=0)] = None,
    dtype: Annotated[str, typer.Option()] = "bfloat16",
    raw: Annotated[bool, typer.Option(help="Continue the text instead of answering a chat turn.")] = False,
) -> None:
    """Generate once in this process, without Ray, and show which tokens the draft got right."""
    from specdec.oneshot import generate_once

    _quiet_libraries()
    if draft is None:
        draft = "smollm2-draft" if target is None else "none"  # the embedded draft fits the embedded target
    models: dict[str, object] = {"target": {"model": target or "smollm2", "dtype": dtype}}
    if draft != "none":
        models["draft"] = {"model": draft, "dtype": dtype}
    config = parse_config({**models, "speculation": {"num_speculative_tokens": num_speculative_tokens}})
    _preflight(config)
    asyncio.run(
        generate_once(
            config,
            prompt,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            is_chat=not raw,
            out=Console(highlight=False),
            info=console,
        )
    )


def _quiet_libraries() -> None:
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.getLogger("transformers").setLevel(logging.ERROR)


@models_app.command("pull")
def models_pull(name: Annotated[str, typer.Argument(help="smollm2")]) -> None:
    """Make an embedded model ready for use: download, verify, convert once."""
    from specdec.models import pull

    for model, path in pull(name, console=console).items():
        console.print(f"{model}: {path}", soft_wrap=True)


@models_app.command("list")
def models_list() -> None:
    """List the embedded models."""
    from specdec.models import list_embedded

    table = Table("name", "role", "ready", "what it is")
    for model in list_embedded():
        table.add_row(model.name, model.role, "yes" if model.is_ready else "no", model.description)
    Console().print(table)
