"""The draft side of a round: fill caches, then draft up to gamma tokens per sequence, in one call."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from specdec.engine.runner import ForwardItem, Runner
from specdec.engine.sessions import Session, SessionTable, Wish
from specdec.messages import (
    Draft,
    Float32Array,
    Int32Array,
    Lost,
    ProposeItem,
    ProposeReply,
    ProposeRequest,
)
from specdec.sampling.drawing import draw, draw_among
from specdec.sampling.noise import Purpose
from specdec.sampling.processors import RowContext, depends_on_history, mask_padding, process_logits
from specdec.sampling.transfer import picked, placed
from specdec.sampling.verification import truncate_support
from specdec.types import VerificationMode


@dataclass(slots=True, eq=False)
class _Block:
    """A draft in the making."""

    session: Session
    num_wanted: int
    position: int = 0
    """Of the token that is drawn next."""
    num_drawn: int = 0
    token_ids: list[int] = field(default_factory=list)
    """Those drawn and seen."""
    support_ids: list[Int32Array] = field(default_factory=list)
    support_probs: list[Float32Array] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return self.num_drawn == self.num_wanted or self._has_stopped

    @property
    def _has_stopped(self) -> bool:
        return bool(self.token_ids) and self.token_ids[-1] in self.session.opening.stop_token_ids

    @property
    def context(self) -> RowContext:
        return self.session.context(self.position)

    @property
    def noise_key(self) -> tuple[int, int]:
        return self.session.opening.sampling.seed, self.position

    def see(self, token: int, law: tuple[Int32Array, Float32Array] | None) -> None:
        """Take in the next drawn token and the law it came from, in rejection mode; none behind a stop."""
        if not self._has_stopped:
            self.token_ids.append(token)
            if law is not None:
                self.support_ids.append(law[0])
                self.support_probs.append(law[1])

    def finished(self) -> Draft:
        return Draft(
            sequence_id=self.session.sequence_id,
            epoch=self.session.epoch,
            token_ids=tuple(self.token_ids),
            support_ids=np.stack(self.support_ids) if self.support_ids else None,
            support_probs=np.stack(self.support_probs) if self.support_probs else None,
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """One token of every block that was not done, on the model's device."""

    blocks: list[_Block]
    token_ids: torch.Tensor
    """[blocks] int64"""
    drafted_by_law: list[_Block]
    """Those in rejection mode."""
    support_ids: torch.Tensor
    """[drafted_by_law, K] int64"""
    support_probs: torch.Tensor
    """[drafted_by_law, K]"""


