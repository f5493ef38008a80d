"""The command line: clear errors in one line, nothing left running."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from pathlib import Path

import httpx
import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from specdec.models import load_tokenizer, pull, resolve_model
from tests.e2e.harness import Server, descendants, is_running, private_env, specdec_command, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]


def run(*args: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [specdec_command(), *args], capture_output=True, text=True, timeout=200, env=private_env(folder)
    )


def assert_one_line(result: subprocess.CompletedProcess[str], *parts: str) -> None:
    assert result.returncode == 2
    assert result.stdout == ""
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error:")
    for part in parts:
        assert part in line


def test_generate_prints_the_text_and_the_figures(tmp_path: Path) -> None:
    # No near tie in its answer, which bfloat16 might decide otherwise on another CPU.
    result = run("generate", "Name the capital of France.", "--max-tokens", "20", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "The capital of France is Paris."
    assert "accepted of" in result.stderr


def test_a_pair_with_different_vocabularies_is_refused_with_both_sizes(tmp_path: Path) -> None:
    pull("smollm2")
    other = tmp_path / "other-draft"
    tokenizer = load_tokenizer("smollm2")
    tokenizer.add_tokens(["<one_more>"])
    tokenizer.save_pretrained(other)
    config = AutoConfig.from_pretrained(resolve_model("smollm2-draft"))
    config.vocab_size = len(tokenizer)
    AutoModelForCausalLM.from_config(config).save_pretrained(other)
    result = run("serve", "--target", "smollm2", "--draft", str(other), folder=tmp_path)
    assert_one_line(result, "49152", "49153")


def test_a_busy_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = run("serve", "--http-port", str(port), folder=tmp_path)
    assert_one_line(result, str(port))


def test_an_unknown_model_is_named_with_the_ones_there_are(tmp_path: Path) -> None:
    assert_one_line(run("serve", "--target", "smallm2", folder=tmp_path), "smallm2", "smollm2")


def test_a_misspelt_key_is_named(tmp_path: Path) -> None:
    config = tmp_path / "bad.yaml"
    text = (Path(__file__).parents[2] / "deployments" / "local.yaml").read_text()
    config.write_text(text.replace("num_replicas: 1", "num_replicaz: 1", 1))
    result = run("serve", str(config), folder=tmp_path)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert "applications[specdec].deployments[Gateway].num_replicaz" in result.stderr
    assert "did you mean num_replicas?" in result.stderr


def test_health_tells_when_requests_are_served_and_sigterm_leaves_no_process(tmp_path: Path) -> None:
    """Every fixture of these tests stops its server with Ctrl-C, and sees that it left nothing."""
    server = Server(tmp_path, {"target": {"model": "smollm2"}, "draft": {"model": "smollm2-draft"}})
    try:
        statuses: list[int] = []
        while 200 not in statuses:
            assert server.process.poll() is None, server.log()
            try:
                statuses.append(httpx.get(f"{server.url}/health", timeout=5).status_code)
            except httpx.HTTPError:
                time.sleep(0.1)
        assert set(statuses[:-1]) <= {404, 503}  # 404 from the proxy, before it has heard of the application
        body = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200
        server.wait_until_ready()  # its signal handlers are in place
        processes = descendants(server.process.pid)
        assert len(processes) > 4
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        wait_for(lambda: not any(is_running(pid) for pid in processes), 10, "no process left")
        assert "Traceback" not in server.log()
    finally:
        server.stop()


def test_an_interrupted_start_ends_without_a_trace(tmp_path: Path) -> None:
    server = Server(tmp_path, {"target": {"model": "smollm2"}, "draft": {"model": "smollm2-draft"}})
    wait_for(lambda: len(descendants(server.process.pid)) > 3, 60, "Ray is starting")
    processes = descendants(server.process.pid)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) in (130, signal.SIGTERM)  # ours, or Ray's own while it starts
    wait_for(lambda: not any(is_running(pid) for pid in processes), 10, "no process left")
    assert "Traceback" not in server.log()
