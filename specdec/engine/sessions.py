"""The sequences a worker holds: which epoch, which tokens are cached, and applying feeds to them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from specdec.engine.grammar import Grammars, GrammarState
from specdec.engine.runner import ForwardItem, Runner
from specdec.errors import KVCacheFull, SpecDecError, StaleCache
from specdec.messages import Feed, Heartbeat, Lost, Opening
from specdec.sampling.processors import is_plain
from specdec.sampling.rows import RowContext
from specdec.types import SequenceId

UNHEARD_OWNER_S = 30.0
"""A coordinator silent for this long is dead: its sequences are freed."""
QUIET_OWNER_S = 5.0
"""One silent for this long may be dead: its sequences give way first."""
LIVE_GRACE_S = 5.0
"""A sequence missing in its owner's heartbeat is freed once it has been untouched for this long."""


@dataclass(slots=True)
class Session:
    """One sequence in a worker's cache."""

    sequence_id: SequenceId
    owner: str
    epoch: int
    opening: Opening
    serial: int
    """Rises with every opening: the highest is the youngest."""
    touched_at_s: float
    feed_serial: int = 0
    """Of the last feed."""
    token_ids: list[int] = field(default_factory=list)
    """Exactly the cached tokens, speculated ones included."""
    grammar: GrammarState | None = None
    """What the output must match; branches of a sequence share it."""

    is_plain: bool = False
    """See `specdec.sampling.processors.is_plain`; known to be so."""

    def context(self, length: int) -> RowContext:
        """The condition of the row behind the first ``length`` cached tokens."""
        opening = self.opening
        allowed = None
        if self.grammar is not None:
            allowed = self.grammar.allowed(self.token_ids[opening.prompt_len : length])
        return RowContext(
            params=opening.sampling,
            token_ids=self.token_ids,
            prompt_len=opening.prompt_len,
            length=length,
            stop_token_ids=opening.stop_token_ids,
            allowed=allowed,
        )

    def forward_item(self, token_ids: Sequence[int], num_rows: int) -> ForwardItem:
        """Note that ``token_ids`` get cached, and return what to hand to the runner."""
        self.token_ids.extend(token_ids)
        return ForwardItem(sequence_id=self.sequence_id, token_ids=token_ids, num_rows=num_rows)


