"""A run: undisturbed texts, load under faults, recovery, and whether anything is left over."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from specdec.lab.chaos.client import Answer, Client
from specdec.lab.chaos.faults import make_schedule
from specdec.lab.chaos.injector import WATCH_S, Hit, Injector
from specdec.lab.chaos.plan import Plan
from specdec.lab.chaos.requests import LENGTHS, Protocol, Question, Request, draw_request, make_questions
from specdec.lab.chaos.server import ServerProcess
from specdec.lab.chaos.status import Snapshot, read_snapshot
from specdec.lab.chaos.texts import NUM_AT_ONCE, References, undisturbed
from specdec.lab.errors import RequestFailed

RECOVERY_LIMIT_S = 120.0
"""All replicas must be there again this long after the last request."""
IDLE_LIMIT_S = 60.0
"""Workers free what a lost coordinator left after 30 s."""
FAILURE_PAUSE_S = 0.2
"""Before a stream goes on with the next request."""


@dataclass(frozen=True, slots=True)
class Record:
    """One request and what became of it."""

    request: Request
    answer: Answer | None
    """None where it failed."""
    failure: str | None = None
    difference: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Everything a report is made of. Durations in seconds."""

    plan: Plan
    records: tuple[Record, ...]
    """Of the load under faults."""
    afterwards: tuple[Record, ...]
    """Every question once more, when all was healthy again."""
    hits: tuple[Hit, ...]
    num_left_out: int
    """Faults that found nobody to meet."""
    recovery_s: float | None
    """From the end of the load until all replicas were there; None where they were not in time."""
    idle_s: float | None
    """From then and the last answer until nobody held anything; None where that was not in time."""
    missing: tuple[str, ...]
    """Replicas that did not come back and processes that did not go away, in words."""
    leaked: tuple[str, ...]
    """Sequences and KV tokens held at the end, in words."""


async def run_chaos(
    server: ServerProcess, plan: Plan, on_step: Callable[[str], object] = lambda _: None
) -> Outcome:
    """Do all of it against a server that is ready.

    Args:
        server: of `plan.fleet`.
        plan: what to do.
        on_step: told what is being done.

    Raises:
        ChaosError: texts are not reproducible without faults.
    """
    client = Client(server.endpoint, server.grpc_address)
    questions = make_questions(plan.num_questions, plan.seed, LENGTHS[plan.pair])
    try:
        on_step(f"{len(questions)} undisturbed texts, each twice")
        references = await undisturbed(client, questions)
        load = _Load(client, questions, references, plan)
        injector = Injector(
            server.endpoint,
            plan.fleet,
            server.resize,
            load.count_open,
            lambda hit: on_step(_hit_line(hit, load)),
        )
        try:
            return await _run(server, plan, load, injector, on_step)
        finally:
            injector.resume_all()
    finally:
        await client.close()


async def _run(
    server: ServerProcess, plan: Plan, load: _Load, injector: Injector, on_step: Callable[[str], object]
) -> Outcome:
    watcher = asyncio.get_running_loop().create_task(injector.watch_forever())
    try:
        on_step(f"{plan.num_streams} streams")
        await asyncio.gather(load.run(), injector.inflict_all(make_schedule(plan), time.monotonic()))
        await injector.restore()
        on_step("waiting until all replicas are there")
        recovery_s, missing = await _until(
            lambda snapshot: [*snapshot.missing(plan.fleet), *_open_hits(injector.hits)],
            server,
            RECOVERY_LIMIT_S,
        )
        on_step("every text once more")
        afterwards = await load.ask_all()
        on_step("waiting until nothing is held")
        idle_s, held = await _until(lambda snapshot: snapshot.held(), server, IDLE_LIMIT_S)
    finally:
        watcher.cancel()
        with suppress(asyncio.CancelledError):
            await watcher
    return Outcome(
        plan=plan,
        records=tuple(load.records),
        afterwards=afterwards,
        hits=tuple(injector.hits),
        num_left_out=injector.num_left_out,
        recovery_s=recovery_s,
        idle_s=idle_s,
        missing=tuple(missing),
        leaked=tuple(held),
    )


def _hit_line(hit: Hit, load: _Load) -> str:
    victim = hit.victim
    whom = "" if victim is None else f" (pid {victim.pid}, {victim.num_sequences} sequences)"
    return f"{hit.fault.kind}{whom}, {len(load.records)} requests so far"


def _open_hits(hits: Sequence[Hit]) -> list[str]:
    """Faults not made good, and processes that should be gone."""
    lines = [f"{hit.fault.kind} not made good" for hit in hits if hit.recovered_at_s is None]
    return lines + [
        f"process {hit.victim.pid} left over from {hit.fault.kind}"
        for hit in hits
        if hit.victim is not None and hit.is_process_left
    ]


async def _until(
    problems: Callable[[Snapshot], list[str]], server: ServerProcess, limit_s: float
) -> tuple[float | None, list[str]]:
    """Seconds until there were no problems any more; None, and what they are, where they stayed."""
    started_s = time.monotonic()
    left = ["no status"]
    while time.monotonic() - started_s < limit_s:
        snapshot = await read_snapshot(server.endpoint)
        left = ["no status"] if snapshot is None else problems(snapshot)
        if not left:
            return time.monotonic() - started_s, []
        await asyncio.sleep(WATCH_S)
    return None, left


class _Load:
    """Streams that ask one question after the other."""

    def __init__(
        self, client: Client, questions: tuple[Question, ...], references: References, plan: Plan
    ) -> None:
        self.records: list[Record] = []
        self._client = client
        self._questions = questions
        self._references = references
        self._plan = plan
        self._num_open = 0

    def count_open(self) -> int:
        return self._num_open

    async def run(self) -> None:
        """For the plan's time; what has begun then is read to its end."""
        until_s = time.monotonic() + self._plan.duration_s
        await asyncio.gather(*(self._stream(number, until_s) for number in range(self._plan.num_streams)))

    async def ask_all(self) -> tuple[Record, ...]:
        """Every question once, streams of both protocols by turns."""
        limit = asyncio.Semaphore(NUM_AT_ONCE)

        async def ask(question: Question) -> Record:
            protocol: Protocol = "http" if question.number % 4 < 2 else "grpc"
            async with limit:
                return await self._record(Request(question=question, protocol=protocol, is_streamed=True))

        return tuple(await asyncio.gather(*map(ask, self._questions)))

    async def _stream(self, number: int, until_s: float) -> None:
        rng = random.Random(f"stream {number} {self._plan.seed}")
        while time.monotonic() < until_s:
            record = await self._record(draw_request(self._questions, rng))
            self.records.append(record)
            if record.failure is not None:
                await asyncio.sleep(FAILURE_PAUSE_S)

    async def _record(self, request: Request) -> Record:
        self._num_open += 1
        try:
            answer = await self._client.ask(request)
        except RequestFailed as failure:
            return Record(request, None, failure=failure.message)
        finally:
            self._num_open -= 1
        difference = self._references[request.question.number].difference(answer)
        return Record(request, answer, difference=difference)
