"""A measurement from end to end: find the model, warm up, one level of concurrency after another."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from specdec.lab.bench.figures import Figures, summarise
from specdec.lab.bench.load import Load, run_load
from specdec.lab.bench.prompts import Body
from specdec.lab.bench.server import ServedModel, find_model, read_counters
from specdec.lab.errors import BenchError, RequestFailed


@dataclass(frozen=True, slots=True)
class Plan:
    concurrencies: Sequence[int]
    num_prompts: int | None = None
    """Requests per level; None takes four per stream, and eight at least."""
    num_warmup: int = 1
    """Requests before each level, not counted."""

    def num_requests(self, concurrency: int) -> int:
        return self.num_prompts or max(4 * concurrency, 8)

    @property
    def total(self) -> int:
        return sum(self.num_requests(concurrency) for concurrency in self.concurrencies)


async def prepare(load: Load, model: str | None) -> tuple[Load, ServedModel]:
    """The load with its model filled in, and whatever makes this server report acceptance.

    Raises:
        BenchError: the server cannot be measured.
    """
    served = await find_model(load.endpoint, model, load.headers)
    # What the user gives wins over what is added here.
    return replace(load, model=served.name, extra_body=_merge(served.extra_body, load.extra_body)), served


async def measure_levels(
    load: Load,
    served: ServedModel,
    plan: Plan,
    prompts: Iterator[Body],
    on_finished: Callable[[], object] = lambda: None,
) -> list[Figures]:
    """Figures of each level. ``on_finished`` is called after each request that counts.

    Raises:
        BenchError: a warm-up request failed, so that the rest would most likely fail alike.
    """
    figures = []
    for concurrency in plan.concurrencies:
        await _warm_up(load, list(itertools.islice(prompts, plan.num_warmup)), concurrency)
        chosen = list(itertools.islice(prompts, plan.num_requests(concurrency)))
        before = await read_counters(load.endpoint, served, load.headers)
        outcomes, elapsed_s = await run_load(load, chosen, concurrency, on_finished)
        after = await read_counters(load.endpoint, served, load.headers)
        counted = after.since(before) if after is not None and before is not None else None
        figures.append(summarise(concurrency, outcomes, elapsed_s, counted))
    return figures


async def _warm_up(load: Load, prompts: list[Body], concurrency: int) -> None:
    outcomes, _ = await run_load(load, prompts, concurrency)
    for outcome in outcomes:
        if isinstance(outcome, RequestFailed):
            raise BenchError(f"the warm-up failed: {outcome.message}")


def _merge(defaults: Mapping[str, object], given: Mapping[str, object]) -> dict[str, object]:
    """Objects within objects are merged, everything else is taken from ``given``."""
    merged = dict(defaults)
    for key, value in given.items():
        inner = merged.get(key)
        merged[key] = _merge(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return merged
