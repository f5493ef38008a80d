"""The sequences a worker holds: which epoch, which tokens are cached, and applying feeds to them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specdec.engine.runner import ForwardItem, Runner
from specdec.errors import KVCacheFull, SpecDecError, StaleCache
from specdec.messages import Feed, Heartbeat, Lost, Opening
from specdec.sampling.processors import RowContext
from specdec.types import SequenceId

UNHEARD_OWNER_S = 30.0
"""A coordinator silent for this long is dead: its sequences are freed."""
LIVE_GRACE_S = 5.0
"""A sequence missing in its owner's heartbeat is freed once it has been untouched for this long."""


@dataclass(slots=True)
class Session:
    """One sequence in a worker's cache."""

    sequence_id: SequenceId
    owner: str
    epoch: int
    opening: Opening
    touched_at_s: float
    token_ids: list[int] = field(default_factory=list)
    """Exactly the cached tokens, speculated ones included."""
    num_reserved: int = 0
    """Tokens the worker itself may still feed in the current call."""

    def context(self, length: int) -> RowContext:
        """The condition of the row behind the first ``length`` cached tokens."""
        return RowContext(
            params=self.opening.sampling,
            token_ids=self.token_ids,
            prompt_len=self.opening.prompt_len,
            length=length,
        )


class SessionTable:
    """Keeps sessions and the runner's caches in step; one thread at a time."""

    def __init__(self, runner: Runner, clock: Callable[[], float] = time.monotonic) -> None:
        self._runner = runner
        self._clock = clock
        self._sessions: dict[SequenceId, Session] = {}
        self._heard_at_s: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def prepare(self, owner: str, feed: Feed, num_extra: int = 0) -> Session | Lost:
        """Roll a sequence back to what the feed keeps and check that its tokens fit.

        Args:
            owner: the coordinator that sends the feed.
            feed: what it sends.
            num_extra: tokens the worker itself will feed behind them in this call.

        Returns:
            The session, ready for `ForwardItem` of the feed, or why there is none.
        """
        self._heard_at_s[owner] = self._clock()
        try:
            if not feed.token_ids:
                raise StaleCache(f"sequence {feed.sequence_id}: a feed without tokens")
            session = self._opened(owner, feed) if feed.keep == 0 else self._rolled_back(owner, feed)
            session.num_reserved = 0
            self._check_fits(feed, num_extra)
            session.num_reserved = num_extra
        except KVCacheFull as error:
            self.release([feed.sequence_id])
            return _lost(feed, error, out_of_memory=True)
        except StaleCache as error:
            return _lost(feed, error)
        session.touched_at_s = self._clock()
        return session

    def forward_item(self, session: Session, token_ids: Sequence[int], num_rows: int) -> ForwardItem:
        """Note that ``token_ids`` get cached, and return what to hand to the runner."""
        session.token_ids.extend(token_ids)
        return ForwardItem(sequence_id=session.sequence_id, token_ids=token_ids, num_rows=num_rows)

    def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        """Free sequences; unknown ids are ignored, so releasing twice is fine."""
        for sequence_id in sequence_ids:
            self._sessions.pop(sequence_id, None)
            self._runner.close(sequence_id)

    def reconcile(self, heartbeat: Heartbeat) -> None:
        """Free what its owner no longer lists, and everything of owners not heard of any more."""
        now_s = self._clock()
        self._heard_at_s[heartbeat.owner] = now_s
        self.release([s.sequence_id for s in self._sessions.values() if self._is_orphan(s, heartbeat, now_s)])
        owners = {session.owner for session in self._sessions.values()}
        self._heard_at_s = {owner: t for owner, t in self._heard_at_s.items() if owner in owners}

    def _is_orphan(self, session: Session, heartbeat: Heartbeat, now_s: float) -> bool:
        if session.owner == heartbeat.owner:
            is_unlisted = session.sequence_id not in heartbeat.live
            return is_unlisted and now_s - session.touched_at_s > LIVE_GRACE_S
        return now_s - self._heard_at_s.get(session.owner, session.touched_at_s) > UNHEARD_OWNER_S

    def _opened(self, owner: str, feed: Feed) -> Session:
        if feed.opening is None:
            raise StaleCache(f"sequence {feed.sequence_id}: a feed from position 0 without its opening")
        self._runner.open(feed.sequence_id)
        session = Session(feed.sequence_id, owner, feed.epoch, feed.opening, self._clock())
        self._sessions[feed.sequence_id] = session
        return session

    def _rolled_back(self, owner: str, feed: Feed) -> Session:
        session = self._sessions.get(feed.sequence_id)
        if session is None:
            raise StaleCache(f"sequence {feed.sequence_id} is not cached here")
        if session.owner != owner:
            # Two coordinators' logs of one sequence may differ, and so may what each thinks is cached.
            raise StaleCache(f"sequence {feed.sequence_id} is cached here for {session.owner}, not {owner}")
        if session.epoch != feed.epoch:
            raise StaleCache(
                f"sequence {feed.sequence_id}: epoch {feed.epoch}, but {session.epoch} is cached"
            )
        self._runner.truncate(feed.sequence_id, feed.keep)
        del session.token_ids[feed.keep :]
        return session

    def _check_fits(self, feed: Feed, num_extra: int) -> None:
        num_new = len(feed.token_ids) + num_extra
        if feed.keep + num_new > self._runner.max_context:
            raise StaleCache(
                f"sequence {feed.sequence_id}: {feed.keep + num_new} positions exceed the context of "
                f"{self._runner.max_context}"
            )
        # Counted here and not in the runner, which has not been fed the other items of this call yet.
        used = sum(len(session.token_ids) + session.num_reserved for session in self._sessions.values())
        free = self._runner.kv_capacity_tokens - used
        if num_new > free:
            raise KVCacheFull(
                f"sequence {feed.sequence_id}: {num_new} tokens of KV cache wanted, {free} free"
            )


def _lost(feed: Feed, error: SpecDecError, *, out_of_memory: bool = False) -> Lost:
    return Lost(
        sequence_id=feed.sequence_id, epoch=feed.epoch, reason=error.message, out_of_memory=out_of_memory
    )
