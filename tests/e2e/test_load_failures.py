"""Models that cannot be served: one line for the operator and an exit status, whoever finds out."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from specdec.models import pull, resolve_model
from tests.e2e.harness import descendants, free_port, is_running, private_env, specdec_command, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]


def last_line(*args: str, folder: Path) -> str:
    """Of a `specdec serve` that fails; it prints no traceback."""
    ports = ("--http-port", str(free_port()), "--grpc-port", str(free_port()))
    result = subprocess.run(
        [specdec_command(), "serve", *args, *ports],
        capture_output=True,
        text=True,
        timeout=150,
        env=private_env(folder),
    )
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    assert "ready " not in result.stderr
    line = result.stderr.strip().splitlines()[-1]
    assert line.startswith("error:")
    return line


def copy_of_draft(folder: Path) -> Path:
    pull("smollm2")
    copy = folder / "draft"
    shutil.copytree(resolve_model("smollm2-draft"), copy)
    return copy


def test_a_draft_whose_weights_are_cut_off_is_named(tmp_path: Path) -> None:
    draft = copy_of_draft(tmp_path)
    (weights,) = draft.glob("*.safetensors")
    os.truncate(weights, weights.stat().st_size // 2)
    line = last_line("--draft", str(draft), folder=tmp_path)
    assert "DraftWorker: the draft model" in line
    assert str(draft) in line
    assert "cannot be loaded" in line


def test_a_target_that_does_not_fit_into_memory_is_told_which_setting_to_change(tmp_path: Path) -> None:
    capacity = "args.target.kv_capacity_tokens=1000000000000"
    line = last_line("--draft", "none", "--set", capacity, folder=tmp_path)
    assert "TargetWorker: the target model 'smollm2' does not fit into memory" in line
    assert "target.kv_capacity_tokens" in line


@contextmanager
def ray_cluster(folder: Path) -> Iterator[str]:
    """A head node of its own; yields its address."""
    port = free_port()
    command = [str(Path(specdec_command()).parent / "ray"), "start", "--head", f"--port={port}", "--block"]
    command += ["--include-dashboard=false", "--num-cpus=8", f"--ray-client-server-port={free_port()}"]
    with (folder / "ray.log").open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=private_env(folder), start_new_session=True
        )
    try:
        wait_for(lambda: "Ray runtime started" in (folder / "ray.log").read_text(), 60, "Ray")
        yield f"127.0.0.1:{port}"
    finally:
        processes = [process.pid, *descendants(process.pid)]
        for pid in processes:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
        process.wait(30)


def test_on_a_cluster_workers_find_that_a_folder_is_not_there_and_that_a_pair_does_not_fit(
    tmp_path: Path,
) -> None:
    draft = copy_of_draft(tmp_path)
    (draft / "tokenizer.json").write_text("{}")
    with ray_cluster(tmp_path) as address:
        line = last_line("--target", str(tmp_path / "absent"), "--address", address, folder=tmp_path)
        assert str(tmp_path / "absent") in line
        line = last_line("--draft", str(draft), "--address", address, folder=tmp_path)
        assert "DraftWorker: " in line
        assert str(draft) in line
