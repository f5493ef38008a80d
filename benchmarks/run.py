"""A served pair on this machine: plain decoding against γ = 1..4, alternately in one run.

Starts a server of its own, sends real requests over gRPC, prints medians and ratios to plain decoding.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.common import RESULTS, save
from tests.e2e.harness import Server, chat
from tests.e2e.prompts import PROMPTS

GAMMAS = (0, 1, 2, 3, 4)


def measure(
    server: Server, gamma: int, concurrency: int, max_tokens: int, temperature: float
) -> dict[str, float]:
    stub = server.stub()
    requests = [
        chat(prompt, gamma=gamma, max_tokens=max_tokens, temperature=temperature, ignore_eos=True)
        for prompt in PROMPTS[:concurrency]
    ]
    started_s = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        answers = list(pool.map(lambda request: stub.Generate(request, timeout=600), requests))
    elapsed_s = time.perf_counter() - started_s
    metrics = [answer.speculative_metrics for answer in answers]
    drafted = sum(m.num_draft_tokens for m in metrics)
    steps = sum(m.num_spec_steps for m in metrics)
    accepted = sum(m.num_accepted_draft_tokens for m in metrics)
    return {
        "tokens_per_s": sum(answer.usage.completion_tokens for answer in answers) / elapsed_s,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
    }


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {key: round(statistics.median(run[key] for run in runs), 3) for key in runs[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--draft", default="smollm2-draft")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    models = {name: {"model": getattr(args, name), "dtype": args.dtype} for name in ("target", "draft")}
    with tempfile.TemporaryDirectory() as folder:
        speculation = {"num_speculative_tokens": max(GAMMAS)}  # requests lower it
        server = Server(Path(folder), {**models, "speculation": speculation})
        try:
            server.wait_until_ready()
            measure(server, 2, 2, 32, args.temperature)
            figures = compare(server, args)
        finally:
            server.stop()
    plot(figures, args.concurrency)
    save(
        "serving", {"pair": models, "max_tokens": args.max_tokens, "temperature": args.temperature, **figures}
    )


def plot(figures: dict[str, Any], concurrencies: list[int]) -> None:
    """Tokens per second relative to plain decoding, one line per number of streams."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for concurrency in concurrencies:
        ratios = [figures[f"streams_{concurrency}_gamma_{gamma}"]["ratio_to_plain"] for gamma in GAMMAS]
        axes.plot(GAMMAS, ratios, marker="o", label=f"{concurrency} stream(s)")
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set(xlabel="γ (draft tokens per round)", ylabel="tokens/s ÷ plain decoding", xticks=GAMMAS)
    axes.legend()
    figure.savefig(RESULTS / "serving.png", dpi=120)


def compare(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for concurrency in args.concurrency:
        runs: dict[int, list[dict[str, float]]] = {gamma: [] for gamma in GAMMAS}
        for _ in track(range(args.repeats), f"{concurrency} stream(s)"):
            for gamma in GAMMAS:
                runs[gamma].append(measure(server, gamma, concurrency, args.max_tokens, args.temperature))
        table = Table(
            "γ",
            "tokens/s",
            "÷ plain",
            "accepted ÷ drafted",
            "tokens per spec step",
            title=f"{concurrency} stream(s)",
        )
        for gamma in GAMMAS:
            row = medians(runs[gamma])
            row["ratio_to_plain"] = round(
                statistics.median(
                    a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(runs[gamma], runs[0], strict=True)
                ),
                3,
            )
            figures[f"streams_{concurrency}_gamma_{gamma}"] = row
            table.add_row(
                str(gamma),
                f"{row['tokens_per_s']:.1f}",
                f"{row['ratio_to_plain']:.2f}",
                f"{row['draft_acceptance_rate']:.2f}",
                f"{row['mean_acceptance_length']:.2f}",
            )
        Console().print(table)
    return figures


if __name__ == "__main__":
    main()
