"""A draft in the making: its tokens, the laws they were drawn from, and drawing the next ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch

from specdec.engine.sessions import Session
from specdec.messages import Draft, Float32Array, Int32Array
from specdec.sampling.drawing import Key, best, draw, draw_among
from specdec.sampling.noise import Purpose
from specdec.sampling.processors import mask_padding, process_logits
from specdec.sampling.rows import RowContext
from specdec.sampling.transfer import picked, placed
from specdec.sampling.verification import truncate_support
from specdec.types import VerificationMode

TINY = 1e-30
"""Added to weights that may all be zero."""


@dataclass(slots=True, eq=False)
class Block:
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
    num_guesses: tuple[int, ...] = ()
    """How many tokens to guess in place of each drawn one, should the target refuse it; looking ahead
    only."""
    guesses: list[list[int]] = field(default_factory=list)
    """Those, per drawn token; looking ahead only."""

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

    def see(self, token: int, guesses: Sequence[int]) -> None:
        """Take in the next drawn token, and what else it might have been."""
        if self.num_guesses:
            self.guesses.append(list(guesses[: self.num_guesses[len(self.token_ids)]]))
        self.token_ids.append(token)

    def end_at_stop(self) -> None:
        """Drop what was drawn behind a stop."""
        stop_token_ids = self.session.opening.stop_token_ids
        if not stop_token_ids.isdisjoint(self.token_ids):
            self.cut(1 + next(i for i, token in enumerate(self.token_ids) if token in stop_token_ids))

    @property
    def num_guesses_now(self) -> int:
        """For the token that is drawn next."""
        return self.num_guesses[self.num_drawn] if self.num_guesses else 0

    def cut(self, num_tokens: int) -> None:
        """Keep the first ``num_tokens`` tokens."""
        for of_tokens in (self.token_ids, self.support_ids, self.support_probs, self.guesses):
            del of_tokens[num_tokens:]

    def finished(self, *, is_prepared: bool = False) -> Draft:
        return Draft(
            is_prepared=is_prepared,
            sequence_id=self.session.sequence_id,
            epoch=self.session.epoch,
            token_ids=tuple(self.token_ids),
            support_ids=np.stack(self.support_ids) if self.support_ids else None,
            support_probs=np.stack(self.support_probs) if self.support_probs else None,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One token of every block that was not done, on the model's device."""

    blocks: list[Block]
    token_ids: torch.Tensor
    """[blocks] int64"""
    drafted_by_law: list[Block]
    """Those in rejection mode."""
    support_ids: torch.Tensor
    """[drafted_by_law, K] int64"""
    support_probs: torch.Tensor
    """[drafted_by_law, K]"""
    guesses: torch.Tensor
    """[blocks, most guesses of any] int64: what else the target may say; likeliest first"""


class Drawer:
    """Draws one token after another for blocks.

    Args:
        support: K, tokens kept of the draft's law in rejection mode.
        vocab_size: ids beyond it are padding.
    """

    def __init__(self, support: int, vocab_size: int) -> None:
        self._support = support
        self._vocab_size = vocab_size

    def draw(self, blocks: list[Block], logits: torch.Tensor) -> Step:
        """One token per block from its row."""
        are_plain = all(block.session.is_plain for block in blocks)
        rows = [] if are_plain else [block.context for block in blocks]
        processed = process_logits(mask_padding(logits, self._vocab_size), rows)
        token_ids = best(processed)
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
        count = max(block.num_guesses_now for block in blocks)
        guesses = token_ids.new_empty(len(blocks), 0)
        if count:
            keys = [block.noise_key for block in blocks]
            guesses = self._guess(processed, rows, keys, count, but=token_ids)
        for block in blocks:
            block.num_drawn += 1
            block.position += 1
        return Step(blocks, token_ids, drafted_by_law, ids, law, guesses)

    def guess(
        self, logits: torch.Tensor, rows: Sequence[RowContext], keys: Sequence[Key], count: int
    ) -> torch.Tensor:
        """What the target is likeliest to say, by the draft's law and the noise the target draws with.

        Args:
            logits: [rows, >= vocab_size] raw logits of the draft.
            rows: their conditions.
            keys: (seed, position) of each.
            count: guesses per row.

        Returns:
            [rows, count] int64 distinct token ids, likeliest first.
        """
        return self._guess(process_logits(mask_padding(logits, self._vocab_size), rows), rows, keys, count)

    def _guess(
        self,
        processed: torch.Tensor,
        rows: Sequence[RowContext],
        keys: Sequence[Key],
        count: int,
        but: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `guess`, of processed logits; ``but`` is a token per row that it is not."""
        if but is not None:
            processed = processed.scatter(1, but.unsqueeze(1), -torch.inf)
        guesses = processed.topk(count, dim=-1).indices
        sampled = [i for i, row in enumerate(rows) if row.params.mode is not VerificationMode.GREEDY]
        if sampled:
            # A law may have had but one token: then any guess is as good.
            weights = torch.softmax(picked(processed, sampled), dim=-1).nan_to_num_(0.0).add_(TINY)
            sampled_keys = [keys[i] for i in sampled]
            drawn = _first_of_races(weights, sampled_keys, count)
            guesses = placed(guesses, sampled, drawn)
        return guesses

    def _draw_coupled(self, blocks: list[Block], logits: torch.Tensor) -> torch.Tensor:
        """The target's own draw if both laws were equal: same noise, whole law."""
        return draw(torch.softmax(logits, dim=-1), [block.noise_key for block in blocks], Purpose.TARGET)

    def _draw_from(self, blocks: list[Block], ids: torch.Tensor, law: torch.Tensor) -> torch.Tensor:
        keys = [block.noise_key for block in blocks]
        return draw_among(ids, law, keys, Purpose.DRAFT, self._vocab_size)


def _first_of_races(weights: torch.Tensor, keys: Sequence[Key], count: int) -> torch.Tensor:
    """[rows, count] the winner of each row's race, the next, and so on."""
    winners = []
    for _ in range(count):
        winners.append(draw(weights, keys, Purpose.TARGET))
        weights = weights.scatter(1, winners[-1].unsqueeze(1), 0.0)
    return torch.stack(winners, dim=1)


def look_at(steps: Sequence[Step]) -> None:
    """Tell the blocks what was drawn: the one place where the host waits for the device.

    Args:
        steps: at least one; each of some of the blocks of the one before.
    """
    drawn = iter(torch.cat([step.token_ids for step in steps]).tolist())
    for step in steps:
        token_ids = islice(drawn, len(step.blocks))
        # Without guesses there is nothing to wait for.
        guesses = step.guesses.tolist() if step.guesses.shape[1] else [()] * len(step.blocks)
        for block, token, others in zip(step.blocks, token_ids, guesses, strict=True):
            block.see(token, others)
    _look_at_laws([step for step in steps if step.drafted_by_law])
    for block in steps[0].blocks:
        block.end_at_stop()


def _look_at_laws(steps: Sequence[Step]) -> None:
    if not steps:
        return
    blocks = [block for step in steps for block in step.drafted_by_law]
    support_ids = torch.cat([step.support_ids for step in steps]).to(torch.int32).cpu().numpy()
    support_probs = torch.cat([step.support_probs for step in steps]).cpu().numpy()
    for block, ids, probs in zip(blocks, support_ids, support_probs, strict=True):
        block.support_ids.append(ids)
        block.support_probs.append(probs)
