"""The target side of a round: one forward over all sequences, then judge every draft.

Prefill chunks ride in the same forward; they ask for no rows, unless the prompt's own log-probabilities are
wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from specdec.engine.grammar import Grammars
from specdec.engine.runner import Runner
from specdec.engine.sessions import Session, SessionTable, Wish
from specdec.messages import Draft, Lost, Scores, Verdict, VerifyReply, VerifyRequest
from specdec.sampling.drawing import best, draw
from specdec.sampling.logprobs import row_logprobs
from specdec.sampling.noise import Purpose
from specdec.sampling.processors import mask_padding, process_logits
from specdec.sampling.rows import RowContext
from specdec.sampling.transfer import index_of, picked, placed, to_device
from specdec.sampling.verification import acceptance_ratios, residual_weights
from specdec.types import VerificationMode


@dataclass(frozen=True, slots=True, eq=False)
class _Scored:
    """Prompt tokens of one sequence: rows ``[start, start + len(token_ids))`` of the logits predict them."""

    session: Session
    token_ids: tuple[int, ...]
    start: int

    def scores(self, logits: torch.Tensor) -> Scores:
        rows = logits[self.start : self.start + len(self.token_ids)]
        num_top = self.session.opening.num_logprobs or 0
        return Scores(
            sequence_id=self.session.sequence_id,
            epoch=self.session.epoch,
            logprobs=row_logprobs(rows, self.token_ids, (), num_top),
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Case:
    """One sequence to judge: rows ``[start, start + gamma + 1)`` of those to judge are its."""

    session: Session
    draft: Draft | None
    start: int

    @property
    def mode(self) -> VerificationMode:
        return self.session.opening.sampling.mode

    @property
    def draft_ids(self) -> tuple[int, ...]:
        return self.draft.token_ids if self.draft else ()

    @property
    def num_rows(self) -> int:
        return len(self.draft_ids) + 1

    @property
    def first_position(self) -> int:
        """Position of the token the first row predicts."""
        return len(self.session.token_ids) - len(self.draft_ids)

    def contexts(self) -> list[RowContext]:
        return [self.session.context(self.first_position + i) for i in range(self.num_rows)]

    def noise_keys(self) -> list[tuple[int, int]]:
        seed = self.session.opening.sampling.seed
        return [(seed, self.first_position + i) for i in range(self.num_rows)]

    def verdict(self, token_ids: list[int], ratios: list[float], logits: torch.Tensor) -> Verdict:
        """Of all rows' chosen tokens take this case's; ``logits`` are all rows' raw ones."""
        rows = slice(self.start, self.start + self.num_rows)
        chosen, num_top = tuple(token_ids[rows]), self.session.opening.num_logprobs
        return Verdict(
            sequence_id=self.session.sequence_id,
            epoch=self.session.epoch,
            token_ids=chosen,
            ratios=tuple(ratios),
            logprobs=None if num_top is None else row_logprobs(logits[rows], chosen, self.draft_ids, num_top),
        )


class TargetEngine:
    """Verifies drafts with the target model.

    Args:
        runner: the target model.
        grammars: for sequences that have one; without, such sequences fail.
    """

    def __init__(self, runner: Runner, grammars: Grammars | None = None) -> None:
        self.runner = runner
        self.sessions = SessionTable(runner, grammars=grammars)

    def verify(self, request: VerifyRequest) -> VerifyReply:
        """Apply every feed and judge every draft; sequences that cannot go on are reported as lost."""
        outcomes = self.sessions.prepare(
            request.owner, [Wish(feed=item.feed, num_rows=item.num_rows) for item in request.items]
        )
        fed = []
        cases: list[_Case] = []
        scored: list[_Scored] = []
        judged: list[int] = []
        num_rows = 0
        for item, outcome in zip(request.items, outcomes, strict=True):
            if isinstance(outcome, Session):
                fed.append(outcome.forward_item(item.feed.token_ids, item.num_rows))
                if item.scored_ids:
                    scored.append(_Scored(outcome, item.scored_ids, num_rows))
                elif item.num_rows:
                    cases.append(_Case(outcome, item.draft, len(judged)))
                    judged += range(num_rows, num_rows + item.num_rows)
                num_rows += item.num_rows
        verdicts: list[Verdict] = []
        scores: list[Scores] = []
        if fed:
            logits = mask_padding(self.runner.forward(fed), self.runner.vocab_size)
            if cases:
                verdicts = judge(picked(logits, judged) if scored else logits, cases, self.runner.wait)
            self.runner.wait()
            scores = [item.scores(logits) for item in scored]
        return VerifyReply(
            verdicts=tuple(verdicts),
            scores=tuple(scores),
            lost=tuple(outcome for outcome in outcomes if isinstance(outcome, Lost)),
            kv_free_tokens=self.runner.kv_capacity_tokens - self.runner.kv_tokens_in_use,
        )


