"""A bad network between a coordinator and real workers, all in this process.

Requests and answers come late, twice or out of order. Nobody waits for a deadline: what would come behind it
is dropped, or kept back until later calls. Time is told by the network, not by the machine.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar
from unittest.mock import patch

from specdec.config import AppConfig, parse_config
from specdec.coordinator.client import CoordinatorClient
from specdec.coordinator.coordinator import MISSED_POLLS, Coordinator
from specdec.coordinator.handles import Fleet
from specdec.coordinator.local import LocalDraftHandle, LocalTargetHandle
from specdec.engine import sessions
from specdec.engine.drafting import DraftEngine
from specdec.engine.runner import Runner
from specdec.engine.threads import set_num_threads
from specdec.engine.verifying import TargetEngine
from specdec.engine.worker import DraftWorker, ModelThread, TargetWorker
from specdec.messages import (
    Feed,
    Heartbeat,
    ProposeReply,
    ProposeRequest,
    VerifyReply,
    VerifyRequest,
    WorkerStatus,
)
from specdec.types import SequenceId
from tests.fakes import eventually

Request = TypeVar("Request", ProposeRequest, VerifyRequest)
Reply = TypeVar("Reply", ProposeReply, VerifyReply)

OWNER = "coordinator-0"
FOREVER_S = 1e15
VERIFY_S, PROPOSE_S, POLL_S = 1000.0, 20.0, 30.0
"""What calls take on the network's clock. A lost worker is back after a few polls (`FIRST_PAUSE_S`)."""
FIRST_PAUSE_S = 30.0
REMEMBERED = 12
"""Requests that may come again."""

set_num_threads(1)  # the laws are so small that threads only wait for each other


class Fault(StrEnum):
    """What can go wrong with a call, a release, or a heartbeat."""

    TWICE = "a request arrives twice at a time"
    AGAIN_BEFORE = "an old request arrives again before a new one"
    AGAIN_BEHIND = "an old request arrives again behind a new one"
    REQUEST_LATE = "a request arrives behind its deadline"
    ANSWER_LATE = "an answer arrives behind its deadline"
    ANSWER_LOST = "a call fails although the worker did the work"
    """Targets only: the coordinator asks again, sequence by sequence."""
    RELEASE_LATE = "a release arrives late"
    RELEASE_TWICE = "a release arrives again later"
    RELEASE_LOST = "a release never arrives"
    HEARTBEAT_LATE = "an old heartbeat arrives behind a new one"
    DRAFT_AWAY = "a draft worker misses polls until it is taken for gone"


DRAFT_FAULTS = frozenset(Fault) - {Fault.ANSWER_LOST}
TARGET_FAULTS = frozenset(Fault) - {Fault.DRAFT_AWAY}


class Effect(StrEnum):
    """What faults led to, as seen by the network."""

    SECOND_ANSWER = "the second answer was taken"
    FROM_BEFORE = "a request of an older epoch arrived behind one of a newer"
    REOPENED = "such a request started the sequence anew"
    OVERTAKEN = "a request arrived behind the release of its sequence"
    RELEASED_ANEW = "a release freed what was opened behind it"


class Network:
    """Draws what goes wrong, and counts it.

    Each kind of fault strikes again after at most so many chances: what should happen in a test does happen.

    Args:
        seed: of everything that is drawn.
        gaps: the most chances from one strike to the next, by kind; those not named never strike.
    """

    def __init__(self, seed: int | str, gaps: Mapping[Fault, int]) -> None:
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.counts: Counter[Fault | Effect] = Counter()
        self.errors: list[Exception] = []
        """What workers raised: nothing that arrives may break them."""
        self._gaps = dict(gaps)
        self._chances_left: dict[tuple[str, Fault], int] = {}

    def strikes(self, fault: Fault, place: str, *, is_possible: bool = True) -> bool:
        """Whether ``fault`` happens now at ``place``, which has its own count of chances."""
        gap = self._gaps.get(fault)
        if gap is None or not is_possible:
            return False
        left = self._chances_left.get((place, fault), self.rng.randint(1, gap)) - 1
        self._chances_left[place, fault] = left or self.rng.randint(1, gap)
        self.counts[fault] += not left
        return not left

    def now(self) -> float:
        return self.now_s

    def be_good(self) -> None:
        """Nothing goes wrong any more."""
        self._gaps.clear()


