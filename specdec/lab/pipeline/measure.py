"""One measurement: so many sequences at a time, for so many seconds, each round's tokens counted."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

from specdec.config import SimulationConfig
from specdec.gateway.backend import Backend
from specdec.types import (
    GenerationRequest,
    Pipeline,
    SamplingParams,
    SequenceId,
    StopCriteria,
    VerificationMode,
)

MAX_TOKENS = 1_000_000
"""Of a sequence: none ends while it is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How requests ask to be decoded."""

    gamma: int | None
    """At most so many draft tokens; None leaves it to the deployment."""
    pipeline: Pipeline | None = None
    """None leaves it to the deployment."""

    def __str__(self) -> str:
        if self.gamma == 0:
            return "plain"
        return f"{self.pipeline or 'auto'} γ={'auto' if self.gamma is None else self.gamma}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the seconds that count showed."""

    tokens_per_s: float
    """Of all sequences."""
    tokens_per_round: float
    """Committed, of one sequence in one round."""
    round_s: float
    """Mean time from round to round of one sequence."""
    acceptance_rate: float
    """Accepted draft tokens ÷ drafted ones; 0 without any."""
    prepared_rate: float
    """Share of the drafts that had been prepared while the target verified the block before."""


@dataclass(slots=True)
class Counts:
    """Of all sequences, since the counting began."""

    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    blocks: int = 0
    prepared: int = 0
    since_s: float = field(default_factory=time.perf_counter)


async def measure(
    backend: Backend,
    choice: Choice,
    simulation: SimulationConfig,
    num_sequences: int,
    *,
    warm_up_s: float,
    counted_s: float,
    first_prompt: int = 0,
) -> Measured:
    """Keep ``num_sequences`` running; count what ``counted_s`` seconds commit, after ``warm_up_s``.

    Greedy text is the same for every choice, and easy or hard to draft by luck: choices are compared over the
    same prompts, those with the numbers from ``first_prompt`` on.
    """
    async with generating(backend, choice, simulation, num_sequences, first_prompt) as counts:
        await asyncio.sleep(warm_up_s)
        _reset(counts)
        await asyncio.sleep(counted_s)
        elapsed_s = time.perf_counter() - counts.since_s
        return Measured(
            tokens_per_s=counts.tokens / elapsed_s,
            tokens_per_round=counts.tokens / max(1, counts.rounds),
            round_s=elapsed_s * num_sequences / counts.rounds if counts.rounds else math.inf,
            acceptance_rate=counts.accepted / max(1, counts.drafted),
            prepared_rate=counts.prepared / max(1, counts.blocks),
        )


@asynccontextmanager
async def generating(
    backend: Backend, choice: Choice, simulation: SimulationConfig, num_sequences: int, first_prompt: int = 0
) -> AsyncIterator[Counts]:
    """Keep so many sequences running while the context lasts; what one of them fails with ends it."""
    counts = Counts()
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_generate(backend, _request(choice, simulation, number), counts))
                for number in range(first_prompt, first_prompt + num_sequences)
            ]
            yield counts
            for task in tasks:
                task.cancel()
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures


def _reset(counts: Counts) -> None:
    counts.tokens = counts.rounds = counts.drafted = counts.accepted = counts.blocks = counts.prepared = 0
    counts.since_s = time.perf_counter()


def _request(choice: Choice, simulation: SimulationConfig, number: int) -> GenerationRequest:
    is_greedy = simulation.law == "greedy"
    vocab_size = simulation.vocab_size
    return GenerationRequest(
        sequence_id=SequenceId(f"bench-{uuid.uuid4().hex}"),
        prompt_ids=(number % vocab_size, (7 * number + 1) % vocab_size),
        sampling=SamplingParams(
            temperature=0.0 if is_greedy else 1.0,
            mode=VerificationMode.GREEDY if is_greedy else VerificationMode.REJECTION,
            seed=1000 + number,
        ),
        stop=StopCriteria(max_tokens=min(MAX_TOKENS, simulation.max_context - 2)),
        max_draft_tokens=choice.gamma,
        pipeline=choice.pipeline,
    )


async def _generate(backend: Backend, request: GenerationRequest, counts: Counts) -> None:
    async with aclosing(backend.generate(request, lambda: 0.0)) as batches:
        async for batch in batches:
            for chunk in batch:
                counts.tokens += len(chunk.token_ids)
                counts.rounds += bool(chunk.token_ids)
                counts.drafted += chunk.num_drafted
                counts.accepted += chunk.num_accepted
                counts.blocks += bool(chunk.num_drafted)
                counts.prepared += chunk.is_prepared
