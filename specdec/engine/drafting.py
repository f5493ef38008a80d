"""The draft side of a round: fill caches, then draft up to gamma tokens per sequence, in one call."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from specdec.engine.runner import Runner
from specdec.engine.sessions import Session, SessionTable, Wish
from specdec.messages import Draft, Lost, ProposeItem, ProposeReply, ProposeRequest
from specdec.sampling.drawing import Key, draw, draw_among
from specdec.sampling.noise import Purpose
from specdec.sampling.processors import mask_padding, process_logits
from specdec.sampling.verification import truncate_support
from specdec.types import VerificationMode


@dataclass(slots=True, eq=False)
class _Block:
    """A draft in the making."""

    session: Session
    num_wanted: int
    token_ids: list[int] = field(default_factory=list)
    support_ids: list[torch.Tensor] = field(default_factory=list)
    support_probs: list[torch.Tensor] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        stops = self.session.opening.stop_token_ids
        return len(self.token_ids) == self.num_wanted or bool(self.token_ids and self.token_ids[-1] in stops)

    def finished(self) -> Draft:
        has_law = bool(self.support_ids)
        return Draft(
            sequence_id=self.session.sequence_id,
            epoch=self.session.epoch,
            token_ids=tuple(self.token_ids),
            support_ids=torch.stack(self.support_ids).cpu().numpy().astype(np.int32) if has_law else None,
            support_probs=torch.stack(self.support_probs).cpu().numpy() if has_law else None,
        )


class DraftEngine:
    """Proposes tokens with a draft model.

    Args:
        runner: the draft model.
        support: K, tokens kept of the draft's law in rejection mode.
    """

    def __init__(self, runner: Runner, support: int) -> None:
        self.runner = runner
        self.sessions = SessionTable(runner)
        self._support = support

    def propose(self, request: ProposeRequest) -> ProposeReply:
        """Apply every feed, then draft; sequences that cannot go on are reported as lost."""
        outcomes = self.sessions.prepare(request.owner, [_wish(item) for item in request.items])
        blocks: list[_Block] = []
        fed = []
        for item, outcome in zip(request.items, outcomes, strict=True):
            if isinstance(outcome, Session):
                blocks.append(_Block(outcome, item.num_draft_tokens))
                fed.append(outcome.forward_item(item.feed.token_ids, _num_rows(item)))
        if fed:
            logits = self.runner.forward(fed)
            self._draft([block for block in blocks if block.num_wanted], logits)
        return ProposeReply(
            drafts=tuple(block.finished() for block in blocks),
            lost=tuple(outcome for outcome in outcomes if isinstance(outcome, Lost)),
        )

    def _draft(self, blocks: list[_Block], logits: torch.Tensor) -> None:
        """Extend every block until it is done; each pass is one forward over those that are not."""
        while blocks:
            self._extend(blocks, logits)
            blocks = [block for block in blocks if not block.is_done]
            if blocks:
                logits = self.runner.forward(
                    [block.session.forward_item(block.token_ids[-1:], num_rows=1) for block in blocks]
                )

    def _extend(self, blocks: list[_Block], logits: torch.Tensor) -> None:
        """Draw one token per block from its row."""
        rows = [block.session.context(len(block.session.token_ids)) for block in blocks]
        processed = process_logits(mask_padding(logits, self.runner.vocab_size), rows)
        for mode, draw_all in (
            (VerificationMode.GREEDY, self._draw_greedy),
            (VerificationMode.COUPLED, self._draw_coupled),
            (VerificationMode.REJECTION, self._draw_rejection),
        ):
            chosen = [i for i, row in enumerate(rows) if row.params.mode is mode]
            if chosen:
                draw_all([blocks[i] for i in chosen], processed[chosen])

    def _draw_greedy(self, blocks: list[_Block], logits: torch.Tensor) -> None:
        _append(blocks, logits.argmax(dim=-1))

    def _draw_coupled(self, blocks: list[_Block], logits: torch.Tensor) -> None:
        """The target's own draw if both laws were equal: same noise, whole law."""
        _append(blocks, draw(torch.softmax(logits, dim=-1), _keys(blocks), Purpose.TARGET))

    def _draw_rejection(self, blocks: list[_Block], logits: torch.Tensor) -> None:
        ids, law = truncate_support(torch.softmax(logits, dim=-1), self._support)
        _append(blocks, draw_among(ids, law, _keys(blocks), Purpose.DRAFT))
        for i, block in enumerate(blocks):
            block.support_ids.append(ids[i])
            block.support_probs.append(law[i])


def _keys(blocks: list[_Block]) -> list[Key]:
    """Of the positions that are drawn next."""
    return [(block.session.opening.sampling.seed, len(block.session.token_ids)) for block in blocks]


def _append(blocks: list[_Block], chosen: torch.Tensor) -> None:
    for block, token in zip(blocks, chosen.tolist(), strict=True):
        block.token_ids.append(token)


def _wish(item: ProposeItem) -> Wish:
    # The last drafted token is not fed: the draft's next call does that, if it is accepted.
    return Wish(feed=item.feed, num_rows=_num_rows(item), num_extra=max(0, item.num_draft_tokens - 1))


def _num_rows(item: ProposeItem) -> int:
    return 1 if item.num_draft_tokens else 0
