"""A lane: one target worker, at most one draft worker, and the sequences they decode together.

Each round is one propose call and one verify call for all of them. Sequences join and leave between rounds
(continuous batching). The draft is optional at every moment: without one, rounds are target-only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from specdec.config import CoordinatorConfig
from specdec.coordinator.handles import DraftHandle, TargetHandle, WorkerHandle
from specdec.errors import DraftUnavailable, TargetUnavailable
from specdec.messages import Draft, ProposeItem, ProposeRequest, VerifyItem, VerifyReply, VerifyRequest
from specdec.speculation.policy import GammaPolicy
from specdec.speculation.sequence import SequenceState
from specdec.types import SequenceId, TokenChunk, WorkerId

logger = logging.getLogger(__name__)

MAX_LOSSES = 3
"""A sequence whose cache is lost more often than this without a token in between fails."""


class Lane:
    """Runs rounds for its sequences until closed.

    Args:
        target: the worker that verifies; the lane lives as long as it does.
        owner: id of the coordinator, stamped on every call.
        config: chunk sizes and deadlines.
        policy: chooses gamma.
        on_chunks: takes what each round committed.
        on_draft_lost: told the id of a draft worker that died or missed its deadline.
        on_target_lost: takes the lane and the sequences it can no longer serve.
    """

    def __init__(
        self,
        target: TargetHandle,
        *,
        owner: str,
        config: CoordinatorConfig,
        policy: GammaPolicy,
        on_chunks: Callable[[Sequence[TokenChunk]], None],
        on_draft_lost: Callable[[WorkerId], None],
        on_target_lost: Callable[[Lane, Sequence[SequenceState]], None],
    ) -> None:
        self.target = target
        self.draft: DraftHandle | None = None
        self._owner = owner
        self._config = config
        self._policy = policy
        self._on_chunks = on_chunks
        self._on_draft_lost = on_draft_lost
        self._on_target_lost = on_target_lost
        self._running: dict[SequenceId, SequenceState] = {}
        self._joining: list[SequenceState] = []
        self._leaving: set[SequenceId] = set()
        self._next_draft: DraftHandle | None = None
        self._wake = asyncio.Event()
        self._background: set[asyncio.Task[None]] = set()
        self._task = asyncio.get_running_loop().create_task(self._run())

    # Membership: callable at any time, takes effect between rounds --------------------------------------

    @property
    def sequences(self) -> list[SequenceState]:
        return [*self._running.values(), *self._joining]

    def has_room_for(self, state: SequenceState) -> bool:
        """Whether the sequence fits beside the others even if all of them grow to their caps."""
        sequences = self.sequences
        reserved = sum(other.max_total_tokens for other in sequences)
        fits = reserved + state.max_total_tokens <= self.target.status.kv_capacity_tokens
        return len(sequences) < self._config.max_num_seqs and fits

    def add(self, state: SequenceState) -> None:
        self._joining.append(state)
        self._wake.set()

    def remove(self, sequence_ids: Sequence[SequenceId]) -> None:
        """Drop sequences and free their caches on both workers, before the next round at the latest."""
        self._leaving.update(sequence_ids)
        self._wake.set()

    def attach_draft(self, draft: DraftHandle) -> None:
        """Draft with this worker from the next round on."""
        self._next_draft = draft
        self._wake.set()

    async def close(self) -> None:
        self._task.cancel()
        for task in self._background:
            task.cancel()
        await asyncio.gather(self._task, *self._background, return_exceptions=True)

    # Rounds ---------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while True:
                self._change_members()
                if self._running:
                    await self._round()
                else:
                    self._wake.clear()
                    await self._wake.wait()
        except TargetUnavailable as error:
            logger.warning("target %s lost: %s", self.target.status.worker_id, error)
            self._release(self.draft, list(self._running))
            self._on_target_lost(self, self._abandon())
        except Exception:
            # A bug must not leave clients waiting: hand the sequences back and say what happened.
            logger.exception("lane of target %s failed", self.target.status.worker_id)
            self._on_target_lost(self, self._abandon())

    def _abandon(self) -> list[SequenceState]:
        states = [state for state in self.sequences if state.sequence_id not in self._leaving]
        self._running.clear()
        self._joining.clear()
        return states

    def _change_members(self) -> None:
        if self._next_draft is not None:
            self.draft, self._next_draft = self._next_draft, None
        for state in self._joining:
            self._running[state.sequence_id] = state
        self._joining.clear()
        left = [sequence_id for sequence_id in self._leaving if self._running.pop(sequence_id, None)]
        self._leaving.clear()
        self._release_everywhere(left)

    async def _round(self) -> None:
        drafts = await self._propose()
        items = self._verify_items(drafts)
        request = VerifyRequest(owner=self._owner, items=tuple(items.values()))
        reply = await self.target.verify(request, self._config.target_timeout_s)
        self._commit(items, reply)

    async def _propose(self) -> dict[SequenceId, Draft]:
        """Ask the draft for a block per decoding sequence; nothing when there is no draft to ask."""
        if self.draft is None:
            return {}
        items = self._propose_items(self.draft)
        if not items:
            return {}
        request = ProposeRequest(owner=self._owner, items=tuple(items.values()))
        try:
            reply = await self.draft.propose(request, self._config.draft_timeout_s)
        except DraftUnavailable as error:
            self._drop_draft(error)
            return {}
        for lost in reply.lost:
            if state := self._running.get(lost.sequence_id):
                logger.info("draft lost %s: %s", lost.sequence_id, lost.reason)
                state.on_lost(state.draft, lost)
        drafts: dict[SequenceId, Draft] = {}
        for draft in reply.drafts:
            sequence_id = draft.sequence_id
            if accepted := self._running[sequence_id].on_proposed(items[sequence_id], draft):
                drafts[sequence_id] = accepted
        return drafts

    def _propose_items(self, draft: DraftHandle) -> dict[SequenceId, ProposeItem]:
        policy_gamma = self._policy.num_speculative_tokens(len(self._running))
        draft_context = draft.status.max_context
        budget = self._config.prefill_chunk_tokens
        items: dict[SequenceId, ProposeItem] = {}
        for state in self._running.values():
            # The prompt goes to the target first: the draft catches up once there is something to draft for.
            gamma = state.gamma(policy_gamma, draft_context)
            if gamma == 0 or state.num_prefill_tokens > 0 or budget <= 0:
                continue
            item = state.propose_item(gamma, budget)
            items[state.sequence_id] = item
            budget -= len(item.feed.token_ids)
        return items

    def _verify_items(self, drafts: dict[SequenceId, Draft]) -> dict[SequenceId, VerifyItem]:
        budget = self._config.prefill_chunk_tokens
        items: dict[SequenceId, VerifyItem] = {}
        for state in self._running.values():
            if state.num_prefill_tokens == 0:
                draft = drafts.get(state.sequence_id)
                items[state.sequence_id] = state.verify_item(draft, self._config.prefill_chunk_tokens)
            elif budget > 0:
                item = state.verify_item(None, budget)
                items[state.sequence_id] = item
                budget -= len(item.feed.token_ids)
        return items

    def _commit(self, items: dict[SequenceId, VerifyItem], reply: VerifyReply) -> None:
        chunks: list[TokenChunk] = []
        for item in items.values():
            if item.num_rows == 0:
                self._running[item.feed.sequence_id].on_prefilled(item)
        for lost in reply.lost:
            state = self._running[lost.sequence_id]
            logger.warning("target lost %s: %s", lost.sequence_id, lost.reason)
            state.on_lost(state.target, lost)
            if lost.out_of_memory or state.target.num_losses > MAX_LOSSES:
                chunks.append(failed_chunk(state, "the KV cache of this sequence was lost"))
        for verdict in reply.verdicts:
            state = self._running[verdict.sequence_id]
            if chunk := state.on_verdict(items[verdict.sequence_id].draft, verdict):
                chunks.append(chunk)
        self._on_chunks(chunks)
        ended = [chunk.sequence_id for chunk in chunks if chunk.is_last]
        for sequence_id in ended:
            del self._running[sequence_id]
        self._release_everywhere(ended)

    def _drop_draft(self, error: DraftUnavailable) -> None:
        """Go on without a draft; every sequence will be fed to the next one from the log."""
        assert self.draft is not None
        logger.warning("draft %s lost, target-only rounds: %s", self.draft.status.worker_id, error)
        lost, self.draft = self.draft, None
        for state in self._running.values():
            state.draft.restart()
            state.draft.is_usable = True
        self._release(lost, list(self._running))
        self._on_draft_lost(lost.status.worker_id)

    def _release_everywhere(self, sequence_ids: Sequence[SequenceId]) -> None:
        self._release(self.target, sequence_ids)
        self._release(self.draft, sequence_ids)

    def _release(self, handle: WorkerHandle | None, sequence_ids: Sequence[SequenceId]) -> None:
        """Off the critical path: the round does not wait for it."""
        if handle is None or not sequence_ids:
            return
        task = asyncio.get_running_loop().create_task(handle.release(tuple(sequence_ids)))
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def failed_chunk(state: SequenceState, error: str) -> TokenChunk:
    """The last chunk of a sequence that cannot go on."""
    return TokenChunk(sequence_id=state.sequence_id, token_ids=(), error=error)
