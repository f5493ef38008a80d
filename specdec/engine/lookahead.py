"""Drafting ahead: while the target verifies a block, the draft prepares the next one for its likely outcomes.

An outcome of a block ``x_1..x_g`` is how many tokens are accepted and which token follows: the target's own
in place of the first refused one, or the bonus token. For each accept length the draft guesses a few
followers and drafts behind each, all of them as one batch over the shared prefix of the KV cache. When the
outcome is one of them, the next block is there at once.

What is prepared is what would have been drafted: the same tokens in front, the same law, the same
counter-based noise. So looking ahead changes no text and no law, only when a draft is made (SSD,
arXiv:2603.03251; PEARL, arXiv:2408.11850).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from specdec.engine.draft_block import Block, Drawer, look_at
from specdec.engine.runner import ForwardItem, Runner
from specdec.engine.sessions import Session
from specdec.errors import KVCacheFull, StaleCache
from specdec.messages import Feed, ProposeItem
from specdec.types import SequenceId


@dataclass(slots=True, eq=False)
class _Branch:
    """One outcome: the log, the accepted tokens, the token guessed behind them, and what is drafted behind
    it.
    """

    block: Block
    context_len: int
    """Tokens in front of the block."""
    to_feed: list[int]
    """Drawn or guessed and not fed yet: one, or none when the block is done."""

    @property
    def session(self) -> Session:
        return self.block.session


@dataclass(slots=True, eq=False)
class _Root:
    """A sequence whose last block is being verified."""

    item: ProposeItem
    block: Block
    """What was proposed: gamma >= 0 tokens, behind a context that ends before them."""
    to_feed: list[int]
    """What the sequence's own cache lacks to tell what might follow the whole block."""
    context_len: int
    """Tokens in front of the block."""
    guesses: list[tuple[int, list[int]]]
    """Accept lengths, and the tokens guessed behind so many accepted ones, that have no branches yet."""
    branches: list[_Branch] = field(default_factory=list)
    num_opened: int = 0

    @property
    def session(self) -> Session:
        return self.block.session


