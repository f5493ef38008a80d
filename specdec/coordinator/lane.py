"""A lane: one target worker, any number of draft workers, and the sequences they decode together.

Each round is one propose call per draft worker and one verify call, for all sequences or for one of two
groups of them, which then take turns: one is drafted for while the other is verified. Sequences join
and leave between the rounds of their group (continuous batching). Drafts are optional at every moment:
without one, rounds are target-only.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any, TypeVar

from specdec.config import CoordinatorConfig
from specdec.coordinator.deadlines import LEAST_DRAFT_S, LEAST_TARGET_S, Deadlines
from specdec.coordinator.handles import DraftHandle, TargetHandle, WorkerHandle
from specdec.errors import DraftUnavailable, TargetFailed, TargetUnavailable
from specdec.messages import (
    Draft,
    Lost,
    ProposeItem,
    ProposeReply,
    ProposeRequest,
    VerifyItem,
    VerifyReply,
    VerifyRequest,
)
from specdec.speculation.acceptance import SmoothedAcceptance
from specdec.speculation.pipeline import BranchBudget
from specdec.speculation.policy import expected_tokens
from specdec.speculation.round_policy import RoundPolicy
from specdec.speculation.sequence import SequenceState
from specdec.types import SequenceId, TokenChunk, WorkerId

logger = logging.getLogger(__name__)

Reply = TypeVar("Reply")

ROUND_SMOOTHING = 0.1
NUM_GROUPS = 2
"""Of sequences that take turns, at most."""
MAX_LOSSES = 3
"""A sequence whose cache is lost more often than this without a token in between fails."""
RESERVED_OUTPUT_TOKENS = 512
"""KV room kept for what a new sequence may still say; one that says more may have to wait in mid-stream."""
MEMORY_RETRY_S = 0.2
"""Pause of a sequence that gave way when the target's KV cache was full, before it looks for room again."""
IDLE_CHUNKS = 4
"""Prefill chunks that are fed at once while no stream would be stalled by them: fewer, larger calls."""
CATCH_UP_TOKENS = 2
"""What a draft lacks after a round of its own: more, and a propose call says nothing of how long drafting
takes."""
CLOSE_RETRY_S = 1.0
"""Pause before a task that goes on after it was cancelled is cancelled again."""
RESUME_ROOM_TOKENS = 64
"""Room it must find beyond its log, so that it does not give way again at once."""


