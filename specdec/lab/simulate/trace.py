"""Simulations as a Chrome trace, for https://ui.perfetto.dev or chrome://tracing.

Each simulation is a process of the trace with one track per device and one or more per lane of the
coordinator. Timestamps are virtual microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from specdec.lab.simulate.errors import SimulationError
from specdec.lab.simulate.recording import Round
from specdec.lab.simulate.simulate import Simulation

Event = dict[str, Any]

_FIRST_DEVICE = 100
"""Tracks below belong to lanes."""


def as_trace(simulations: Sequence[Simulation]) -> Event:
    """The trace of several simulations, each from 0 on."""
    events = [event for pid, simulation in enumerate(simulations, 1) for event in _events(pid, simulation)]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def write_trace(path: Path, simulations: Sequence[Simulation]) -> None:
    """Write it as JSON.

    Raises:
        SimulationError: the file cannot be written.
    """
    try:
        path.write_text(json.dumps(as_trace(simulations), separators=(",", ":")) + "\n", encoding="utf-8")
    except OSError as error:
        raise SimulationError(f"--trace: cannot write {path}: {error}") from error


def _events(pid: int, simulation: Simulation) -> Iterator[Event]:
    yield _meta(pid, 0, "process_name", {"name": simulation.scenario.name})
    yield _meta(pid, 0, "process_sort_index", {"sort_index": pid})
    tid = 0
    for target in (device.name for device in simulation.devices if device.role == "target"):
        for rounds in _apart([done for done in simulation.rounds if done.target == target]):
            tid += 1
            yield from _track(pid, tid, f"coordinator, lane of {target}")
            for done in rounds:
                yield from _round(pid, tid, done)
    for tid, device in enumerate(simulation.devices, _FIRST_DEVICE):
        yield from _track(pid, tid, device.name)
        for span in device.spans:
            args = {"sequences": span.num_sequences, "tokens": span.num_tokens}
            yield _complete(pid, tid, span.name, span.start_s, span.end_s, args)


def _apart(rounds: Sequence[Round]) -> list[list[Round]]:
    """Rounds of one lane, shared out so that those of one track follow each other.

    Two groups of sequences that take turns have rounds at the same time.
    """
    tracks: list[list[Round]] = []
    for done in sorted(rounds, key=lambda done: done.start_s):
        track = next((track for track in tracks if track[-1].end_s <= done.start_s), None)
        if track is None:
            tracks.append([done])
        else:
            track.append(done)
    return tracks


def _round(pid: int, tid: int, done: Round) -> Iterator[Event]:
    args = {
        "sequences": done.num_sequences,
        "draft tokens": done.num_draft_tokens,
        "accepted": done.num_accepted,
        "committed": done.num_committed,
    }
    yield _complete(pid, tid, "round", done.start_s, done.end_s, args)
    if done.proposals:
        hits = {"hits": done.num_hits, "misses": done.num_misses}
        yield _complete(pid, tid, "propose", done.start_s, done.proposed_s, hits)
    yield _complete(pid, tid, "verify", done.verify_start_s, done.end_s, {})


def _track(pid: int, tid: int, name: str) -> Iterable[Event]:
    return (
        _meta(pid, tid, "thread_name", {"name": name}),
        _meta(pid, tid, "thread_sort_index", {"sort_index": tid}),
    )


def _meta(pid: int, tid: int, name: str, args: Event) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "name": name, "args": args}


def _complete(pid: int, tid: int, name: str, start_s: float, end_s: float, args: Event) -> Event:
    start_us, end_us = round(start_s * 1e6, 3), round(end_s * 1e6, 3)
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "name": name,
        "ts": start_us,
        "dur": round(end_us - start_us, 3),
        "args": args,
    }
