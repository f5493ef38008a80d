"""Sequences in, committed tokens out: admission, lanes over the workers at hand, updates to gateways."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from specdec.config import AppConfig
from specdec.coordinator.admission import FairQueue
from specdec.coordinator.handles import DraftHandle, Fleet, TargetHandle, WorkerDirectory
from specdec.coordinator.lane import Lane, failed_chunk, reserved_tokens
from specdec.coordinator.quarantine import Quarantine
from specdec.errors import ContextLengthExceeded
from specdec.messages import CoordinatorStatus, Heartbeat, RoundUpdate
from specdec.speculation.pipeline import new_pipeline_policy
from specdec.speculation.round_policy import RoundPolicy, new_round_policy
from specdec.speculation.sequence import SequenceState
from specdec.types import GenerationRequest, SequenceId, TokenChunk, WorkerId

logger = logging.getLogger(__name__)

MISSED_POLLS = 6
"""A worker that did not answer this many polls in a row is taken for gone. They follow each other without
waiting for it: three seconds by default."""


@dataclass(slots=True)
class _Outbox:
    """Chunks for one gateway, merged into one message per wake-up."""

    chunks: list[TokenChunk] = field(default_factory=list)
    filled: asyncio.Event = field(default_factory=asyncio.Event)
    heard_at_s: float = 0.0
    """When the gateway last called: a dead one's stream is not always closed for it."""
    is_closed: bool = False
    """The gateway was silent for too long; should it live, it has to start anew."""


@dataclass(slots=True)
class _Ticket:
    """A sequence in this coordinator's care."""

    state: SequenceState
    gateway_id: str
    submitted_at_s: float
    lane: Lane | None = None
    """None while it waits."""
    num_moves: int = 0
    """Times it lost its target worker since tokens of its were committed."""

    @property
    def client(self) -> str:
        return self.state.request.client