class AtOnce(ModelThread):
    """Runs calls where they are made, so that the order of events is the event loop's alone."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


@dataclass(frozen=True, slots=True)
class _Release:
    """On its way, with the epochs that the worker had seen when it was sent."""

    epochs: dict[SequenceId, int]


class _Way(Generic[Request, Reply]):
    """The way to one worker, in the worker's place.

    Args:
        network: what goes wrong.
        worker: at its end.
        faults: kinds that may happen to it.
    """

    def __init__(
        self, network: Network, worker: DraftWorker | TargetWorker, faults: frozenset[Fault]
    ) -> None:
        self.worker = worker
        self._network = network
        self._name = worker.status().worker_id
        self._faults = faults
        self._arrived: list[Request] = []
        """The first time, in order."""
        self._late: list[Request | _Release] = []
        self._feeds: dict[SequenceId, Feed] = {}
        """The newest that arrived, by epoch and then by time."""
        self._released: set[SequenceId] = set()
        """Those not fed since."""
        self._spared: set[SequenceId] = set()
        """Their last answer was lost; when they are asked for one by one, they are served."""

    def status(self) -> WorkerStatus:
        return self.worker.status()

    async def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        release = _Release({name: self._epoch(name) for name in sequence_ids})
        if self._strikes(Fault.RELEASE_LOST):
            return
        if self._strikes(Fault.RELEASE_LATE):
            self._late.append(release)
            return
        await self._free(release)
        if self._strikes(Fault.RELEASE_TWICE):
            self._late.append(release)

    async def everything_arrives(self) -> None:
        """What is still on its way."""
        while self._late:
            await self._arrive_late(self._late.pop(0))

    async def _call(self, request: Request) -> Reply:
        """One call, as the caller sees it.

        Raises:
            TimeoutError: its deadline has passed.
            ConnectionError: it failed, but its deadline has not.
        """
        await self._let_some_late_ones_in()
        if old := self._old_request(Fault.AGAIN_BEFORE):
            await self._arrive(old, is_again=True)
        if self._strikes(Fault.REQUEST_LATE):
            self._late.append(request)
            raise TimeoutError
        arrivals = [self._arrive(request)]
        if self._strikes(Fault.TWICE):
            arrivals.append(self._arrive(request))
        replies = await asyncio.gather(*arrivals)
        self._arrived.append(request)
        await self._let_some_late_ones_in()
        if old := self._old_request(Fault.AGAIN_BEHIND):
            await self._arrive(old, is_again=True)
        if self._strikes(Fault.ANSWER_LATE):
            raise TimeoutError
        names = {item.feed.sequence_id for item in request.items}
        if self._strikes(Fault.ANSWER_LOST, is_possible=not names & self._spared):
            self._spared |= names
            raise ConnectionError("the answer was lost")
        self._spared -= names
        chosen = self._network.rng.randrange(len(replies))
        self._network.counts[Effect.SECOND_ANSWER] += chosen > 0
        return replies[chosen]

    def _strikes(self, fault: Fault, *, is_possible: bool = True) -> bool:
        is_possible = is_possible and fault in self._faults
        return self._network.strikes(fault, self._name, is_possible=is_possible)

    def _old_request(self, fault: Fault) -> Request | None:
        old = self._arrived[-REMEMBERED:]
        return self._network.rng.choice(old) if self._strikes(fault, is_possible=bool(old)) else None

    async def _let_some_late_ones_in(self) -> None:
        late, self._late = self._late, []
        for arrival in late:
            if self._network.rng.random() < 0.4:
                await self._arrive_late(arrival)
            else:
                self._late.append(arrival)

    async def _arrive_late(self, arrival: Request | _Release) -> None:
        if isinstance(arrival, _Release):
            await self._free(arrival)
        else:
            await self._arrive(arrival)
            self._arrived.append(arrival)

    async def _arrive(self, request: Request, *, is_again: bool = False) -> Reply:
        for item in request.items:
            self._note(item.feed, is_again=is_again)
        try:
            return await self._ask(request)
        except Exception as error:
            self._network.errors.append(error)
            raise

    async def _ask(self, request: Request) -> Reply:
        raise NotImplementedError

    def _note(self, feed: Feed, *, is_again: bool) -> None:
        name = feed.sequence_id
        counts = self._network.counts
        is_from_before = feed.epoch < self._epoch(name)
        counts[Effect.FROM_BEFORE] += is_from_before
        counts[Effect.REOPENED] += is_from_before and feed.keep == 0
        counts[Effect.OVERTAKEN] += name in self._released and feed.epoch <= self._epoch(name)
        if not is_from_before and not is_again:
            self._feeds[name] = feed
            self._released.discard(name)

    async def _free(self, release: _Release) -> None:
        names = release.epochs
        self._network.counts[Effect.RELEASED_ANEW] += any(
            self._epoch(name) > epoch and name not in self._released for name, epoch in names.items()
        )
        self._released.update(names)
        await self.worker.release(tuple(names))

    def _epoch(self, name: SequenceId) -> int:
        feed = self._feeds.get(name)
        return -1 if feed is None else feed.epoch


class DraftWay(_Way[ProposeRequest, ProposeReply]):
    """A draft's cache may hold anything: it costs accepted tokens, never a text."""

    worker: DraftWorker
    num_polls_to_miss = 0

    def answers_poll(self) -> bool:
        self.num_polls_to_miss = max(0, self.num_polls_to_miss - 1)
        return self.num_polls_to_miss == 0

    async def propose(self, request: ProposeRequest) -> ProposeReply:
        if self._strikes(Fault.DRAFT_AWAY):
            self.num_polls_to_miss = MISSED_POLLS + 1
        self._network.now_s += PROPOSE_S * max(item.num_draft_tokens for item in request.items)
        return await self._call(request)

    async def _ask(self, request: ProposeRequest) -> ProposeReply:
        return await self.worker.propose(request)


