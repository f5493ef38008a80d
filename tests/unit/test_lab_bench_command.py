"""`specdec bench serve` as a user runs it, and what it writes."""

from __future__ import annotations

import asyncio
import builtins
import json
import subprocess
import sys

import pytest
from rich.console import Console
from typer.testing import CliRunner

from specdec.cli import app
from specdec.gateway.http import build_http_app
from specdec.lab.bench.acceptance import Acceptance
from specdec.lab.bench.bench import Plan
from specdec.lab.bench.figures import summarise
from specdec.lab.bench.report import as_json, table
from specdec.lab.errors import BenchError, RequestFailed
from tests.fakes import MODEL_NAME, ScriptedBackend, byte_ids_of, only, serving, toy_service
from tests.unit.test_lab_bench_figures import record


async def run(url, *options):
    """The command beside the server, in a thread."""
    arguments = ["bench", "serve", "--url", url, *options]
    return await asyncio.to_thread(CliRunner().invoke, app, arguments)


def serving_toy(max_context=4096, **options):
    backend = ScriptedBackend(byte_ids_of("red green blue "), chunk_sizes=(2,))
    service = toy_service(backend, max_context=max_context, **options)
    return serving(build_http_app(only(service)))


def printed(renderable):
    console = Console(width=300, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(renderable)
    return console.export_text()


async def test_the_command_reports_every_level(tmp_path):
    output = tmp_path / "out.json"
    async with serving_toy() as url:
        result = await run(
            f"{url}/v1",
            *("--concurrency", "1,2", "--num-prompts", "3", "--max-tokens", "6", "--prompt-tokens", "5"),
            *("--ignore-eos", "--output", str(output)),
        )
    assert result.exit_code == 0, result.output
    content = json.loads(output.read_text())
    assert (content["model"], content["max_tokens"], content["ignore_eos"]) == (MODEL_NAME, 6, True)
    for level, streams in zip(content["levels"], (1, 2), strict=True):
        assert (level["concurrency"], level["num_succeeded"], level["num_tokens"]) == (streams, 3, 18)
        assert level["errors"] == {}
        assert level["ttft_s"]["p99"] >= level["ttft_s"]["p50"] > 0
        assert level["acceptance"]["draft_acceptance_rate"] == 0.5
        assert level["acceptance"]["mean_acceptance_length"] == 2.0


async def test_the_plot_is_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    plot = tmp_path / "out.png"
    async with serving_toy() as url:
        result = await run(
            url, "--concurrency", "1", "--num-prompts", "2", "--max-tokens", "3", "--plot", str(plot)
        )
    assert result.exit_code == 0, result.output
    assert plot.read_bytes().startswith(b"\x89PNG")


async def test_a_missing_plotting_library_is_told_before_the_load(monkeypatch, tmp_path):
    real_import = builtins.__import__

    def without_matplotlib(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    result = await run("http://127.0.0.1:9", "--plot", str(tmp_path / "out.png"))
    assert isinstance(result.exception, BenchError)
    assert "pip install 'specdec[bench]'" in str(result.exception)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--concurrency", "1,x"], "--concurrency"),
        (["--concurrency", "0"], "--concurrency"),
        (["--extra-body", "{"], "--extra-body is not JSON"),
        (["--extra-body", "[]"], "a JSON object"),
        (["--prompts-file", "/nowhere"], "cannot read"),
    ],
)
async def test_bad_options_are_told_before_anything_is_sent(options, message):
    result = await run("http://127.0.0.1:9", *options)
    assert isinstance(result.exception, BenchError)
    assert message in str(result.exception)


async def test_a_server_that_is_not_there():
    async with serving_toy() as url:
        pass
    result = await run(url)
    assert isinstance(result.exception, BenchError)
    assert f"{url} is not reachable" in str(result.exception)


async def test_an_unknown_model():
    async with serving_toy() as url:
        result = await run(url, "--model", "other")
    assert "serves no model 'other'" in str(result.exception)


async def test_a_missing_key_and_the_right_one(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    async with serving_toy(api_keys_file=str(keys)) as url:
        refused = await run(url, "--concurrency", "1", "--num-prompts", "1")
        accepted = await run(
            url, "--concurrency", "1", "--num-prompts", "1", "--max-tokens", "2", "--api-key", "secret"
        )
    assert "--api-key" in str(refused.exception)
    assert accepted.exit_code == 0, accepted.output


async def test_nothing_but_failures_is_an_error_after_the_table():
    async with serving_toy(max_context=8) as url:
        result = await run(url, "--concurrency", "1", "--num-prompts", "2", "--warmup", "0")
    assert "http_400" in result.stdout
    assert "no request with 1 streams succeeded: HTTP 400" in str(result.exception)


def test_the_table_shows_milliseconds_and_errors():
    outcomes = [record(gaps_s=(0.05,)), RequestFailed("timeout", "late")]
    text = printed(table([summarise(4, outcomes, 2.0, Acceptance(10, 20, 6))], "title"))
    for cell in (
        "title",
        "1/2",
        "5.5",
        "500/500/500",
        "50.0/50.0/50.0",
        "1 × timeout",
        "0.30",
        "1.60",
    ):
        assert cell in text


def test_the_table_says_when_tokens_were_not_counted():
    assert "(events)" in printed(table([summarise(1, [record(is_counted=False)], 1.0)], ""))


def test_a_level_without_figures_is_still_a_row_and_valid_json():
    levels = [summarise(1, [RequestFailed("timeout", "late")], 1.0)]
    assert "0/1" in printed(table(levels, ""))
    assert json.loads(json.dumps(as_json(levels, {})))["levels"][0]["ttft_s"] is None


def test_requests_per_level():
    assert [Plan([]).num_requests(streams) for streams in (1, 2, 32)] == [8, 8, 128]
    assert Plan([1, 8], 10).total == 20


def test_the_command_loads_neither_torch_nor_ray():
    code = "import sys, specdec.cli; print({'torch', 'ray', 'transformers', 'matplotlib'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
