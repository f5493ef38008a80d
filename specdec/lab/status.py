"""`specdec status`: what `GET /status` says, as tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import httpx
from rich.box import SIMPLE
from rich.table import Table

from specdec.lab.errors import BenchError

TIMEOUT_S = 10.0

Status = Mapping[str, Any]


def read(url: str, api_key: str | None) -> tuple[list[Status], list[Status]]:
    """The coordinators of the deployment behind a URL, with or without ``/v1``, and its absent pairs.

    Raises:
        BenchError: nobody answers there, or something else does.
    """
    base = url.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        response = httpx.get(f"{base}/status", headers=headers, timeout=TIMEOUT_S)
        response.raise_for_status()
        answer = response.json()
        return list(answer["coordinators"]), list(answer["absent"])
    except httpx.HTTPStatusError as error:
        raise BenchError(f"{base}/status: HTTP {error.response.status_code}") from error
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        raise BenchError(
            f"{base}/status: {error or type(error).__name__}; is specdec served there?"
        ) from error


def coordinators_table(coordinators: Iterable[Status]) -> Table:
    """One row each, 80 columns wide: load, acceptance, time of a round."""
    table = Table(
        "id",
        box=SIMPLE,
        padding=0,
        pad_edge=False,
        caption="accepted: of drafted tokens; a step: tokens of a spec step; prepared: of them",
    )
    table.add_column("model", max_width=12, no_wrap=True)
    for heading in ("running", "waiting", "round", "tokens", "accepted", "a step", "prepared"):
        table.add_column(heading, justify="right")
    for status in coordinators:
        steps = status["num_spec_steps"]
        table.add_row(
            _short(status["coordinator_id"]),
            _last_part(status["model"]),
            str(status["num_running"]),
            str(status["num_waiting"]),
            f"{1000 * status['round_s']:.1f} ms" if status["round_s"] else "-",
            str(status["num_output_tokens"]),
            _ratio(status["num_accepted_draft_tokens"], status["num_draft_tokens"]),
            f"{1 + status['num_accepted_draft_tokens'] / steps:.2f}" if steps else "-",
            _ratio(status["num_prepared_drafts"], steps),
        )
    return table


def workers_table(coordinators: Iterable[Status]) -> Table:
    """One row per worker; several coordinators share them."""
    workers = {
        worker["worker_id"]: worker
        for status in coordinators
        for worker in (*status["targets"], *status["drafts"])
    }
    table = Table(
        "worker",
        "role",
        "model",
        "device",
        "node",
        box=SIMPLE,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        caption="seqs: sequences held; KV: share of the cache in use",
    )
    for heading in ("pid", "seqs", "KV"):
        table.add_column(heading, justify="right")
    for worker in sorted(workers.values(), key=lambda worker: (worker["role"], worker["worker_id"])):
        table.add_row(
            _short(worker["worker_id"]),
            worker["role"],
            _last_part(worker["model"]),
            _short(worker["device"]),
            _short(worker["node_id"]),
            str(worker["pid"]),
            str(worker["num_sequences"]),
            _ratio(worker["kv_tokens_in_use"], worker["kv_capacity_tokens"]),
        )
    return table


def _short(name: str) -> str:
    return name[:8]


def _last_part(model: str) -> str:
    return model.rsplit("/", 1)[-1]


def _ratio(part: int, whole: int) -> str:
    return f"{part / whole:.2f}" if whole else "-"
