"""`specdec status`: what is served, in tables that fit a terminal."""

from __future__ import annotations

import io
from dataclasses import asdict

import httpx
import pytest
from rich.console import Console

from specdec.lab.errors import BenchError
from specdec.lab.status import coordinators_table, read, workers_table
from specdec.messages import CoordinatorStatus, WorkerStatus
from specdec.types import WorkerId


def worker(name: str, role: str, **fields) -> WorkerStatus:
    values = {
        "pid": 4321,
        "node_id": "n" * 56,
        "model": "Qwen/Qwen3-0.6B",
        "device": "gpu 0",
        "vocab_size": 100,
        "max_context": 1000,
        "kv_capacity_tokens": 1000,
        "kv_tokens_in_use": 250,
        "num_sequences": 3,
        "num_calls": 17,
    }
    return WorkerStatus(worker_id=WorkerId(name), role=role, **{**values, **fields})


def coordinator(name: str, **fields) -> dict:
    values = {
        "pid": 1234,
        "is_ready": True,
        "num_running": 3,
        "num_waiting": 2,
        "model": "m",
        "target_model": "t",
        "max_context": 1000,
        "num_speculative_tokens": 4,
        "targets": (worker("target-1", "target"),),
        "drafts": (worker("draft-1", "draft"),),
        "num_spec_steps": 100,
        "num_draft_tokens": 400,
        "num_accepted_draft_tokens": 150,
        "num_output_tokens": 260,
        "num_sequence_rounds": 110,
        "round_s": 0.0421,
        "num_prepared_drafts": 70,
    }
    return asdict(CoordinatorStatus(coordinator_id=name, **{**values, **fields}))


def text_of(table) -> list[str]:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table)
    return [line.strip() for line in console.export_text().splitlines() if line.strip()]


def test_a_coordinators_row_has_its_load_its_rates_and_the_time_of_a_round():
    lines = text_of(
        coordinators_table([coordinator("coordinator-1"), coordinator("c2", num_spec_steps=0, round_s=0.0)])
    )
    (row,) = [line.split() for line in lines if line.startswith("coordina") and "42.1" in line]
    assert row == ["coordina", "m", "3", "2", "42.1", "ms", "260", "0.38", "2.50", "0.70"]
    (idle,) = [line.split() for line in lines if line.startswith("c2")]
    assert idle[4] == "-"
    assert idle[-2:] == ["-", "-"]


def test_a_long_name_does_not_push_figures_out_of_80_columns():
    lines = text_of(coordinators_table([coordinator("c", model="org/a-rather-long-name", round_s=0.1193)]))
    assert lines[0].endswith("tokens accepted a step prepared")
    (row,) = [line for line in lines if line.startswith("c ")]
    assert "119.3 ms" in row
    assert row.endswith("0.70")


def test_workers_that_coordinators_share_are_shown_once():
    lines = text_of(workers_table([coordinator("a"), coordinator("b")]))
    rows = [line.split() for line in lines if "4321" in line]
    assert [row[1] for row in rows] == ["draft", "target"]
    assert rows[0][-2:] == ["3", "0.25"]
    assert "Qwen3-0.6B" in rows[0]


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nonsense", "http://127.0.0.1:1/v1/"])
def test_nobody_there_is_one_line(url):
    with pytest.raises(BenchError, match="is specdec served there"):
        read(url, None)


def test_the_key_is_sent_and_a_refusal_is_said(monkeypatch):
    seen = []

    def get(url, headers, timeout):
        seen.append((url, headers))
        status = 200 if headers else 401
        return httpx.Response(
            status, json={"coordinators": [], "absent": []}, request=httpx.Request("GET", url)
        )

    monkeypatch.setattr(httpx, "get", get)
    assert read("http://host:1/v1/", "secret") == ([], [])
    assert seen[0] == ("http://host:1/status", {"Authorization": "Bearer secret"})
    with pytest.raises(BenchError, match="HTTP 401"):
        read("http://host:1", None)
