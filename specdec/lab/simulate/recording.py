"""What happened in a simulation: forwards of devices, rounds of lanes, tokens of sequences.

All times are virtual seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from specdec.coordinator.handles import Fleet
from specdec.coordinator.local import LocalDraftHandle, LocalTargetHandle
from specdec.engine.worker import DraftWorker, TargetWorker
from specdec.messages import Heartbeat, ProposeReply, ProposeRequest, VerifyReply, VerifyRequest
from specdec.types import SequenceId, TokenChunk

Role = Literal["draft", "target"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One forward of one device."""

    name: str
    """``prefill``, ``draft``, ``look-ahead`` or ``verify``."""
    start_s: float
    end_s: float
    num_sequences: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRecord:
    """What one device did."""

    name: str
    role: Role
    busy_s: float
    """The forward in progress at the end included."""
    spans: tuple[Span, ...]


@dataclass(slots=True, kw_only=True)
class Proposal:
    """One propose call, as its coordinator sees it."""

    start_s: float
    end_s: float
    num_asked: int
    """Sequences it was to draft for."""
    num_prepared: int = 0
    """Of those, how many were answered with a block that had been prepared."""


@dataclass(slots=True, kw_only=True)
class Round:
    """One verify call and the propose calls before it, as their coordinator sees them."""

    target: str
    proposals: list[Proposal]
    verify_start_s: float
    end_s: float
    num_sequences: int
    num_draft_tokens: int
    num_accepted: int = 0
    """Draft tokens."""
    num_committed: int = 0
    """Tokens; 0 if all it did was prefill, or if it failed."""

    @property
    def start_s(self) -> float:
        return min((proposal.start_s for proposal in self.proposals), default=self.verify_start_s)

    @property
    def proposed_s(self) -> float:
        """When all drafts were there."""
        return max((proposal.end_s for proposal in self.proposals), default=self.verify_start_s)

    @property
    def num_hits(self) -> int:
        return sum(proposal.num_prepared for proposal in self.proposals)

    @property
    def num_misses(self) -> int:
        return sum(proposal.num_asked for proposal in self.proposals) - self.num_hits


@dataclass(slots=True)
class SequenceRecord:
    """What one client got."""

    token_ids: list[int] = field(default_factory=list)
    first_s: float | None = None
    last_s: float = 0.0
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0

    @property
    def tpot_s(self) -> float | None:
        """Time per token after the first; None for a single token."""
        if self.first_s is None or len(self.token_ids) < 2:
            return None
        return (self.last_s - self.first_s) / (len(self.token_ids) - 1)


class Recorder:
    """Takes notes between the coordinator and its workers.

    Args:
        clock: virtual seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.rounds: list[Round] = []
        """Those that are over."""
        self.sequences: dict[SequenceId, SequenceRecord] = {}
        self._proposals: dict[SequenceId, Proposal] = {}
        """Not verified yet."""
        self._rounds_of: dict[SequenceId, Round] = {}
        """The last one that was over."""

    def on_propose(self, request: ProposeRequest) -> Proposal:
        """A propose call goes out."""
        asked = [item for item in request.items if item.num_draft_tokens]
        now_s = self.clock()
        proposal = Proposal(start_s=now_s, end_s=now_s, num_asked=len(asked))
        self._proposals.update((item.feed.sequence_id, proposal) for item in request.items)
        return proposal

    def on_verify(self, target: str, request: VerifyRequest) -> Round:
        """A verify call goes out."""
        ids = [item.feed.sequence_id for item in request.items]
        found = [self._proposals.pop(sequence_id, None) for sequence_id in ids]
        proposals = {id(proposal): proposal for proposal in found if proposal is not None}
        now_s = self.clock()
        return Round(
            target=target,
            proposals=list(proposals.values()),
            verify_start_s=now_s,
            end_s=now_s,
            num_sequences=len(ids),
            num_draft_tokens=sum(len(item.draft.token_ids) for item in request.items if item.draft),
        )

    def on_verified(self, finished: Round, request: VerifyRequest) -> None:
        """It was answered, or failed."""
        finished.end_s = self.clock()
        self.rounds.append(finished)
        self._rounds_of.update((item.feed.sequence_id, finished) for item in request.items)

    def on_chunk(self, chunk: TokenChunk) -> None:
        """A client got tokens."""
        now_s = self.clock()
        record = self.sequences.setdefault(chunk.sequence_id, SequenceRecord())
        if chunk.token_ids:
            record.first_s = now_s if record.first_s is None else record.first_s
            record.last_s = now_s
        record.token_ids += chunk.token_ids
        record.num_spec_steps += chunk.num_drafted > 0
        record.num_draft_tokens += chunk.num_drafted
        record.num_accepted_draft_tokens += chunk.num_accepted
        if of_round := self._rounds_of.get(chunk.sequence_id):
            of_round.num_accepted += chunk.num_accepted
            of_round.num_committed += len(chunk.token_ids)


class RecordedDraftHandle(LocalDraftHandle):
    """A handle that notes its calls."""

    def __init__(self, worker: DraftWorker, recorder: Recorder) -> None:
        super().__init__(worker)
        self._recorder = recorder

    async def propose(self, request: ProposeRequest, timeout_s: float) -> ProposeReply:
        proposal = self._recorder.on_propose(request)
        try:
            reply = await super().propose(request, timeout_s)
        finally:
            proposal.end_s = self._recorder.clock()
        proposal.num_prepared = sum(draft.is_prepared for draft in reply.drafts)
        return reply


class RecordedTargetHandle(LocalTargetHandle):
    """A handle that notes its calls."""

    def __init__(self, worker: TargetWorker, recorder: Recorder) -> None:
        super().__init__(worker)
        self._recorder = recorder

    async def verify(self, request: VerifyRequest, timeout_s: float) -> VerifyReply:
        begun = self._recorder.on_verify(self.status.worker_id, request)
        try:
            return await super().verify(request, timeout_s)
        finally:
            self._recorder.on_verified(begun, request)


class RecordedDirectory:
    """A fixed set of workers; polls take no time."""

    def __init__(
        self, targets: Sequence[TargetWorker], drafts: Sequence[DraftWorker], recorder: Recorder
    ) -> None:
        self._targets = tuple(targets)
        self._drafts = tuple(drafts)
        self._recorder = recorder

    async def poll(self, heartbeat: Heartbeat) -> Fleet:
        for worker in (*self._targets, *self._drafts):
            await worker.heartbeat(heartbeat)
        return Fleet(
            targets=tuple(RecordedTargetHandle(worker, self._recorder) for worker in self._targets),
            drafts=tuple(RecordedDraftHandle(worker, self._recorder) for worker in self._drafts),
        )