class DraftEngine:
    """Proposes tokens with a draft model.

    Args:
        runner: the draft model.
        support: K, tokens kept of the draft's law in rejection mode.
        draws_unseen: whether the drawn tokens stay on the device until all are drawn, instead of being looked
            at one by one; None does so where looking means waiting for a device.
    """

    def __init__(self, runner: Runner, support: int, *, draws_unseen: bool | None = None) -> None:
        self.runner = runner
        self.sessions = SessionTable(runner)
        self._support = support
        self._draws_unseen = runner.runs_ahead if draws_unseen is None else draws_unseen

    def propose(self, request: ProposeRequest) -> ProposeReply:
        """Apply every feed, then draft; sequences that cannot go on are reported as lost."""
        outcomes = self.sessions.prepare(request.owner, [_wish(item) for item in request.items])
        blocks: list[_Block] = []
        fed = []
        for item, outcome in zip(request.items, outcomes, strict=True):
            if isinstance(outcome, Session):
                fed.append(outcome.forward_item(item.feed.token_ids, _num_rows(item)))
                blocks.append(_Block(outcome, item.num_draft_tokens, position=len(outcome.token_ids)))
        if fed:
            logits = self.runner.forward(fed)
            wanted = [block for block in blocks if block.num_wanted]
            (self._draft_unseen if self._can_stay_unseen(wanted) else self._draft)(wanted, logits)
        return ProposeReply(
            drafts=tuple(block.finished() for block in blocks),
            lost=tuple(outcome for outcome in outcomes if isinstance(outcome, Lost)),
        )

    def _can_stay_unseen(self, blocks: list[_Block]) -> bool:
        """Penalties have to see a token before the next one can be drawn."""
        params = [block.session.opening.sampling for block in blocks]
        return self._draws_unseen and not any(map(depends_on_history, params))

    def _draft(self, blocks: list[_Block], logits: torch.Tensor) -> None:
        """Extend every block until it is done; each pass is one forward over those that are not."""
        while blocks:
            _look_at([self._draw(blocks, logits)])
            blocks = [block for block in blocks if not block.is_done]
            if blocks:
                logits = self.runner.forward(
                    [block.session.forward_item(block.token_ids[-1:], num_rows=1) for block in blocks]
                )

    def _draft_unseen(self, blocks: list[_Block], logits: torch.Tensor) -> None:
        """The same without waiting for the device before the end; what was drawn behind a stop is dropped."""
        steps: list[_Step] = []
        fed_unseen = [block for block in blocks if block.num_wanted > 1]
        while blocks:
            steps.append(self._draw(blocks, logits))
            going = [i for i, block in enumerate(blocks) if not block.is_done]
            token_ids = picked(steps[-1].token_ids, going)
            blocks = [blocks[i] for i in going]
            if blocks:
                logits = self.runner.forward([_unseen_item(block) for block in blocks], token_ids)
        if steps:
            _look_at(steps)
        for block in fed_unseen:
            fed = block.token_ids[:-1]
            block.session.token_ids.extend(fed)
            self.runner.settle(block.session.sequence_id, fed)

    def _draw(self, blocks: list[_Block], logits: torch.Tensor) -> _Step:
        """One token per block from its row."""
        rows = [block.context for block in blocks]
        processed = process_logits(mask_padding(logits, self.runner.vocab_size), rows)
        token_ids = processed.argmax(dim=-1)
        coupled = [i for i, row in enumerate(rows) if row.params.mode is VerificationMode.COUPLED]
        if coupled:
            drawn = self._draw_coupled([blocks[i] for i in coupled], picked(processed, coupled))
            token_ids = placed(token_ids, coupled, drawn)
        by_law = [i for i, row in enumerate(rows) if row.params.mode is VerificationMode.REJECTION]
        drafted_by_law = [blocks[i] for i in by_law]
        ids, law = token_ids.new_empty(0, 0), processed.new_empty(0, 0)
        if by_law:
            ids, law = truncate_support(torch.softmax(picked(processed, by_law), dim=-1), self._support)
            token_ids = placed(token_ids, by_law, self._draw_from(drafted_by_law, ids, law))
        for block in blocks:
            block.num_drawn += 1
            block.position += 1
        return _Step(blocks, token_ids, drafted_by_law, ids, law)

    def _draw_coupled(self, blocks: list[_Block], logits: torch.Tensor) -> torch.Tensor:
        """The target's own draw if both laws were equal: same noise, whole law."""
        return draw(torch.softmax(logits, dim=-1), [block.noise_key for block in blocks], Purpose.TARGET)

    def _draw_from(self, blocks: list[_Block], ids: torch.Tensor, law: torch.Tensor) -> torch.Tensor:
        keys = [block.noise_key for block in blocks]
        return draw_among(ids, law, keys, Purpose.DRAFT, self.runner.vocab_size)


def _look_at(steps: list[_Step]) -> None:
    """Tell the blocks what was drawn: the one place where the host waits for the device."""
    token_ids = iter(torch.cat([step.token_ids for step in steps]).tolist())
    laws = [(step.support_ids, step.support_probs) for step in steps if step.drafted_by_law]
    if laws:
        support_ids = iter(torch.cat([ids for ids, _ in laws]).to(torch.int32).cpu().numpy())
        support_probs = iter(torch.cat([probs for _, probs in laws]).cpu().numpy())
    for step in steps:
        by_law = set(map(id, step.drafted_by_law))
        for block in step.blocks:
            law = (next(support_ids), next(support_probs)) if id(block) in by_law else None
            block.see(next(token_ids), law)


def _unseen_item(block: _Block) -> ForwardItem:
    """Feeds the token that was drawn last, wherever it is."""
    return ForwardItem(sequence_id=block.session.sequence_id, token_ids=(0,), num_rows=1)


def _wish(item: ProposeItem) -> Wish:
    # The last drafted token is not fed: the draft's next call does that, if it is accepted.
    return Wish(feed=item.feed, num_rows=_num_rows(item), num_extra=max(0, item.num_draft_tokens - 1))


def _num_rows(item: ProposeItem) -> int:
    return 1 if item.num_draft_tokens else 0