class LookAhead:
    """The branches of all sequences of a draft worker; one thread at a time.

    Args:
        runner: the draft model.
        drawer: draws their tokens.
    """

    def __init__(self, runner: Runner, drawer: Drawer) -> None:
        self._runner = runner
        self._drawer = drawer
        self._roots: dict[SequenceId, _Root] = {}

    @property
    def is_pending(self) -> bool:
        """Whether there is something to do."""
        return any(
            root.to_feed or root.guesses or any(map(_is_open, root.branches)) for root in self._roots.values()
        )

    def begin(self, item: ProposeItem, block: Block, to_feed: Sequence[int], context_len: int) -> None:
        """A block goes out to be verified: guess what may come of it.

        Args:
            item: what was asked for.
            block: what was answered.
            to_feed: tokens behind the session's that the cache lacks; behind an empty block there is room for
                them.
            context_len: tokens in front of the block.
        """
        self.drop(item.feed.sequence_id)
        guesses = list(enumerate(block.guesses[: len(block.token_ids)]))
        self._roots[item.feed.sequence_id] = _Root(item, block, list(to_feed), context_len, guesses)

    def take(self, owner: str, feed: Feed) -> Block | None:
        """The block prepared for what a feed tells, with its cache now the sequence's own; else None.

        Other branches of the sequence are dropped in any case.

        Args:
            owner: the coordinator that sends it.
            feed: what the verdict was.
        """
        root = self._roots.get(feed.sequence_id)
        if root is None:
            return None
        found = self._find(root, feed) if root.session.owner == owner else None
        if found is not None:
            root.branches.remove(found)
            self._runner.rename(found.session.sequence_id, feed.sequence_id)
            root.session.token_ids = found.session.token_ids
            root.session.feed_serial = feed.serial
            found.block.session = root.session
        self.drop(feed.sequence_id)
        return found.block if found else None

    def finish_feeds(self) -> None:
        """Compute what was promised to be cached, whatever comes next."""
        roots = [root for root in self._roots.values() if root.to_feed and not root.block.token_ids]
        if roots:
            self._step(roots, [])

    def run(self, is_interrupted: Callable[[], bool]) -> None:
        """Go on until everything is drafted, or until there is something better to do."""
        while self.is_pending and not is_interrupted():
            for root in self._roots.values():
                self._make_room(root)
                self._branch_out(root)
            self._step(list(self._roots.values()), self._open_branches())

    def drop(self, sequence_id: SequenceId) -> None:
        """Forget a sequence's branches."""
        root = self._roots.pop(sequence_id, None)
        if root is not None:
            self._close(root.branches)

    def reclaim(self) -> bool:
        """Give the memory of all branches back; whether there was any."""
        branches = [branch for root in self._roots.values() for branch in root.branches]
        self._close(branches)
        for root in self._roots.values():
            root.branches.clear()
        return bool(branches)

    def _abandon(self) -> None:
        """Forget everything, after a failure."""
        for sequence_id in list(self._roots):
            self.drop(sequence_id)

    def _close(self, branches: Iterable[_Branch]) -> None:
        for branch in branches:
            self._runner.close(branch.session.sequence_id)

    def _open_branches(self) -> list[_Branch]:
        return [branch for root in self._roots.values() for branch in root.branches if _is_open(branch)]

    def _find(self, root: _Root, feed: Feed) -> _Branch | None:
        session = root.session
        start, end = root.context_len, feed.keep + len(feed.token_ids)
        is_late = feed.serial < session.feed_serial
        if is_late or session.epoch != feed.epoch or not start <= feed.keep <= len(session.token_ids):
            return None
        told = [*session.token_ids[start : feed.keep], *feed.token_ids]
        for branch in root.branches:
            is_it = branch.context_len == end and branch.session.token_ids[start:end] == told
            if is_it and branch.block.token_ids:
                return branch
        return None

    def _step(self, roots: Sequence[_Root], branches: Sequence[_Branch]) -> None:
        try:
            self._go_on(roots, branches)
        except Exception:
            self._abandon()  # what the caches hold is not known any more
            raise

    def _go_on(self, roots: Sequence[_Root], branches: Sequence[_Branch]) -> None:
        """One forward over what is open: the next tokens of branches, and guesses behind whole blocks."""
        roots = [root for root in roots if root.to_feed]
        items = [_item(root.session, root.to_feed) for root in roots]
        items += [_item(branch.session, branch.to_feed) for branch in branches]
        if not items:
            return
        logits = self._runner.forward(items)
        self._runner.wait()  # whoever interrupts does not have to wait for more than this forward
        for root in roots:
            root.to_feed = []
        if branches:
            look_at([self._drawer.draw([branch.block for branch in branches], logits[len(roots) :])])
            for branch in branches:
                branch.to_feed = [] if branch.block.is_done else branch.block.token_ids[-1:]
        self._guess_behind(roots, logits)

    def _guess_behind(self, roots: Sequence[_Root], logits: torch.Tensor) -> None:
        """Branches behind whole blocks: the bonus token, or whatever the target says to an empty block."""
        wanted = [(row, root) for row, root in enumerate(roots) if _num_bonus_guesses(root)]
        if not wanted:
            return
        contexts = [root.session.context(len(root.session.token_ids)) for _, root in wanted]
        keys = [(context.params.seed, context.length) for context in contexts]
        count = max(_num_bonus_guesses(root) for _, root in wanted)
        rows = logits[[row for row, _ in wanted]]
        guesses = self._drawer.guess(rows, contexts, keys, count).tolist()
        for (_, root), guessed in zip(wanted, guesses, strict=True):
            root.guesses.append((len(root.block.token_ids), guessed[: _num_bonus_guesses(root)]))

    def _make_room(self, root: _Root) -> None:
        """For the last token of a block; without it there are no guesses behind the whole block."""
        if not root.to_feed:
            return
        item = ForwardItem(sequence_id=root.session.sequence_id, token_ids=root.to_feed, num_rows=1)
        try:
            self._runner.reserve(item)
        except (KVCacheFull, StaleCache):
            root.to_feed = []

    def _branch_out(self, root: _Root) -> None:
        for num_accepted, guesses in root.guesses:
            for token in guesses:
                if token not in root.session.opening.stop_token_ids:  # behind it there is nothing to draft
                    self._open(root, root.context_len + num_accepted, token)
        root.guesses = []

    def _open(self, root: _Root, length: int, token: int) -> None:
        """A branch that takes the first ``length`` tokens and ``token``; none where there is no room for
        it.
        """
        parent, num_wanted = root.session, root.item.num_draft_tokens
        branch_id = SequenceId(f"{parent.sequence_id}/{root.num_opened}")
        root.num_opened += 1
        session = Session(
            sequence_id=branch_id,
            owner=parent.owner,
            epoch=parent.epoch,
            opening=parent.opening,
            serial=parent.serial,
            touched_at_s=parent.touched_at_s,
            token_ids=parent.token_ids[:length],
            grammar=parent.grammar,
            is_plain=parent.is_plain,
        )
        self._runner.fork(parent.sequence_id, branch_id, length)
        try:
            item = ForwardItem(sequence_id=branch_id, token_ids=(token,), num_rows=1)
            self._runner.reserve(item, num_wanted - 1)
        except (KVCacheFull, StaleCache):
            self._runner.close(branch_id)
            return
        block = Block(session, num_wanted, position=length + 1, num_guesses=root.item.fan_out)
        root.branches.append(_Branch(block, length + 1, [token]))


def _is_open(branch: _Branch) -> bool:
    return bool(branch.to_feed)


def _item(session: Session, token_ids: Sequence[int]) -> ForwardItem:
    return session.forward_item(token_ids, num_rows=1)


def _num_bonus_guesses(root: _Root) -> int:
    fan_out = root.item.fan_out
    return fan_out[min(root.item.num_draft_tokens, len(fan_out) - 1)] if fan_out else 0
