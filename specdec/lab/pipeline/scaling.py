"""What more workers bring, and what the loss of a draft costs: simulated devices that do bind."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from specdec.gateway.backend import Backend
from specdec.lab.errors import BenchError
from specdec.lab.pipeline.measure import Counts, generating, measure
from specdec.lab.pipeline.plan import GAMMA, PLAIN, SERIAL, Figure, Results, Scenario, simulation
from specdec.lab.pipeline.run import Attach, StartedBackend, deployment, in_process_of_its_own, until_ready
from specdec.types import WorkerId

# 16 sequences of 5 tokens keep a target busy for 160 ms, or 16 of 1 a draft for 32 ms, 4 times a round.
TARGET_BOUND = Scenario(
    name="target bound, 1 target + 1 draft",
    simulation=simulation(0.8, 0.001, 0.0, token_s=0.002),
    num_sequences=16,
    choices=(SERIAL,),
)
TWO_TARGETS = replace(TARGET_BOUND, name="target bound, 2 targets + 1 draft", num_targets=2)
DRAFT_BOUND = Scenario(
    name="draft bound, 1 target + 1 draft",
    simulation=simulation(0.8, 0.0, 0.010, draft_token_s=0.002),
    num_sequences=16,
    choices=(SERIAL,),
)
TWO_DRAFTS = replace(DRAFT_BOUND, name="draft bound, 1 target + 2 drafts", num_drafts=2)
SCENARIOS = (TARGET_BOUND, TWO_TARGETS, DRAFT_BOUND, TWO_DRAFTS)

LOSS = Scenario(
    name="draft killed", simulation=simulation(0.8, 0.002, 0.040), num_sequences=16, choices=(PLAIN, SERIAL)
)
SAMPLE_S = 0.1
RECENT_S = 1.0
"""Over which a rate counts as back."""
BACK_SHARE = 0.9
RETURN_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """One draft killed while 16 sequences were decoded with it. Rates in tokens per second."""

    plain_rate: float
    """Without any draft, asked for so."""
    rate_before: float
    rate_without: float
    """From the kill until a coordinator had the new draft."""
    replaced_s: float
    """As long as that took."""
    back_s: float
    """From then until a second's rate was 0.9 of what it was before the kill."""


def scaling_figures(results: Results, losses: Sequence[Loss]) -> Iterator[Figure]:
    """The table of what was measured."""

    def gain(more: Scenario, less: Scenario) -> float:
        return results[more.name, SERIAL].tokens_per_s / results[less.name, SERIAL].tokens_per_s

    yield Figure(
        name="2 targets + 1 draft ÷ 1 + 1, target bound",
        value=gain(TWO_TARGETS, TARGET_BOUND),
        at_least=1.8,
        aim=2.0,
    )
    yield Figure(
        name="1 target + 2 drafts ÷ 1 + 1, draft bound",
        value=gain(TWO_DRAFTS, DRAFT_BOUND),
        at_least=1.6,
        aim=1.9,
    )
    share = statistics.median(loss.rate_without / loss.plain_rate for loss in losses)
    yield Figure(name="draft killed ÷ plain decoding", value=share, at_least=0.9, aim=1.0)
    back_s = max(loss.back_s for loss in losses)
    yield Figure(name="full speed behind the new draft, s, longest", value=back_s, at_most=10.0, aim=2.0)


def lose_drafts(attach: Attach, *, rounds: int, counted_s: float) -> list[Loss]:
    """Kill the only draft of a deployment ``rounds`` times."""
    return in_process_of_its_own(_lose_drafts, attach, rounds, counted_s)


def _lose_drafts(attach: Attach, rounds: int, counted_s: float) -> list[Loss]:
    # Without groups of sequences that take turns: they are the lane's choice, not that of its requests.
    with attach(deployment(LOSS, GAMMA, "serial")) as make_backend:
        return asyncio.run(_lose_each(make_backend, rounds, counted_s))


async def _lose_each(make_backend: Callable[[], StartedBackend], rounds: int, counted_s: float) -> list[Loss]:
    backend = make_backend()
    backend.start()
    try:
        await until_ready(backend, LOSS)
        return [await _lose_one(backend, counted_s) for _ in range(rounds)]
    finally:
        await backend.close()


async def _lose_one(backend: Backend, counted_s: float) -> Loss:
    simulated, num_sequences = LOSS.simulation, LOSS.num_sequences
    plain = await measure(backend, PLAIN, simulated, num_sequences, warm_up_s=1.0, counted_s=counted_s)
    async with generating(backend, SERIAL, simulated, num_sequences) as counts:
        await asyncio.sleep(1.0)
        rate_before = await _rate(counts, counted_s)
        (old_id,) = drafts = _draft_pids(backend)
        os.kill(drafts[old_id], signal.SIGKILL)
        killed_s, tokens = time.perf_counter(), counts.tokens
        while not _draft_pids(backend).keys() - {old_id}:
            await _nap(killed_s)
        replaced_s = time.perf_counter() - killed_s
        rate_without = (counts.tokens - tokens) / replaced_s
        while await _rate(counts, RECENT_S) < BACK_SHARE * rate_before:
            await _nap(killed_s)
        back_s = time.perf_counter() - killed_s - replaced_s
    return Loss(
        plain_rate=plain.tokens_per_s,
        rate_before=rate_before,
        rate_without=rate_without,
        replaced_s=replaced_s,
        back_s=back_s,
    )


async def _nap(since_s: float) -> None:
    if time.perf_counter() - since_s > RETURN_LIMIT_S:
        raise BenchError(f"a killed draft was not made good within {RETURN_LIMIT_S:g} s")
    await asyncio.sleep(SAMPLE_S)


async def _rate(counts: Counts, seconds: float) -> float:
    started_s, tokens = time.perf_counter(), counts.tokens
    await asyncio.sleep(seconds)
    return (counts.tokens - tokens) / (time.perf_counter() - started_s)


def _draft_pids(backend: Backend) -> dict[WorkerId, int]:
    return {draft.worker_id: draft.pid for status in backend.statuses() for draft in status.drafts}
