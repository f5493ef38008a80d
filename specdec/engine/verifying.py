"""The target side of a round: one forward over all sequences, then judge every draft.

Prefill chunks ride in the same forward; they just ask for no rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specdec.engine.runner import Runner
from specdec.engine.sessions import Session, SessionTable
from specdec.messages import Draft, Lost, Verdict, VerifyReply, VerifyRequest
from specdec.sampling.noise import Purpose, exponential_rows
from specdec.sampling.processors import RowContext, mask_padding, process_logits
from specdec.sampling.verification import acceptance_ratios, race, residual_probs
from specdec.types import VerificationMode


@dataclass(frozen=True, slots=True, eq=False)
class _Case:
    """One sequence to judge: rows ``[start, start + gamma + 1)`` of the logits are its."""

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

    def verdict(self, token_ids: list[int], ratios: list[float]) -> Verdict:
        return Verdict(
            sequence_id=self.session.sequence_id,
            epoch=self.session.epoch,
            token_ids=tuple(token_ids[self.start : self.start + self.num_rows]),
            ratios=tuple(ratios),
        )


class TargetEngine:
    """Verifies drafts with the target model."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.sessions = SessionTable(runner)

    def verify(self, request: VerifyRequest) -> VerifyReply:
        """Apply every feed and judge every draft; sequences that cannot go on are reported as lost."""
        lost: list[Lost] = []
        items = []
        cases: list[_Case] = []
        num_rows = 0
        for item in request.items:
            session = self.sessions.prepare(request.owner, item.feed)
            if isinstance(session, Lost):
                lost.append(session)
                continue
            items.append(self.sessions.forward_item(session, item.feed.token_ids, item.num_rows))
            if item.num_rows:
                cases.append(_Case(session, item.draft, num_rows))
                num_rows += item.num_rows
        logits = self.runner.forward(items) if items else None
        verdicts = judge(logits, cases, self.runner.vocab_size) if logits is not None and cases else []
        return VerifyReply(verdicts=tuple(verdicts), lost=tuple(lost))


def judge(logits: torch.Tensor, cases: list[_Case], vocab_size: int) -> list[Verdict]:
    """Turn the target's rows into verdicts; rows of all sequences are worked on together.

    Args:
        logits: [sum of num_rows, >= vocab_size] raw logits.
        cases: whose rows they are, in order.
        vocab_size: ids beyond it are padding.
    """
    contexts = [context for case in cases for context in case.contexts()]
    processed = process_logits(mask_padding(logits, vocab_size), contexts)
    # Greedy choices for every row; sampled rows are overwritten below.
    token_ids = processed.argmax(dim=-1)
    ratios: dict[int, list[float]] = {}
    sampled = [case for case in cases if case.mode is not VerificationMode.GREEDY]
    if sampled:
        _judge_sampled(processed, sampled, token_ids, ratios)
    chosen = token_ids.tolist()
    return [case.verdict(chosen, ratios.get(case.start, [])) for case in cases]


def _judge_sampled(
    processed: torch.Tensor, cases: list[_Case], token_ids: torch.Tensor, ratios: dict[int, list[float]]
) -> None:
    """Fill in the draws of coupled and rejection rows: from the target's law, or from the residual."""
    device = processed.device
    rows = [row for case in cases for row in range(case.start, case.start + case.num_rows)]
    probs = torch.softmax(processed[rows], dim=-1)
    row_of = {row: i for i, row in enumerate(rows)}
    weights = probs.clone()
    for case in cases:
        if case.mode is VerificationMode.REJECTION and case.draft_ids:
            first = row_of[case.start]
            span = slice(first, first + len(case.draft_ids))
            ratios[case.start], weights[span] = _compare(probs[span], case, device)
    keys = [key for case in cases for key in case.noise_keys()]
    noise = torch.from_numpy(exponential_rows(keys, Purpose.TARGET, probs.shape[-1])).to(device)
    token_ids[rows] = race(weights, noise)


def _compare(probs: torch.Tensor, case: _Case, device: torch.device) -> tuple[list[float], torch.Tensor]:
    """Acceptance ratios [gamma] and residual distributions [gamma, vocab] of one draft."""
    assert case.draft is not None
    assert case.draft.support_ids is not None
    assert case.draft.support_probs is not None
    support_ids = torch.tensor(case.draft.support_ids, dtype=torch.long, device=device)
    support_probs = torch.tensor(case.draft.support_probs, device=device)
    draft_ids = torch.tensor(case.draft_ids, dtype=torch.long, device=device)
    ratios = acceptance_ratios(probs, draft_ids, support_ids, support_probs)
    return ratios.tolist(), residual_probs(probs, support_ids, support_probs)
