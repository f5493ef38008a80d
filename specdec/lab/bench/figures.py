"""From records of requests to figures: pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specdec.lab.bench.acceptance import Acceptance
from specdec.lab.bench.answer import Record
from specdec.lab.errors import RequestFailed


@dataclass(frozen=True, slots=True)
class Spread:
    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """None without values: no figure is better than a zero that reads like one."""
        ordered = sorted(values)
        if not ordered:
            return None
        return cls(
            math.fsum(ordered) / len(ordered),
            percentile(ordered, 50),
            percentile(ordered, 90),
            percentile(ordered, 99),
        )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks, as numpy's default; ``ordered`` ascends and is not empty."""
    rank = (len(ordered) - 1) * percent / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One number of streams. Times in seconds, of requests that succeeded."""

    concurrency: int
    num_requests: int
    num_succeeded: int
    errors: dict[str, int]
    """Failed requests by kind."""
    first_error: str | None
    elapsed_s: float
    """From the first request sent to the last one over."""
    num_prompt_tokens: int
    num_tokens: int
    is_counted: bool
    """Every token count is the server's; otherwise some are counts of events."""
    tokens_per_s: float
    requests_per_s: float
    tokens_per_event: float
    ttft_s: Spread | None
    tpot_s: Spread | None
    gap_s: Spread | None
    """Between events with text: what a reader of the stream waits."""
    latency_s: Spread | None
    acceptance: Acceptance | None


def summarise(
    concurrency: int,
    outcomes: Sequence[Record | RequestFailed],
    elapsed_s: float,
    acceptance: Acceptance | None = None,
) -> Figures:
    """Figures of one level; ``acceptance`` is the server's own count, for want of one in the answers."""
    records = [outcome for outcome in outcomes if isinstance(outcome, Record)]
    failures = [outcome for outcome in outcomes if isinstance(outcome, RequestFailed)]
    num_tokens = sum(record.num_tokens for record in records)
    num_events = sum(record.num_text_events for record in records)
    return Figures(
        concurrency=concurrency,
        num_requests=len(outcomes),
        num_succeeded=len(records),
        errors=dict(Counter(failure.kind for failure in failures).most_common()),
        first_error=failures[0].message if failures else None,
        elapsed_s=elapsed_s,
        num_prompt_tokens=sum(record.num_prompt_tokens for record in records),
        num_tokens=num_tokens,
        is_counted=all(record.is_counted for record in records),
        tokens_per_s=num_tokens / elapsed_s if elapsed_s else 0.0,
        requests_per_s=len(records) / elapsed_s if elapsed_s else 0.0,
        tokens_per_event=num_tokens / num_events if num_events else 0.0,
        ttft_s=Spread.of(record.ttft_s for record in records),
        tpot_s=Spread.of(tpot_s for record in records if (tpot_s := record.tpot_s) is not None),
        gap_s=Spread.of(gap_s for record in records for gap_s in record.gaps_s),
        latency_s=Spread.of(record.latency_s for record in records),
        acceptance=Acceptance.total(record.acceptance for record in records) or acceptance,
    )
