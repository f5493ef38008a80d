"""The draft side of a round: fill caches, then draft up to gamma tokens per sequence, in one call."""

from __future__ import annotations

from collections.abc import Callable

import torch

from specdec.engine.draft_block import Block, Drawer, Step, look_at
from specdec.engine.grammar import Grammars
from specdec.engine.lookahead import LookAhead
from specdec.engine.runner import ForwardItem, Runner
from specdec.engine.sessions import Session, SessionTable, Wish
from specdec.messages import Draft, Lost, ProposeItem, ProposeReply, ProposeRequest
from specdec.sampling.processors import depends_on_history
from specdec.sampling.transfer import picked
from specdec.types import SequenceId


class DraftEngine:
    """Proposes tokens with a draft model.

    Args:
        runner: the draft model.
        support: K, tokens kept of the draft's law in rejection mode.
        draws_unseen: whether the drawn tokens stay on the device until all are drawn, instead of being looked
            at one by one; None does so where looking means waiting for a device.
        grammars: for sequences that have one; without, they are drafted for as if they had none.
    """

    def __init__(
        self,
        runner: Runner,
        support: int,
        *,
        draws_unseen: bool | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self.runner = runner
        self._drawer = Drawer(support, runner.vocab_size)
        self._ahead = LookAhead(runner, self._drawer)
        self.sessions = SessionTable(
            runner,
            on_release=self._ahead.drop,
            reclaim=self._ahead.reclaim,
            grammars=grammars.for_drafts() if grammars else None,
        )
        self._draws_unseen = runner.runs_ahead if draws_unseen is None else draws_unseen

    def propose(self, request: ProposeRequest) -> ProposeReply:
        """Apply every feed, then draft; sequences that cannot go on are reported as lost.

        Blocks that were prepared are answered at once. Where most are, sequences whose outcome was not
        foreseen do not make the others wait: they get no draft this time, and one is prepared for them.
        """
        is_ahead = not self._ahead.is_pending
        self._ahead.finish_feeds()
        prepared = self._take_prepared(request)
        items = [item for item in request.items if item.feed.sequence_id not in prepared]
        outcomes = self.sessions.prepare(request.owner, [_wish(item) for item in items])
        pairs = zip(items, outcomes, strict=True)
        going = [(item, outcome) for item, outcome in pairs if isinstance(outcome, Session)]
        if len(prepared) > len(request.items) // 2:
            drafts = [self._postponed(item, session) for item, session in going if item.fan_out]
            going = [(item, session) for item, session in going if not item.fan_out]
        else:
            drafts = []
        drafts += self._drafted(going)
        return ProposeReply(
            drafts=(*prepared.values(), *drafts),
            lost=tuple(outcome for outcome in outcomes if isinstance(outcome, Lost)),
            is_ahead=is_ahead,
        )

    def look_ahead(self, is_interrupted: Callable[[], bool]) -> None:
        """Prepare the next blocks, until there is something better to do."""
        self._ahead.run(is_interrupted)

    def _take_prepared(self, request: ProposeRequest) -> dict[SequenceId, Draft]:
        drafts: dict[SequenceId, Draft] = {}
        for item in request.items:
            block = self._ahead.take(request.owner, item.feed)
            if block is not None and item.num_draft_tokens:
                block.cut(item.num_draft_tokens)
                drafts[item.feed.sequence_id] = self._sent(item, block, is_prepared=True)
        return drafts

    def _postponed(self, item: ProposeItem, session: Session) -> Draft:
        """No draft this time: the answer does not wait for the feed."""
        block = Block(session, 0, position=item.feed.keep + len(item.feed.token_ids))
        self._ahead.begin(item, block, item.feed.token_ids, block.position)
        return block.finished()

    def _drafted(self, going: list[tuple[ProposeItem, Session]]) -> list[Draft]:
        if not going:
            return []
        fed = [session.forward_item(item.feed.token_ids, _num_rows(item)) for item, session in going]
        blocks = [
            Block(
                session,
                item.num_draft_tokens,
                position=len(session.token_ids),
                num_guesses=item.fan_out,
            )
            for item, session in going
        ]
        logits = self.runner.forward(fed)
        wanted = [block for block in blocks if block.num_wanted]
        (self._draft_unseen if self._can_stay_unseen(wanted) else self._draft)(wanted, logits)
        return [self._sent(item, block) for (item, _), block in zip(going, blocks, strict=True)]

    def _sent(self, item: ProposeItem, block: Block, *, is_prepared: bool = False) -> Draft:
        """The draft, on its way to the target; meanwhile the next one may be prepared."""
        if item.fan_out and block.token_ids:
            context_len = block.position - block.num_drawn
            self._ahead.begin(item, block, block.token_ids[-1:], context_len)
        return block.finished(is_prepared=is_prepared)

    def _can_stay_unseen(self, blocks: list[Block]) -> bool:
        """Penalties have to see a token before the next one can be drawn, and so does who looks ahead."""
        params = [block.session.opening.sampling for block in blocks]
        looks_ahead = any(block.num_guesses for block in blocks)
        return self._draws_unseen and not looks_ahead and not any(map(depends_on_history, params))

    def _draft(self, blocks: list[Block], logits: torch.Tensor) -> None:
        """Extend every block until it is done; each pass is one forward over those that are not."""
        while blocks:
            step = self._drawer.draw(blocks, logits)
            self.runner.wait()
            look_at([step])
            blocks = [block for block in blocks if not block.is_done]
            if blocks:
                logits = self.runner.forward(
                    [block.session.forward_item(block.token_ids[-1:], num_rows=1) for block in blocks]
                )

    def _draft_unseen(self, blocks: list[Block], logits: torch.Tensor) -> None:
        """The same without waiting for the device before the end; what was drawn behind a stop is dropped."""
        steps: list[Step] = []
        fed_unseen = [block for block in blocks if block.num_wanted > 1]
        while blocks:
            steps.append(self._drawer.draw(blocks, logits))
            going = [i for i, block in enumerate(blocks) if not block.is_done]
            token_ids = picked(steps[-1].token_ids, going)
            blocks = [blocks[i] for i in going]
            if blocks:
                logits = self.runner.forward([_unseen_item(block) for block in blocks], token_ids)
        if steps:
            self.runner.wait()
            look_at(steps)
        for block in fed_unseen:
            fed = block.token_ids[:-1]
            block.session.token_ids.extend(fed)
            self.runner.settle(block.session.sequence_id, fed)


def _unseen_item(block: Block) -> ForwardItem:
    """Feeds the token that was drawn last, wherever it is."""
    return ForwardItem(sequence_id=block.session.sequence_id, token_ids=(0,), num_rows=1)


def _wish(item: ProposeItem) -> Wish:
    # The last drafted token is not fed: the draft's next call does that, if it is accepted.
    return Wish(feed=item.feed, num_rows=_num_rows(item), num_extra=max(0, item.num_draft_tokens - 1))


def _num_rows(item: ProposeItem) -> int:
    return 1 if item.num_draft_tokens else 0
