"""What a run showed: for people (tables) and for programs (JSON)."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.table import Table

from specdec import __version__
from specdec.lab.bench.figures import percentile
from specdec.lab.chaos.errors import ChaosError
from specdec.lab.chaos.injector import Hit
from specdec.lab.chaos.run import Outcome, Record

ONSET_S = 0.5
"""A silence that begins this long after a fault at most is counted as its pause."""
NUM_EXAMPLES = 10
"""Different texts that are described."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pauses:
    """Longest silence of each stream that was read to its end, the wait for its first event included."""

    num_streams: int
    median_s: float
    p99_s: float
    longest_s: float

    @classmethod
    def of(cls, records: Iterable[Record]) -> Pauses | None:
        """None without a stream."""
        silences = sorted(
            record.answer.longest_s
            for record in records
            if record.answer is not None and record.request.is_streamed and not record.answer.has_left
        )
        if not silences:
            return None
        return cls(
            num_streams=len(silences),
            median_s=percentile(silences, 50),
            p99_s=percentile(silences, 99),
            longest_s=silences[-1],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultLine:
    """One fault. Times in seconds."""

    kind: str
    at_s: float
    """Since the first fault."""
    pid: int | None
    """None of a scaling."""
    num_sequences: int
    """Of the victim, at that time."""
    num_open: int
    """Requests in flight, at that time."""
    hang_s: float | None
    """Until it went on; None where it never did."""
    was_replaced: bool
    """It was killed or frozen, or Serve did not wait for the end of its hang."""
    num_paused: int
    """Streams that were silent for longer than usual from then on."""
    pause_s: float
    """Longest of these silences; other faults may have prolonged it."""
    recovery_s: float | None
    """Until the role was complete again; None where it never was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All figures of a run."""

    num_requests: int
    num_equal: int
    """Texts equal to the undisturbed ones, read to the end."""
    num_equal_parts: int
    """Beginnings of them, where the client left."""
    num_different: int
    differences: tuple[str, ...]
    """The first of them."""
    failures: dict[str, int]
    """By message."""
    num_by_way: dict[str, int]
    """Requests by protocol, and whether they were streams."""
    faults: tuple[FaultLine, ...]
    num_left_out: int
    pauses: Pauses | None
    pauses_afterwards: Pauses | None
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    num_accepted_afterwards: int
    """When all was healthy again."""
    recovery_s: float | None
    idle_s: float | None
    missing: tuple[str, ...]
    leaked: tuple[str, ...]

    @property
    def num_failed(self) -> int:
        return sum(self.failures.values())

    @property
    def problems(self) -> tuple[str, ...]:
        """Whatever must not be, in words."""
        found = [f"{self.num_different} texts differ"] if self.num_different else []
        found += [f"{self.num_failed} requests failed"] if self.num_failed else []
        found += [f"not recovered: {line}" for line in self.missing]
        found += [f"leaked: {line}" for line in self.leaked]
        if not self.num_accepted_draft_tokens or not self.num_accepted_afterwards:
            found.append("no draft token was accepted")
        return tuple(found)

    @property
    def kinds(self) -> Counter[str]:
        """Faults by kind."""
        return Counter(fault.kind for fault in self.faults)


def make_report(outcome: Outcome) -> Report:
    """Figures of a run."""
    records = (*outcome.records, *outcome.afterwards)
    good = [record for record in records if record.failure is None and record.difference is None]
    parts = [record for record in good if record.answer is not None and record.answer.has_left]
    different = [record for record in records if record.difference is not None]
    first_s = min((hit.at_s for hit in outcome.hits), default=0.0)
    return Report(
        num_requests=len(records),
        num_equal=len(good) - len(parts),
        num_equal_parts=len(parts),
        num_different=len(different),
        differences=tuple(map(_describe, different[:NUM_EXAMPLES])),
        failures=dict(Counter(record.failure for record in records if record.failure is not None)),
        num_by_way=dict(Counter(map(_way, records))),
        faults=tuple(_fault_line(hit, first_s, records) for hit in outcome.hits),
        num_left_out=outcome.num_left_out,
        pauses=Pauses.of(outcome.records),
        pauses_afterwards=Pauses.of(outcome.afterwards),
        num_draft_tokens=_sum(records, "num_draft_tokens"),
        num_accepted_draft_tokens=_sum(records, "num_accepted_draft_tokens"),
        num_accepted_afterwards=_sum(outcome.afterwards, "num_accepted_draft_tokens"),
        recovery_s=outcome.recovery_s,
        idle_s=outcome.idle_s,
        missing=outcome.missing,
        leaked=outcome.leaked,
    )


def _sum(records: Iterable[Record], name: str) -> int:
    return sum(getattr(record.answer, name) for record in records if record.answer is not None)


def _way(record: Record) -> str:
    return f"{record.request.protocol} {'stream' if record.request.is_streamed else 'whole'}"


def _describe(record: Record) -> str:
    request = record.request
    return (
        f"question {request.question.number} ({_way(record)}, pipeline {request.pipeline}, "
        f"gamma at most {request.max_gamma}): {record.difference}"
    )


def _fault_line(hit: Hit, first_s: float, records: Sequence[Record]) -> FaultLine:
    # A scaling takes its time: whatever happens until it is over may be of its making.
    last_onset_s = (hit.recovered_at_s or math.inf) if hit.fault.is_scaling else hit.at_s + ONSET_S
    durations_s = [
        pause.duration_s
        for record in records
        if record.answer is not None
        for pause in record.answer.pauses
        if pause.from_s <= last_onset_s and pause.to_s >= hit.at_s
    ]
    return FaultLine(
        kind=hit.fault.kind,
        at_s=hit.at_s - first_s,
        pid=None if hit.victim is None else hit.victim.pid,
        num_sequences=0 if hit.victim is None else hit.victim.num_sequences,
        num_open=hit.num_open,
        hang_s=hit.fault.hang_s,
        was_replaced=hit.was_replaced or hit.fault.action in ("kill", "freeze"),
        num_paused=len(durations_s),
        pause_s=max(durations_s, default=0.0),
        recovery_s=hit.recovery_s,
    )


def summary_table(report: Report) -> Table:
    """The whole run."""
    table = Table("measure", title="texts and processes under faults")
    table.add_column("value", justify="right")
    table.add_row("requests", str(report.num_requests))
    table.add_row("equal texts", str(report.num_equal))
    table.add_row("equal beginnings, client left", str(report.num_equal_parts))
    table.add_row("different texts", _red_unless_zero(report.num_different))
    table.add_row("failed", _red_unless_zero(report.num_failed))
    table.add_row("faults", str(len(report.faults)))
    table.add_row("draft tokens accepted", f"{report.num_accepted_draft_tokens} / {report.num_draft_tokens}")
    for name, pauses in (("", report.pauses), (", healthy again", report.pauses_afterwards)):
        if pauses is not None:
            values = f"{pauses.median_s:.2f} / {pauses.p99_s:.2f} / {pauses.longest_s:.2f} s"
            table.add_row(f"pause per stream: median / p99 / longest{name}", values)
    table.add_row("all replicas there after", _seconds(report.recovery_s))
    table.add_row("nothing held after", _seconds(report.idle_s))
    return table


def fault_table(report: Report) -> Table:
    """One line per kind of fault."""
    table = Table("fault", title="longest pause and recovery, by kind of fault")
    for heading in ("count", "sequences hit", "longest pause", "recovery: median", "longest"):
        table.add_column(heading, justify="right")
    for kind, count in sorted(report.kinds.items()):
        lines = [fault for fault in report.faults if fault.kind == kind]
        times_s = [fault.recovery_s for fault in lines if fault.recovery_s is not None]
        table.add_row(
            kind,
            str(count),
            str(sum(fault.num_sequences for fault in lines)),
            _seconds(max(fault.pause_s for fault in lines)),
            _seconds(statistics.median(times_s) if times_s else None),
            _seconds(max(times_s) if len(times_s) == count else None),
        )
    return table


def _seconds(value_s: float | None) -> str:
    return "[red]never[/red]" if value_s is None else f"{value_s:.2f} s"


def _red_unless_zero(count: int) -> str:
    return f"[red]{count}[/red]" if count else "0"


def as_json(report: Report, outcome: Outcome) -> dict[str, Any]:
    """Everything, with what is needed to repeat it."""
    return {
        "specdec_version": __version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "plan": asdict(outcome.plan),
        "problems": list(report.problems),
        "num_failed": report.num_failed,
        "num_faults_by_kind": dict(sorted(report.kinds.items())),
        **asdict(report),
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write figures to a file.

    Raises:
        ChaosError: it cannot be written.
    """
    try:
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ChaosError(f"--json: cannot write {path}: {error.strerror}") from error