class Coordinator:
    """One event loop, no locks.

    Args:
        config: the whole configuration.
        directory: finds workers.
        coordinator_id: unique per life.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        config: AppConfig,
        directory: WorkerDirectory,
        coordinator_id: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._directory = directory
        self._id = coordinator_id
        self._clock = clock
        self._lanes: dict[WorkerId, Lane] = {}
        self._drafts: dict[WorkerId, DraftHandle] = {}
        self._missed: dict[WorkerId, int] = {}
        self._quarantine = Quarantine(config.coordinator.draft_timeout_s, clock)
        self._tickets: dict[SequenceId, _Ticket] = {}
        self._waiting = FairQueue(config.coordinator.max_waiting, clock)
        self._outboxes: dict[str, _Outbox] = {}
        self._totals = _Totals()
        self._poller: asyncio.Task[None] | None = None

    @property
    def is_started(self) -> bool:
        return self._poller is not None

    async def start(self) -> None:
        """Begin looking for workers; returns after the first look."""
        await self._poll_once()
        self._poller = asyncio.get_running_loop().create_task(self._poll_forever())

    async def close(self) -> None:
        if self._poller:
            self._poller.cancel()
        await asyncio.gather(*(lane.close() for lane in self._lanes.values()))

    # For gateways ---------------------------------------------------------------------------------------

    async def submit(self, gateway_id: str, request: GenerationRequest) -> None:
        """Take a sequence; its chunks go to ``updates(gateway_id)``. Submitting the same id twice is a no-op.

        Raises:
            TooManyRequests: as many requests wait as may, in all or of this client.
            ContextLengthExceeded: the sequence cannot fit the target's context.
        """
        if request.sequence_id in self._tickets:
            return
        state = SequenceState(request)
        self._check_context(state)
        can_start = not len(self._waiting) and self._find_lane(state) is not None
        if not can_start and not request.is_moved:
            self._waiting.check_room(request.client)
        self._hear(gateway_id)
        self._tickets[request.sequence_id] = _Ticket(state, gateway_id, self._clock())
        if request.is_moved:
            self._waiting.put_first([request.sequence_id])
        else:
            self._waiting.append(request.sequence_id, request.client)
        self._dispatch()

    async def cancel(self, sequence_ids: Sequence[SequenceId]) -> None:
        """Forget sequences and free their caches within a round; unknown ids are ignored."""
        self._forget(sequence_ids)

    async def updates(self, gateway_id: str) -> AsyncGenerator[RoundUpdate, None]:
        """Everything that happens to a gateway's sequences, one message per wake-up, until closed."""
        outbox = self._hear(gateway_id)
        while not outbox.is_closed:
            await outbox.filled.wait()
            outbox.filled.clear()
            chunks, outbox.chunks = outbox.chunks, []
            yield RoundUpdate(chunks=tuple(chunks))

    async def poll(self, gateway_id: str) -> CoordinatorStatus:
        """A gateway's sign of life; one that gives none loses its sequences after ``orphan_timeout_s``."""
        self._hear(gateway_id)
        return self.status()

    def status(self) -> CoordinatorStatus:
        targets = tuple(lane.target.status for lane in self._lanes.values())
        return CoordinatorStatus(
            coordinator_id=self._id,
            pid=os.getpid(),
            is_ready=bool(targets),
            num_running=len(self._tickets) - len(self._waiting),
            num_waiting=len(self._waiting),
            model=self._config.model_name,
            target_model=self._config.target.model,
            max_context=self._max_context(),
            num_speculative_tokens=self._config.max_speculative_tokens,
            targets=targets,
            drafts=tuple(draft.status for draft in self._drafts.values()),
            num_spec_steps=self._totals.num_spec_steps,
            num_draft_tokens=self._totals.num_draft_tokens,
            num_accepted_draft_tokens=self._totals.num_accepted_draft_tokens,
            num_output_tokens=self._totals.num_output_tokens,
            num_sequence_rounds=self._totals.num_sequence_rounds,
            round_s=max((lane.round_s for lane in self._lanes.values()), default=0.0),
            num_prepared_drafts=self._totals.num_prepared_drafts,
        )

    def load(self) -> dict[str, float]:
        """What decides how many workers are wanted; see `specdec.cluster.autoscaling`."""
        lanes = [lane for lane in self._lanes.values() if lane.sequences and lane.round_s]
        return {
            "num_running": len(self._tickets) - len(self._waiting),
            "num_waiting": len(self._waiting),
            "kv_wanted_tokens": sum(reserved_tokens(ticket.state) for ticket in self._tickets.values()),
            "round_s": max((lane.round_s for lane in lanes), default=0.0),
            "draft_share": max((lane.propose_s / lane.round_s for lane in lanes), default=0.0),
        }

    # Sequences ------------------------------------------------------------------------------------------

    def _max_context(self) -> int:
        """What every attached target can hold of a sequence, in tokens; 0 while there is none."""
        return min((lane.target.status.max_context for lane in self._lanes.values()), default=0)

    def _check_context(self, state: SequenceState) -> None:
        context = self._max_context()
        if context and len(state.log) >= context:
            raise ContextLengthExceeded(
                f"the prompt has {len(state.log)} tokens, but the model's context is {context} tokens"
            )

    def _find_lane(self, state: SequenceState) -> Lane | None:
        """The lane with the fewest sequences among those with room."""
        lanes = [lane for lane in self._lanes.values() if lane.has_room_for(state)]
        return min(lanes, key=lambda lane: (self._is_silent(lane), len(lane.sequences)), default=None)

    def _is_silent(self, lane: Lane) -> bool:
        """Whether the lane's target has not answered the last poll."""
        return self._missed.get(lane.target.status.worker_id, MISSED_POLLS) > 0

    def _dispatch(self) -> None:
        """Give waiting sequences to lanes, clients in turn."""
        if not len(self._waiting) or not self._lanes:
            return  # after most rounds
        context = self._max_context()
        num_running = self._num_running_by_client()
        while (sequence_id := self._waiting.head(num_running)) is not None:
            ticket = self._tickets[sequence_id]
            if len(ticket.state.log) >= context:
                self._waiting.remove(sequence_id)
                self._fail(sequence_id, f"the sequence does not fit the context of {context} tokens")
                continue
            ticket.state.limit_to_context(context)
            lane = self._find_lane(ticket.state)
            if lane is None:
                return
            self._waiting.start(sequence_id)
            num_running[ticket.client] += 1
            ticket.lane = lane
            lane.add(ticket.state)

    def _num_running_by_client(self) -> Counter[str]:
        """For turns; not counted after every round where there is nobody to choose among."""
        if self._waiting.num_clients < 2:
            return Counter()
        return Counter(ticket.client for ticket in self._tickets.values() if ticket.lane is not None)

    def _on_chunks(self, chunks: Sequence[TokenChunk]) -> None:
        for chunk in chunks:
            self._totals.add(chunk)
            ticket = self._tickets.get(chunk.sequence_id)
            if ticket is None:
                continue  # cancelled during the round
            ticket.num_moves = 0
            if chunk.is_last:
                del self._tickets[chunk.sequence_id]
            self._deliver(ticket.gateway_id, chunk)
        self._dispatch()

    def _deliver(self, gateway_id: str, chunk: TokenChunk) -> None:
        outbox = self._outboxes[gateway_id]
        outbox.chunks.append(chunk)
        outbox.filled.set()

    def _hear(self, gateway_id: str) -> _Outbox:
        outbox = self._outboxes.setdefault(gateway_id, _Outbox())
        outbox.heard_at_s = self._clock()
        return outbox

    def _fail(self, sequence_id: SequenceId, error: str) -> None:
        ticket = self._tickets.pop(sequence_id)
        self._deliver(ticket.gateway_id, failed_chunk(sequence_id, error))

    def _forget(self, sequence_ids: Sequence[SequenceId]) -> None:
        for sequence_id in sequence_ids:
            ticket = self._tickets.pop(sequence_id, None)
            if ticket is None:
                continue
            if ticket.lane:
                ticket.lane.remove([sequence_id])
            else:
                self._waiting.remove(sequence_id)
        self._dispatch()

    # Workers --------------------------------------------------------------------------------------------

    async def _poll_forever(self) -> None:
        while True:
            await asyncio.sleep(self._config.coordinator.poll_interval_s)
            try:
                await self._poll_once()
            except Exception:
                logger.exception("worker poll failed; trying again")

    async def _poll_once(self) -> None:
        heartbeat = Heartbeat(owner=self._id, live=frozenset(self._tickets))
        fleet = await self._directory.poll(heartbeat)
        self._count_missed(fleet)
        self._update_lanes(fleet.targets)
        self._update_drafts(fleet.drafts)
        self._drop_expired()
        self._dispatch()

    def _count_missed(self, fleet: Fleet) -> None:
        seen = {handle.status.worker_id for handle in (*fleet.targets, *fleet.drafts)}
        known = seen | set(self._missed)
        counts = {worker_id: 0 if worker_id in seen else self._missed[worker_id] + 1 for worker_id in known}
        self._missed = {worker_id: n for worker_id, n in counts.items() if n < MISSED_POLLS}

    def _update_lanes(self, targets: Sequence[TargetHandle]) -> None:
        for target in targets:
            worker_id = target.status.worker_id
            if worker_id in self._lanes:
                self._lanes[worker_id].target = target  # same worker, fresher status
            elif not self._quarantine.holds(worker_id):
                logger.info("target %s (pid %d) attached", worker_id, target.status.pid)
                self._lanes[worker_id] = self._new_lane(target)
        for worker_id, lane in list(self._lanes.items()):
            if worker_id not in self._missed and not lane.sequences:
                del self._lanes[worker_id]
                asyncio.get_running_loop().create_task(lane.close())

    def _new_lane(self, target: TargetHandle) -> Lane:
        return Lane(
            target,
            owner=self._id,
            config=self._config.coordinator,
            policy=_new_policy(self._config),
            max_branches=self._config.speculation.lookahead_branches,
            on_chunks=self._on_chunks,
            on_draft_lost=self._quarantine.add,
            on_target_lost=self._on_target_lost,
            clock=self._clock,
        )

    def _on_target_lost(self, lane: Lane, states: Sequence[SequenceState]) -> None:
        """Put a lost target's sequences first in the queue: they go on from their logs on another one."""
        worker_id = lane.target.status.worker_id
        self._quarantine.add(worker_id)
        self._lanes.pop(worker_id, None)
        for state in states:
            ticket = self._tickets.get(state.sequence_id)
            if ticket is None:
                continue
            state.leave_workers()
            ticket.num_moves += 1
            if ticket.num_moves > self._config.coordinator.max_moves:
                self._fail(state.sequence_id, "the target worker was lost too often; please retry")
                continue
            ticket.lane = None
            ticket.submitted_at_s = self._clock()
            self._waiting.put_first([state.sequence_id])
        self._dispatch()

    def _update_drafts(self, answered: Sequence[DraftHandle]) -> None:
        """Share the draft workers out over the lanes: several to a lane, or several lanes to one.

        Which goes where depends on the two sets of ids alone, so nothing moves while they stay the same.
        """
        known = {**self._drafts, **{draft.status.worker_id: draft for draft in answered}}
        self._drafts = {worker_id: draft for worker_id, draft in known.items() if worker_id in self._missed}
        usable = [
            self._drafts[worker_id]
            for worker_id in sorted(self._drafts)
            if not self._quarantine.holds(worker_id)
        ]
        lanes = [self._lanes[worker_id] for worker_id in sorted(self._lanes)]
        for idx, lane in enumerate(lanes):
            if len(usable) > len(lanes):
                lane.set_drafts(usable[idx :: len(lanes)])
            else:
                lane.set_drafts([usable[idx % len(usable)]] if usable else [])

    def _drop_expired(self) -> None:
        """End what has waited too long: for a target, or for a gateway that gives no sign of life."""
        limits = self._config.coordinator
        now_s = self._clock()
        for sequence_id, ticket in list(self._tickets.items()):
            if not self._lanes and now_s - ticket.submitted_at_s > limits.idle_wait_s:
                self._waiting.remove(sequence_id)
                self._fail(sequence_id, "no target worker is available; please retry")
        for gateway_id, outbox in list(self._outboxes.items()):
            if now_s - outbox.heard_at_s > limits.orphan_timeout_s:
                self._drop_gateway(gateway_id)

    def _drop_gateway(self, gateway_id: str) -> None:
        """Forget a silent gateway and its sequences. Its stream ends: if it lives, it resumes them."""
        outbox = self._outboxes.pop(gateway_id)
        outbox.is_closed = True
        outbox.filled.set()
        orphans = [
            sequence_id for sequence_id, ticket in self._tickets.items() if ticket.gateway_id == gateway_id
        ]
        if orphans:
            logger.warning("%s is silent: %d sequences dropped", gateway_id, len(orphans))
        self._forget(orphans)


def _new_policy(config: AppConfig) -> RoundPolicy:
    """One per lane: each target worker has times of its own."""
    pipeline = new_pipeline_policy(config.speculation.pipeline)
    return new_round_policy(pipeline, config.max_speculative_tokens, adapts_gamma=config.adapts_gamma)


@dataclass(slots=True)
class _Totals:
    """Counters since the start, for status."""

    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_output_tokens: int = 0
    num_sequence_rounds: int = 0
    num_prepared_drafts: int = 0

    def add(self, chunk: TokenChunk) -> None:
        self.num_spec_steps += bool(chunk.num_drafted)
        self.num_draft_tokens += chunk.num_drafted
        self.num_accepted_draft_tokens += chunk.num_accepted
        self.num_output_tokens += len(chunk.token_ids)
        self.num_sequence_rounds += bool(chunk.token_ids)
        self.num_prepared_drafts += chunk.is_prepared
