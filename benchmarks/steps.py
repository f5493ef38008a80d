"""Steps of a model alone: no server, no coordinator, no sampling.

python -m benchmarks.steps --model smollm2
"""

from __future__ import annotations

import argparse
import statistics
import time

from benchmarks.common import save
from specdec.config import DraftConfig
from specdec.engine.loading import load_runner
from specdec.engine.model_runner import ModelRunner
from specdec.engine.runner import ForwardItem
from specdec.models import model_info
from specdec.types import SequenceId

SHAPES = ((1, 1), (1, 2), (1, 3), (1, 6), (8, 1), (8, 3), (32, 1), (32, 3))
PROMPTS = (512, 1500)
CACHED = 200
REPEATS = 30


def token_ids(seed: int, count: int) -> list[int]:
    return [(977 * seed + 13 * position) % 40_000 for position in range(count)]


def step_ms(runner: ModelRunner, num_sequences: int, num_tokens: int) -> float:
    """Median of steps over ``CACHED`` positions, each rolled back."""
    names = [SequenceId(f"step-{idx}") for idx in range(num_sequences)]
    for idx, name in enumerate(names):
        runner.open(name)
        runner.forward([ForwardItem(sequence_id=name, token_ids=token_ids(idx, CACHED), num_rows=0)])
    new = token_ids(99, num_tokens)
    times = []
    for _ in range(REPEATS):
        items = [ForwardItem(sequence_id=name, token_ids=new, num_rows=num_tokens) for name in names]
        started_s = time.perf_counter()
        runner.forward(items)
        times.append(time.perf_counter() - started_s)
        for name in names:
            runner.truncate(name, CACHED)
    for name in names:
        runner.close(name)
    return 1000 * statistics.median(times)


def prefill_ms(runner: ModelRunner, num_tokens: int) -> float:
    """Median of five different prompts."""
    name, times = SequenceId("prompt"), []
    for seed in range(5):
        runner.open(name)
        item = ForwardItem(
            sequence_id=name, token_ids=token_ids(1000 * num_tokens + seed, num_tokens), num_rows=1
        )
        started_s = time.perf_counter()
        runner.forward([item])
        times.append(time.perf_counter() - started_s)
        runner.close(name)
    return 1000 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description="Steps of a model alone.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    info = model_info(arguments.model)
    runner = load_runner(
        # As it is served: a folder with a reduced vocabulary of its own is a draft's.
        DraftConfig(model=arguments.model, dtype=arguments.dtype, prefix_caching=False),
        vocab_size=info.vocab_size,
        max_context=info.max_context,
    )
    figures = {f"{n} x {m}": round(step_ms(runner, n, m), 1) for n, m in SHAPES}
    prompts = {str(count): round(prefill_ms(runner, count)) for count in PROMPTS}
    print(figures, prompts)
    save(
        f"steps_{arguments.model}",
        {"dtype": arguments.dtype, "cached": CACHED, "step_ms": figures, "prefill_ms": prompts},
    )


if __name__ == "__main__":
    main()
