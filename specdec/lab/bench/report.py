"""Figures for people (a table, a plot) and for programs (JSON)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.table import Table

from specdec import __version__
from specdec.lab.bench.figures import Figures, Spread
from specdec.lab.errors import BenchError


def table(levels: Sequence[Figures], title: str) -> Table:
    """One column a level: three of them fit a terminal of 80 columns."""
    result = Table(title=title, caption="times in ms: p50/p90/p99")
    result.add_column("streams")
    for level in levels:
        result.add_column(str(level.concurrency), justify="right")
    for name, cell in _ROWS:
        result.add_row(name, *map(cell, levels))
    if any(level.acceptance for level in levels):
        result.add_row("accepted ÷ drafted", *(_rate(level, "draft_acceptance_rate") for level in levels))
        result.add_row("tokens per spec step", *(_rate(level, "mean_acceptance_length") for level in levels))
    result.add_row("errors", *map(_errors, levels))
    return result


def _milliseconds(times: Spread | None) -> str:
    if times is None:
        return "-"
    return "/".join(f"{1000 * time_s:.{_digits(time_s)}f}" for time_s in (times.p50, times.p90, times.p99))


def _digits(time_s: float) -> int:
    return 1 if time_s < 0.1 else 0


def _rate(level: Figures, name: str) -> str:
    return f"{getattr(level.acceptance, name):.2f}" if level.acceptance else "-"


def _errors(level: Figures) -> str:
    return ", ".join(f"{count} × {kind}" for kind, count in level.errors.items()) or "none"


_ROWS: tuple[tuple[str, Callable[[Figures], str]], ...] = (
    ("succeeded", lambda level: f"{level.num_succeeded}/{level.num_requests}"),
    ("tokens/s", lambda level: f"{level.tokens_per_s:.1f}" + ("" if level.is_counted else " (events)")),
    ("TTFT", lambda level: _milliseconds(level.ttft_s)),
    ("TPOT", lambda level: _milliseconds(level.tpot_s)),
    ("between events", lambda level: _milliseconds(level.gap_s)),
    ("latency", lambda level: _milliseconds(level.latency_s)),
    ("tokens per event", lambda level: f"{level.tokens_per_event:.2f}"),
)


def as_json(levels: Sequence[Figures], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Everything, in seconds, with what is needed to repeat it."""
    return {
        "specdec_version": __version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **settings,
        "levels": [_level(level) for level in levels],
    }


def _level(level: Figures) -> dict[str, Any]:
    values = asdict(level)
    if level.acceptance is not None:
        values["acceptance"] |= {
            "draft_acceptance_rate": level.acceptance.draft_acceptance_rate,
            "mean_acceptance_length": level.acceptance.mean_acceptance_length,
        }
    return values


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    try:
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise BenchError(f"--output: cannot write {path}: {error}") from error


def require_matplotlib() -> None:
    """Before the load runs: a missing library must not cost the measurement.

    Raises:
        BenchError: matplotlib is not installed.
    """
    try:
        import matplotlib  # type: ignore[import-not-found, unused-ignore]  # noqa: F401
    except ImportError as error:
        raise BenchError("--plot needs matplotlib: pip install 'specdec[bench]'") from error


def write_plot(path: Path, levels: Sequence[Figures], title: str) -> None:
    """Throughput, TTFT and TPOT over the number of streams."""
    from matplotlib.backends.backend_agg import (  # type: ignore[import-not-found, unused-ignore]
        FigureCanvasAgg,
    )
    from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    throughput, ttft, tpot = figure.subplots(1, 3)
    streams = [level.concurrency for level in levels]
    throughput.plot(streams, [level.tokens_per_s for level in levels], marker="o")
    throughput.set(ylabel="tokens/s", ylim=(0, None))
    _plot_spreads(ttft, "TTFT, ms", streams, [level.ttft_s for level in levels])
    _plot_spreads(tpot, "TPOT, ms", streams, [level.tpot_s for level in levels])
    for axes in (throughput, ttft, tpot):
        axes.set(xlabel="streams", xticks=streams)
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise BenchError(f"--plot: cannot write {path}: {error}") from error


def _plot_spreads(axes: Any, label: str, streams: list[int], spreads: list[Spread | None]) -> None:
    known = [(count, spread) for count, spread in zip(streams, spreads, strict=True) if spread is not None]
    for name in ("p50", "p90", "p99"):
        axes.plot(
            [count for count, _ in known],
            [1000 * getattr(spread, name) for _, spread in known],
            marker="o",
            label=name,
        )
    axes.set(ylabel=label, ylim=(0, None))
    if known:
        axes.legend()
