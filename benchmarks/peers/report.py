"""Medians over the rounds, ratios round by round, and the table for docs/benchmarks.md."""

from __future__ import annotations

import statistics
from typing import Any

Runs = dict[str, list[dict[str, float]]]


def medians(runs: Runs) -> dict[str, dict[str, float]]:
    return {key: _medians(of_step) for key, of_step in runs.items() if of_step}


def _medians(of_step: list[dict[str, float]]) -> dict[str, float]:
    names = [name for name in of_step[0] if all(name in run for run in of_step)]
    row = {name: round(statistics.median(run[name] for run in of_step), 3) for name in names}
    speeds = [run["tokens_per_s"] for run in of_step]
    return {**row, "tokens_per_s_min": round(min(speeds), 3), "tokens_per_s_max": round(max(speeds), 3)}


def ratio_rows(concurrency: tuple[int, ...]) -> list[tuple[str, str, str, str]]:
    """Name, numerator, denominator, and which figure of theirs."""
    speed = "tokens_per_s"
    rows = []
    for streams in concurrency:
        name = f"plain, {streams} stream{'s' if streams > 1 else ''}"
        rows.append((f"{name} ÷ vLLM plain", f"specdec_plain_{streams}", f"vllm_plain_{streams}", speed))
        rows.append(
            (f"{name} ÷ transformers", f"specdec_plain_{streams}", f"transformers_plain_{streams}", speed)
        )
    for streams in concurrency:
        name = f"speculative, {streams} stream{'s' if streams > 1 else ''}"
        ours = f"specdec_draft_{streams}"
        rows.append((f"{name} ÷ own plain", ours, f"specdec_plain_{streams}", speed))
        rows.append((f"{name} ÷ vLLM plain", ours, f"vllm_plain_{streams}", speed))
        rows.append((f"{name} ÷ vLLM with draft", ours, f"vllm_draft_{streams}", speed))
    rows.append(
        (
            "speculative, 1 stream ÷ transformers assisted",
            "specdec_draft_1",
            "transformers_assisted_1",
            speed,
        )
    )
    rows.append(
        (
            "speculative, temperature 1, 1 stream ÷ own plain",
            "specdec_draft_1_temperature_1",
            "specdec_plain_1_temperature_1",
            speed,
        )
    )
    rows.append(
        ("TTFT, long prompt, plain ÷ vLLM plain", "specdec_long_prompt", "vllm_long_prompt", "ttft_ms")
    )
    rows.append(
        (
            "TTFT, long prompt, with draft ÷ vLLM plain",
            "specdec_long_prompt_draft",
            "vllm_long_prompt",
            "ttft_ms",
        )
    )
    return rows


def ratios(runs: Runs, rows: list[tuple[str, str, str, str]]) -> dict[str, dict[str, float]]:
    """Median, least and most over the rounds, each round's two measures being neighbours in time."""
    return {
        name: _spread([a[figure] / b[figure] for a, b in zip(runs[above], runs[below], strict=True)])
        for name, above, below, figure in rows
        if runs.get(above) and runs.get(below)
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 3),
        "min": round(min(values), 3),
        "max": round(max(values), 3),
    }


def markdown(
    figures: dict[str, dict[str, float]], compared: dict[str, dict[str, float]], limit: float
) -> str:
    lines = ["| ratio | median | least | most |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {row['median']:.2f} | {row['min']:.2f} | {row['max']:.2f} |"
        for name, row in compared.items()
    ]
    lines += ["", "| measure | tokens/s | TPOT, ms | TTFT, ms | accepted ÷ drafted | tokens per spec step |"]
    lines += ["|---|---|---|---|---|---|"]
    columns = (
        ("tokens_per_s", 1),
        ("tpot_ms", 1),
        ("ttft_ms", 0),
        ("draft_acceptance_rate", 2),
        ("mean_acceptance_length", 2),
    )
    for key, row in figures.items():
        cells = [_cell(row.get(column), digits) for column, digits in columns]
        lines.append(f"| {key.replace('_', ' ')} | {' | '.join(cells)} |")
    lines.append(
        f"| limit of one plain stream: bandwidth ÷ weights | {limit:.1f} | {1000 / limit:.1f} | | | |"
    )
    return "\n".join(lines)


def _cell(value: Any, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