class Lane:
    """Runs rounds for its sequences until closed.

    Args:
        target: the worker that verifies; the lane lives as long as it does.
        owner: id of the coordinator, stamped on every call.
        config: chunk sizes and deadlines.
        policy: chooses gamma and how rounds overlap; of this lane alone, since it learns how long calls take.
        max_branches: outcomes per sequence that drafts prepare for while the target verifies, at most.
        on_chunks: takes what each round committed.
        on_draft_lost: told the id of a draft worker that died or missed its deadline.
        on_target_lost: takes the lane and the sequences it can no longer serve.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        target: TargetHandle,
        *,
        owner: str,
        config: CoordinatorConfig,
        policy: RoundPolicy,
        max_branches: int,
        on_chunks: Callable[[Sequence[TokenChunk]], None],
        on_draft_lost: Callable[[WorkerId], None],
        on_target_lost: Callable[[Lane, Sequence[SequenceState]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.target = target
        self._owner = owner
        self._config = config
        self._policy = policy
        self._max_branches = max_branches
        self._on_chunks = on_chunks
        self._on_draft_lost = on_draft_lost
        self._on_target_lost = on_target_lost
        self._clock = clock
        self._acceptance = SmoothedAcceptance()
        self._target_deadlines = Deadlines(LEAST_TARGET_S, config.target_timeout_s)
        self._draft_deadlines: dict[WorkerId, Deadlines] = {}
        self._drafts: dict[WorkerId, DraftHandle] = {}
        self._branches: dict[tuple[WorkerId, int], BranchBudget] = {}
        """By gamma, too: what a draft gets done in the time of a verification depends on it."""
        self._proposed: dict[WorkerId, int] = {}
        """Gamma of the last call if that was to look ahead, else 0."""
        self._running: dict[SequenceId, SequenceState] = {}
        self._joining: list[SequenceState] = []
        self._leaving: set[SequenceId] = set()
        self._paused_until_s: dict[SequenceId, float] = {}
        """Sequences that gave way when the target's KV cache was full."""
        self.round_s = 0.0
        """Seconds of a round, smoothed; 0 before the first."""
        self.propose_s = 0.0
        """Of these, until the drafts were there."""
        self._chunks: list[TokenChunk] = []
        """Committed, and not handed on yet."""
        self._kv_free_tokens = 0
        """Of the target, after its last call."""
        self._background: set[asyncio.Task[None]] = set()
        loop = asyncio.get_running_loop()
        self._wakes = [asyncio.Event() for _ in range(NUM_GROUPS)]
        self._tasks = [loop.create_task(self._run(group)) for group in range(NUM_GROUPS)]

    # Membership: callable at any time, takes effect between rounds --------------------------------------

    @property
    def sequences(self) -> list[SequenceState]:
        members = [*self._running.values(), *self._joining]
        return [state for state in members if state.sequence_id not in self._leaving]

    def has_room_for(self, state: SequenceState) -> bool:
        """Whether the sequence fits beside the others, with some room for all of them to grow."""
        sequences = [*self.sequences, state]
        reserved = sum(reserved_tokens(member) for member in sequences)
        fits = reserved <= self.target.status.kv_capacity_tokens or len(sequences) == 1
        return len(sequences) <= self._config.max_num_seqs and fits

    def add(self, state: SequenceState) -> None:
        state.acceptance = SmoothedAcceptance(self._acceptance)
        self._joining.append(state)
        self._wake()

    def remove(self, sequence_ids: Sequence[SequenceId]) -> None:
        """Drop sequences and free their caches on their workers, before the next round at the latest."""
        self._leaving.update(sequence_ids)
        self._wake()

    def set_drafts(self, drafts: Sequence[DraftHandle]) -> None:
        """Draft with these workers from now on; sequences of workers not among them move."""
        previous, self._drafts = self._drafts, {draft.status.worker_id: draft for draft in drafts}
        for worker_id in previous.keys() - self._drafts.keys():
            self._leave_draft(previous[worker_id])
            self._branches = {key: budget for key, budget in self._branches.items() if key[0] != worker_id}
            self._proposed.pop(worker_id, None)
            self._draft_deadlines.pop(worker_id, None)
        if previous.keys() != self._drafts.keys():
            self._policy.on_drafts(shares_device=any(map(self._shares_device, drafts)))

    async def close(self) -> None:
        pending: set[asyncio.Task[None]] = {*self._tasks, *self._background}
        tasks = tuple(pending)
        while pending:
            for task in pending:
                task.cancel()
            # Again, should one have lost it: whoever closes must not wait for ever.
            _, pending = await asyncio.wait(pending, timeout=CLOSE_RETRY_S)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _wake(self) -> None:
        for wake in self._wakes:
            wake.set()

    def _shares_device(self, draft: DraftHandle) -> bool:
        """Whether a draft worker computes on the target's device."""
        mine, its = self.target.status, draft.status
        return (mine.node_id, mine.device) == (its.node_id, its.device)

    # Rounds ---------------------------------------------------------------------------------------------

    async def _run(self, group: int) -> None:
        """Rounds of one group. Without two of them, all sequences are in the first."""
        try:
            while True:
                self._change_members(group)
                if states := self._members(group):
                    await self._round(states)
                else:
                    self._wakes[group].clear()
                    await self._wakes[group].wait()
        except TargetUnavailable as error:
            logger.warning("target %s lost: %s", self.target.status.worker_id, error)
            self._abandon(group)
        except Exception:
            # A bug must not leave clients waiting: hand the sequences back and say what happened.
            logger.exception("lane of target %s failed", self.target.status.worker_id)
            self._abandon(group)

    def _abandon(self, group: int) -> None:
        """The target is lost; the rounds of the other group end here, too."""
        for other, task in enumerate(self._tasks):
            if other != group:
                task.cancel()
        self._hand_on()
        states = self.sequences
        self._release_from_drafts(states)
        self._running.clear()
        self._joining.clear()
        self._on_target_lost(self, states)

    # Groups ---------------------------------------------------------------------------------------------

    def _members(self, group: int) -> list[SequenceState]:
        return [state for state in self._running.values() if state.group == group]

    def _change_members(self, group: int) -> None:
        """Take in and let go, between two rounds of this group; the other one may be in the middle of its."""
        if group == 0:
            for state in self._joining:
                state.group = 0
                self._running[state.sequence_id] = state
            self._joining.clear()
        gone = [name for name in self._leaving if name not in self._running]
        mine = [state for state in self._members(group) if state.sequence_id in self._leaving]
        self._leaving.difference_update(gone, [state.sequence_id for state in mine])
        self._drop(mine)
        if not self._running:
            self._policy.on_idle()
        self._share_out(group)

    def _share_out(self, group: int) -> None:
        """Give what this group has too much of to the other: the second gives all, unless there are two.

        Sequences whose request says how their rounds are to be stay in the first.
        """
        mine, other = self._members(group), 1 - group
        surplus = len(mine) if group == 1 else 0
        if self._policy.overlap == "groups" and self._drafts:
            surplus = (len(mine) - len(self._members(other)) + (group == 0)) // 2
            surplus = min(surplus, len(mine) - 1) if group == 0 else surplus
        if surplus > 0:
            for state in [state for state in mine if state.is_flexible][-surplus:]:
                state.group = other
            self._wakes[other].set()

    # One round ------------------------------------------------------------------------------------------

    async def _round(self, states: Sequence[SequenceState]) -> None:
        started_s = self._clock()
        states = self._with_memory(states)
        drafts = await self._propose(states)
        proposed_s = self._clock()
        items = self._verify_items(states, drafts)
        if not items:
            await asyncio.sleep(MEMORY_RETRY_S / 4)  # everyone waits for memory
            return
        try:
            replies = [await self._verify(list(items.values()))]
        except TargetFailed as error:
            logger.warning("target %s failed, one by one now: %s", self.target.status.worker_id, error)
            replies = await self._verify_one_by_one(items)
        self._commit(items, replies)
        ended_s = self._clock()
        smoothing = ROUND_SMOOTHING if self.round_s else 1.0
        self.round_s += (ended_s - started_s - self.round_s) * smoothing
        self.propose_s += (proposed_s - started_s - self.propose_s) * smoothing
        if any(state.is_flexible for state in states):
            self._policy.on_round(len(self._running), _num_expected(states, items), ended_s)

    async def _verify(self, items: list[VerifyItem]) -> VerifyReply:
        request = VerifyRequest(owner=self._owner, items=tuple(items))
        num_fed = sum(len(item.feed.token_ids) for item in items)
        started_s = self._clock()
        reply = await self.target.verify(request, self._target_deadlines.of(num_fed))
        self._target_deadlines.on_answer(num_fed, self._clock() - started_s)
        if all(len(item.feed.token_ids) == item.num_rows and not item.scored_ids for item in items):
            num_tokens = sum(item.num_rows for item in items)
            self._policy.on_verified(num_tokens, self._clock() - started_s)
        self._kv_free_tokens = reply.kv_free_tokens
        return reply

    def _with_memory(self, members: Sequence[SequenceState]) -> list[SequenceState]:
        """Those to decode in this round: one that gave way comes back when there is room for all of it."""
        if not self._paused_until_s:
            return list(members)
        states = [state for state in members if state.sequence_id not in self._paused_until_s]
        for state in [state for state in members if state.sequence_id in self._paused_until_s]:
            sequence_id = state.sequence_id
            until_s = self._paused_until_s[sequence_id]
            wanted = len(state.log) + RESUME_ROOM_TOKENS
            # With nobody else at work the figure may be stale, and only trying can tell.
            if until_s <= self._clock() and (wanted <= self._kv_free_tokens or not states):
                del self._paused_until_s[sequence_id]
                self._kv_free_tokens -= wanted
                states.append(state)
        return states

    async def _verify_one_by_one(self, items: dict[SequenceId, VerifyItem]) -> list[VerifyReply]:
        """The worker lives but a call failed in it: find the sequence at fault, serve the others.

        Raises:
            TargetUnavailable: every one of several failed, so it is the worker that is at fault.
        """
        replies: list[VerifyReply] = []
        failed: list[SequenceId] = []
        for sequence_id, item in items.items():
            try:
                replies.append(await self._verify([item]))
            except TargetFailed as error:
                logger.error("sequence %s cannot be verified: %s", sequence_id, error)
                failed.append(sequence_id)
        if len(failed) > 1 and not replies:
            raise TargetUnavailable("every sequence fails in it")
        message = "the target could not process this sequence"
        self._end([failed_chunk(sequence_id, message) for sequence_id in failed])
        return replies

    # Drafting -------------------------------------------------------------------------------------------

    async def _propose(self, states: Sequence[SequenceState]) -> dict[SequenceId, Draft]:
        """Ask every draft worker for a block per decoding sequence of its; {} when there is none to ask."""
        calls = self._propose_items(states)
        replies = await _all_of(
            [self._propose_with(self._drafts[worker_id], items) for worker_id, items in calls.items()]
        )
        drafts: dict[SequenceId, Draft] = {}
        for items, reply in zip(calls.values(), replies, strict=True):
            if reply is not None:
                drafts |= self._take_drafts(items, reply)
        return drafts

    def _propose_items(
        self, states: Sequence[SequenceState]
    ) -> dict[WorkerId, dict[SequenceId, ProposeItem]]:
        # The prompt goes to the target first: the draft catches up once there is something to draft for.
        states = [state for state in states if state.num_prefill_tokens == 0] if self._drafts else []
        gammas = self._policy.choose(states)
        statuses = {draft_id: draft.status for draft_id, draft in self._drafts.items()}
        wanted: dict[WorkerId, list[tuple[SequenceState, int]]] = {}
        for state, policy_gamma in zip(states, gammas, strict=True):
            draft_id = state.draft_id or self._assign_draft(state)
            status = statuses[draft_id]
            if not state.draft.is_usable:
                free = status.kv_capacity_tokens - status.kv_tokens_in_use
                state.draft.is_usable = free >= len(state.log) + RESUME_ROOM_TOKENS
            if gamma := state.gamma(policy_gamma, status.max_context):
                wanted.setdefault(draft_id, []).append((state, gamma))
        return {draft_id: self._items_for(draft_id, pairs) for draft_id, pairs in wanted.items()}

    def _items_for(
        self, draft_id: WorkerId, wanted: Sequence[tuple[SequenceState, int]]
    ) -> dict[SequenceId, ProposeItem]:
        """What to ask of one draft worker; sequences beyond the budget for prompts wait a round."""
        overlap = self._policy.overlap
        budget = self._config.prefill_chunk_tokens
        num_branches = self._budget_of(draft_id, max(gamma for _, gamma in wanted)).num_branches
        items: dict[SequenceId, ProposeItem] = {}
        for state, gamma in wanted:
            if budget > 0:
                is_ahead = (overlap if state.is_flexible else state.request.pipeline) == "lookahead"
                item = state.propose_item(gamma, budget, num_branches if is_ahead else 0)
                items[state.sequence_id] = item
                budget -= len(item.feed.token_ids)
        return items

    def _assign_draft(self, state: SequenceState) -> WorkerId:
        """Give a sequence to the draft worker that has fewest."""
        load = Counter(other.draft_id for other in self._running.values())
        draft_id = state.draft_id = min(self._drafts, key=lambda worker_id: load[worker_id])
        return draft_id

    def _budget_of(self, draft_id: WorkerId, gamma: int) -> BranchBudget:
        """Outcomes that a draft worker prepares for with drafts of up to ``gamma`` tokens."""
        return self._branches.setdefault((draft_id, gamma), BranchBudget(self._max_branches))

    async def _propose_with(
        self, draft: DraftHandle, items: dict[SequenceId, ProposeItem]
    ) -> ProposeReply | None:
        try:
            request = ProposeRequest(owner=self._owner, items=tuple(items.values()))
            deadlines = self._draft_deadlines.setdefault(
                draft.status.worker_id, Deadlines(LEAST_DRAFT_S, self._config.draft_timeout_s)
            )
            num_tokens = sum(len(item.feed.token_ids) + item.num_draft_tokens for item in items.values())
            started_s = self._clock()
            reply = await draft.propose(request, deadlines.of(num_tokens))
            deadlines.on_answer(num_tokens, self._clock() - started_s)
            self._count_proposed(draft.status.worker_id, items.values(), reply, self._clock() - started_s)
            return reply
        except DraftUnavailable as error:
            logger.warning("draft %s lost: %s", draft.status.worker_id, error)
            self._drop_draft(draft)
            return None

    def _count_proposed(
        self,
        worker_id: WorkerId,
        items: Collection[ProposeItem],
        reply: ProposeReply,
        elapsed_s: float,
    ) -> None:
        """Tell the policy what a call took, if that is what such calls take.

        Not so where prompts are fed, and where the call before was of another kind: what is prepared while
        the target verifies is for the next call.
        """
        gamma = max(item.num_draft_tokens for item in items)
        is_ahead = any(item.fan_out for item in items)
        kind = gamma if is_ahead else 0
        before, self._proposed[worker_id] = self._proposed.get(worker_id), kind
        if is_ahead and kind == before:
            self._budget_of(worker_id, gamma).on_answer(reply.is_ahead)
        if kind == before and all(len(item.feed.token_ids) <= CATCH_UP_TOKENS for item in items):
            num_asked = sum(item.num_draft_tokens for item in items)
            num_drafted = sum(len(draft.token_ids) for draft in reply.drafts)
            self._policy.on_proposed(len(items), gamma, elapsed_s, num_drafted / max(1, num_asked))

    def _take_drafts(
        self, items: dict[SequenceId, ProposeItem], reply: ProposeReply
    ) -> dict[SequenceId, Draft]:
        for lost in reply.lost:
            logger.info("draft lost %s: %s", lost.sequence_id, lost.reason)
            self._running[lost.sequence_id].on_draft_lost(lost)
        taken = {
            draft.sequence_id: self._running[draft.sequence_id].on_proposed(items[draft.sequence_id], draft)
            for draft in reply.drafts
        }
        return {sequence_id: draft for sequence_id, draft in taken.items() if draft is not None}

    def _drop_draft(self, draft: DraftHandle) -> None:
        """Go on without a draft worker that failed."""
        self._drafts.pop(draft.status.worker_id, None)
        self._leave_draft(draft)
        self._on_draft_lost(draft.status.worker_id)

    def _leave_draft(self, draft: DraftHandle) -> None:
        """Free a draft worker's sequences; they will be fed to another one from the log."""
        members = [state for state in self._running.values() if state.draft_id == draft.status.worker_id]
        self._release(draft, [state.sequence_id for state in members])
        for state in members:
            state.leave_draft()

    # Verifying ------------------------------------------------------------------------------------------

    def _verify_items(
        self, states: Sequence[SequenceState], drafts: dict[SequenceId, Draft]
    ) -> dict[SequenceId, VerifyItem]:
        is_decoding = any(state.num_prefill_tokens == 0 for state in states)
        budget = self._config.prefill_chunk_tokens * (1 if is_decoding else IDLE_CHUNKS)
        items: dict[SequenceId, VerifyItem] = {}
        for state in states:
            sequence_id = state.sequence_id
            if state.num_prefill_tokens == 0:
                draft = drafts.get(sequence_id)
                items[sequence_id] = state.verify_item(draft, self._config.prefill_chunk_tokens)
            elif budget > 0:
                items[sequence_id] = state.verify_item(None, budget)
                budget -= len(items[sequence_id].feed.token_ids)
        return items

    def _commit(self, items: dict[SequenceId, VerifyItem], replies: Sequence[VerifyReply]) -> None:
        chunks: list[TokenChunk] = []
        for scores in (scores for reply in replies for scores in reply.scores):
            self._running[scores.sequence_id].on_scores(items[scores.sequence_id], scores)
        for item in items.values():
            if item.num_rows == 0 and item.feed.sequence_id in self._running:
                self._running[item.feed.sequence_id].on_prefilled(item)
        for lost in (lost for reply in replies for lost in reply.lost):
            chunks += self._on_lost(self._running[lost.sequence_id], lost)
        for verdict in (verdict for reply in replies for verdict in reply.verdicts):
            state = self._running[verdict.sequence_id]
            if chunk := state.on_verdict(items[verdict.sequence_id].draft, verdict):
                chunks.append(chunk)
        self._end(chunks)

    def _on_lost(self, state: SequenceState, lost: Lost) -> list[TokenChunk]:
        """Start the sequence anew from its log; wait for memory if that was why, but do not try for ever."""
        logger.warning("target lost %s: %s", lost.sequence_id, lost.reason)
        state.on_target_lost(lost)
        if lost.out_of_memory:
            # It holds nothing while it waits, so the others can finish: no deadlock. The gateway's deadline
            # bounds the wait.
            self._paused_until_s[lost.sequence_id] = self._clock() + MEMORY_RETRY_S
            state.target.num_losses = 0
        if state.target.num_losses > MAX_LOSSES:
            return [failed_chunk(lost.sequence_id, "the KV cache of this sequence was lost")]
        return []

    # Ends -----------------------------------------------------------------------------------------------

    def _end(self, chunks: Sequence[TokenChunk]) -> None:
        """Let go of sequences whose last chunk this is, and hand the chunks on.

        Where none has ended, that happens while the workers are at the next round already.
        """
        self._chunks += chunks
        if ended := [self._running[chunk.sequence_id] for chunk in chunks if chunk.is_last]:
            self._drop(ended)
            self._hand_on()
        else:
            asyncio.get_running_loop().call_soon(self._hand_on)

    def _hand_on(self) -> None:
        chunks, self._chunks = self._chunks, []
        if chunks:
            self._on_chunks(chunks)

    def _drop(self, states: Sequence[SequenceState]) -> None:
        for state in states:
            del self._running[state.sequence_id]
            self._paused_until_s.pop(state.sequence_id, None)
        self._release(self.target, [state.sequence_id for state in states])
        self._release_from_drafts(states)

    def _release_from_drafts(self, states: Sequence[SequenceState]) -> None:
        for worker_id, draft in self._drafts.items():
            self._release(draft, [state.sequence_id for state in states if state.draft_id == worker_id])

    def _release(self, handle: WorkerHandle, sequence_ids: Sequence[SequenceId]) -> None:
        """Off the critical path: the round does not wait for it."""
        if not sequence_ids:
            return
        task = asyncio.get_running_loop().create_task(handle.release(tuple(sequence_ids)))
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _num_expected(states: Sequence[SequenceState], items: dict[SequenceId, VerifyItem]) -> float:
    """Tokens that such a round commits on average."""
    verified = [(state, items[state.sequence_id]) for state in states if state.sequence_id in items]
    return sum(
        expected_tokens(state.acceptance.rate, item.num_rows - 1)
        for state, item in verified
        if item.num_rows and not item.scored_ids
    )


async def _all_of(calls: Sequence[Coroutine[Any, Any, Reply]]) -> list[Reply]:
    """Make calls at the same time; a single one at once, before anything else that waits for the loop."""
    return [await calls[0]] if len(calls) == 1 else await asyncio.gather(*calls)


def reserved_tokens(state: SequenceState) -> int:
    """KV room of a target that is kept for a sequence."""
    return min(state.max_total_tokens, len(state.log) + RESERVED_OUTPUT_TOKENS)


def failed_chunk(sequence_id: SequenceId, error: str) -> TokenChunk:
    """The last chunk of a sequence that cannot go on."""
    return TokenChunk(sequence_id=sequence_id, token_ids=(), error=error)