class TargetWay(_Way[VerifyRequest, VerifyReply]):
    worker: TargetWorker

    async def verify(self, request: VerifyRequest) -> VerifyReply:
        self._network.now_s += VERIFY_S
        return await self._call(request)

    async def _ask(self, request: VerifyRequest) -> VerifyReply:
        return await self.worker.verify(request)


class FaultyDirectory:
    """Finds the workers, over the bad network."""

    def __init__(self, network: Network, targets: Sequence[TargetWay], drafts: Sequence[DraftWay]) -> None:
        self._network = network
        self.targets, self.drafts = tuple(targets), tuple(drafts)
        self._heartbeats: list[Heartbeat] = []

    @property
    def ways(self) -> tuple[TargetWay | DraftWay, ...]:
        return (*self.targets, *self.drafts)

    async def poll(self, heartbeat: Heartbeat) -> Fleet:
        self._network.now_s += POLL_S
        self._heartbeats = [*self._heartbeats[-REMEMBERED:], heartbeat]
        for way in self.ways:
            await way.worker.heartbeat(heartbeat)
            if self._network.strikes(Fault.HEARTBEAT_LATE, way.status().worker_id):
                await way.worker.heartbeat(self._network.rng.choice(self._heartbeats))
        # A status is as of the poll, but these workers are too quick for that to matter.
        return Fleet(
            targets=tuple(LocalTargetHandle(way) for way in self.targets),
            drafts=tuple(LocalDraftHandle(way) for way in self.drafts if way.answers_poll()),
        )


class FaultySystem:
    def __init__(
        self,
        network: Network,
        directory: FaultyDirectory,
        coordinator: Coordinator,
        client: CoordinatorClient,
    ) -> None:
        self.network, self.directory = network, directory
        self.coordinator, self.client = coordinator, client

    async def ends_empty(self) -> None:
        """All that is on its way arrives, and then heartbeats free what nobody needs."""
        self.network.be_good()
        status = self.coordinator.status()
        assert status.num_running == status.num_waiting == 0
        for way in self.directory.ways:
            await way.everything_arrives()
        with patch.object(sessions, "LIVE_GRACE_S", -1.0):
            await eventually(lambda: not any(map(_holds_something, self.directory.ways)))


def _holds_something(way: TargetWay | DraftWay) -> bool:
    status = way.status()
    return status.num_sequences > 0 or status.kv_tokens_in_use > 0


def faulty_config(
    gamma: int | str,
    pipeline: str,
    *,
    max_num_seqs: int = 4,
    prefill_chunk_tokens: int = 4096,
    poll_interval_s: float = 0.001,
    **coordinator: object,
) -> AppConfig:
    """Lost workers are asked again soon, and no sequence is given up."""
    return parse_config(
        {
            "target": {"model": "toy-target"},
            "draft": {"model": "toy-draft"},
            "speculation": {"num_speculative_tokens": gamma, "pipeline": pipeline},
            "coordinator": {
                "max_num_seqs": max_num_seqs,
                "prefill_chunk_tokens": prefill_chunk_tokens,
                "draft_timeout_s": FIRST_PAUSE_S,
                "max_moves": 1_000_000,
                "poll_interval_s": poll_interval_s,
                "orphan_timeout_s": FOREVER_S,
                "idle_wait_s": FOREVER_S,
                **coordinator,
            },
        }
    )


@asynccontextmanager
async def faulty_system(
    config: AppConfig,
    network: Network,
    targets: Sequence[Runner],
    drafts: Sequence[Runner],
    *,
    at_once: bool = False,
    target_faults: frozenset[Fault] = TARGET_FAULTS,
    draft_way: type[DraftWay] = DraftWay,
) -> AsyncIterator[FaultySystem]:
    """The whole system over a bad network.

    Args:
        config: see `faulty_config`.
        network: what goes wrong.
        targets: one target worker for each.
        drafts: one draft worker for each.
        at_once: models run in the event loop, else each on a thread of its own.
        target_faults: kinds that may happen to targets.
        draft_way: to each draft worker.
    """
    thread = AtOnce() if at_once else None
    target_ways = [
        TargetWay(
            network,
            TargetWorker(
                TargetEngine(runner),
                worker_id=f"target-{number}",
                model="t",
                device=f"cpu-{number}",
                thread=thread,
            ),
            target_faults,
        )
        for number, runner in enumerate(targets)
    ]
    draft_ways = [
        draft_way(
            network,
            DraftWorker(
                DraftEngine(runner, support=8),
                worker_id=f"draft-{number}",
                model="d",
                device=f"cpu-{len(targets) + number}",
                thread=thread,
            ),
            DRAFT_FAULTS,
        )
        for number, runner in enumerate(drafts)
    ]
    directory = FaultyDirectory(network, target_ways, draft_ways)
    coordinator = Coordinator(config, directory, OWNER, clock=network.now)
    await coordinator.start()
    client = CoordinatorClient(coordinator, "gateway-0")
    try:
        yield FaultySystem(network, directory, coordinator, client)
    finally:
        await client.close()
        await coordinator.close()
        for way in directory.ways:
            way.worker.close()