def judge(logits: torch.Tensor, cases: list[_Case], wait: Callable[[], None]) -> list[Verdict]:
    """Turn the target's rows into verdicts; rows of all sequences are worked on together.

    Args:
        logits: [sum of num_rows, vocab] raw logits without padding.
        cases: whose rows they are, in order.
        wait: called when all is asked of the device, before its answers are looked at.
    """
    are_plain = all(case.session.is_plain for case in cases)
    contexts = [] if are_plain else [context for case in cases for context in case.contexts()]
    processed = process_logits(logits, contexts)
    sampled = [case for case in cases if case.mode is not VerificationMode.GREEDY]
    if len(sampled) < len(cases):
        token_ids = best(processed)  # greedy choices for every row; sampled rows are overwritten
    else:
        token_ids = torch.empty(len(processed), dtype=torch.int64, device=processed.device)
    ratios: dict[int, list[float]] = {}
    if sampled:
        token_ids = _judge_sampled(processed, sampled, token_ids, ratios)
    wait()
    chosen = token_ids.tolist()
    return [case.verdict(chosen, ratios.get(case.start, []), logits) for case in cases]


def _judge_sampled(
    processed: torch.Tensor, cases: list[_Case], token_ids: torch.Tensor, ratios: dict[int, list[float]]
) -> torch.Tensor:
    """``token_ids`` with the draws of coupled and rejection rows: from the target's law, or the residual."""
    rows = [row for case in cases for row in range(case.start, case.start + case.num_rows)]
    probs = torch.softmax(picked(processed, rows), dim=-1)
    drafted = [case for case in cases if case.mode is VerificationMode.REJECTION and case.draft_ids]
    weights = _compare(probs, rows, drafted, ratios) if drafted else probs
    keys = [key for case in cases for key in case.noise_keys()]
    return placed(token_ids, rows, draw(weights, keys, Purpose.TARGET))


def _compare(
    probs: torch.Tensor, rows: list[int], cases: list[_Case], ratios: dict[int, list[float]]
) -> torch.Tensor:
    """Note the acceptance ratios of drafts, and put the residual distributions in place of their rows.

    Args:
        probs: [rows, vocab] the target's law, overwritten.
        rows: which rows of the logits these are.
        cases: with drafts of rejection mode; the supports of all have the same width.
        ratios: by ``case.start``, added to.

    Returns:
        [rows, vocab] what to draw from.
    """
    idx_of = {row: idx for idx, row in enumerate(rows)}
    spans = [range(idx_of[case.start], idx_of[case.start] + len(case.draft_ids)) for case in cases]
    compared = index_of([idx for span in spans for idx in span], probs.device)
    drafts = [case.draft for case in cases if case.draft is not None]
    support_ids, support_probs = _supports(drafts, probs.device)
    draft_ids = index_of([token for draft in drafts for token in draft.token_ids], probs.device)
    target_probs = probs[compared]
    found = acceptance_ratios(target_probs, draft_ids, support_ids, support_probs).tolist()
    for case in cases:
        ratios[case.start], found = found[: len(case.draft_ids)], found[len(case.draft_ids) :]
    return probs.index_copy_(0, compared, residual_weights(target_probs, support_ids, support_probs))


def _supports(drafts: list[Draft], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Of all drafted positions below each other: ids [positions, K] int64, and their draft_probs."""
    ids = [draft.support_ids for draft in drafts if draft.support_ids is not None]
    draft_probs = [draft.support_probs for draft in drafts if draft.support_probs is not None]
    assert len(ids) == len(draft_probs) == len(drafts)
    return (
        to_device(torch.from_numpy(np.concatenate(ids).astype(np.int64)), device),
        to_device(torch.from_numpy(np.concatenate(draft_probs)), device),
    )