class Wish(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a call wants of one sequence."""

    feed: Feed
    num_rows: int
    """Logits are wanted for the last ``num_rows`` tokens of the feed."""
    num_extra: int = 0
    """Tokens the worker itself will feed behind them in this call."""


class SessionTable:
    """Keeps sessions and the runner's caches in step; one thread at a time.

    Args:
        runner: the model.
        clock: monotonic seconds.
        on_release: told of every sequence that is freed, before it is.
        reclaim: frees what the worker can do without and says whether there was any, before sequences give
        way.
        grammars: for sequences that have one; None where none can.
    """

    def __init__(
        self,
        runner: Runner,
        clock: Callable[[], float] = time.monotonic,
        *,
        on_release: Callable[[SequenceId], None] = lambda _: None,
        reclaim: Callable[[], bool] = lambda: False,
        grammars: Grammars | None = None,
    ) -> None:
        self._runner = runner
        self._grammars = grammars
        self._on_release = on_release
        self._reclaim = reclaim
        self._clock = clock
        self._sessions: dict[SequenceId, Session] = {}
        self._preempted: dict[SequenceId, Session] = {}
        """Gave way for want of memory; their coordinators are told at their next feed."""
        self._heard_at_s: dict[str, float] = {}
        self._num_opened = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def prepare(self, owner: str, wishes: Sequence[Wish]) -> list[Session | Lost]:
        """Roll sequences back to what their feeds keep, and make room for what is fed behind it.

        When the KV cache is full, the youngest sequence gives way to those before it; a sequence that finds
        no younger one gives way itself. Whatever gives way is fed from its log again later.

        Args:
            owner: the coordinator that sends the feeds.
            wishes: one per sequence.

        Returns:
            For each wish the session, ready for `Session.forward_item` of its feed, or why there is none.
        """
        now_s = self._heard_at_s[owner] = self._clock()
        prepared = [self._prepare(owner, wish, now_s) for wish in wishes]
        # One that was ready may have had to give way to a later wish.
        return [
            self._preempted_loss(wish.feed)
            if isinstance(outcome, Session) and self._sessions.get(outcome.sequence_id) is not outcome
            else outcome
            for wish, outcome in zip(wishes, prepared, strict=True)
        ]

    def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        """Free sequences; unknown ids are ignored, so releasing twice is fine."""
        for sequence_id in sequence_ids:
            self._sessions.pop(sequence_id, None)
            self._preempted.pop(sequence_id, None)
            self._on_release(sequence_id)
            self._runner.close(sequence_id)

    def reconcile(self, heartbeat: Heartbeat) -> None:
        """Free what its owner no longer lists, and everything of owners not heard of any more."""
        now_s = self._clock()
        self._heard_at_s[heartbeat.owner] = now_s
        self.release([s.sequence_id for s in self._sessions.values() if self._is_orphan(s, heartbeat, now_s)])
        self._preempted = {
            sequence_id: session
            for sequence_id, session in self._preempted.items()
            if not self._is_orphan(session, heartbeat, now_s)
        }
        owners = {session.owner for session in (*self._sessions.values(), *self._preempted.values())}
        self._heard_at_s = {owner: t for owner, t in self._heard_at_s.items() if owner in owners}

    def _is_orphan(self, session: Session, heartbeat: Heartbeat, now_s: float) -> bool:
        if session.owner == heartbeat.owner:
            is_unlisted = session.sequence_id not in heartbeat.live
            return is_unlisted and now_s - session.touched_at_s > LIVE_GRACE_S
        return now_s - self._heard_at_s.get(session.owner, session.touched_at_s) > UNHEARD_OWNER_S

    def _prepare(self, owner: str, wish: Wish, now_s: float) -> Session | Lost:
        feed = wish.feed
        try:
            if not feed.token_ids:
                raise StaleCache(f"sequence {feed.sequence_id}: a feed without tokens")
            session = self._opened(owner, feed) if feed.keep == 0 else self._rolled_back(owner, feed)
            self._make_room(session, wish)
        except KVCacheFull as error:
            self.release([feed.sequence_id])
            return _lost(feed, error, out_of_memory=True)
        except StaleCache as error:
            if feed.sequence_id in self._preempted:
                return self._preempted_loss(feed)
            return _lost(feed, error)
        session.touched_at_s = now_s
        session.feed_serial = feed.serial
        return session

    def _opened(self, owner: str, feed: Feed) -> Session:
        if feed.opening is None:
            raise StaleCache(f"sequence {feed.sequence_id}: a feed from position 0 without its opening")
        known = self._sessions.get(feed.sequence_id)
        if known is not None and known.owner == owner:
            _refuse_older(feed, known)
        self.release([feed.sequence_id])
        self._runner.open(feed.sequence_id)
        self._num_opened += 1
        session = Session(feed.sequence_id, owner, feed.epoch, feed.opening, self._num_opened, self._clock())
        session.is_plain = is_plain(feed.opening.sampling)
        if self._grammars is not None and feed.opening.sampling.grammar:
            session.grammar = self._grammars.start(feed.opening.sampling.grammar)
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
        _refuse_older(feed, session)
        self._runner.truncate(feed.sequence_id, feed.keep)
        del session.token_ids[feed.keep :]
        return session

    def _make_room(self, session: Session, wish: Wish) -> None:
        """Reserve the cache for a wish; younger sequences give way, the youngest first.

        Before them go those of a coordinator that is silent: if it is dead, its sequences have moved, and
        what a moved one lacks is the room of its own dead original. If it lives it is told, and feeds again.

        Raises:
            KVCacheFull: even so there is no room.
            StaleCache: the sequence would outgrow the model's context.
        """
        item = ForwardItem(
            sequence_id=session.sequence_id, token_ids=wish.feed.token_ids, num_rows=wish.num_rows
        )
        while True:
            try:
                return self._runner.reserve(item, wish.num_extra)
            except KVCacheFull:
                if self._reclaim():
                    continue
                youngest = self._next_to_give_way(session)
                if youngest is session:
                    raise
                self.release([youngest.sequence_id])
                self._preempted[youngest.sequence_id] = youngest

    def _next_to_give_way(self, session: Session) -> Session:
        """The youngest of a silent owner's sequences, else of all, which may be this one itself."""
        now_s = self._clock()
        quiet = [
            other
            for other in self._sessions.values()
            if other.owner != session.owner
            and now_s - self._heard_at_s.get(other.owner, other.touched_at_s) > QUIET_OWNER_S
        ]
        return max(quiet or self._sessions.values(), key=lambda other: other.serial)

    def _preempted_loss(self, feed: Feed) -> Lost:
        self._preempted.pop(feed.sequence_id, None)
        return Lost(
            sequence_id=feed.sequence_id,
            epoch=feed.epoch,
            reason="it gave way to older sequences: the KV cache is full",
            out_of_memory=True,
        )


def _refuse_older(feed: Feed, session: Session) -> None:
    """Raise StaleCache for a feed that was overtaken by the one that the cache is from."""
    if (feed.epoch, feed.serial) < (session.epoch, session.feed_serial):
        raise StaleCache(f"sequence {feed.sequence_id}: feed {feed.serial} came behind {session.feed_serial}")


def _lost(feed: Feed, error: SpecDecError, *, out_of_memory: bool = False) -> Lost:
    return Lost(
        sequence_id=feed.sequence_id, epoch=feed.epoch, reason=error.message, out_of_memory=out_of_memory
    )
