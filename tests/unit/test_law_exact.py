"""The theorem of speculative decoding, exactly: no sampling, every draft block and every outcome enumerated.

The law of what one round emits, completed by the target's own law where the round stopped early, is the
target's law, whatever the draft. The production functions (processors, truncation, ratios, residual, accept
rule) make the round; the references of `tests.laws` make the law it must have.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pytest
import torch

from specdec.engine.simulated import ToyLaw
from specdec.sampling.drawing import exponential_rows
from specdec.sampling.noise import Purpose
from specdec.sampling.processors import mask_padding, process_logits, target_law
from specdec.sampling.rows import RowContext
from specdec.sampling.verification import acceptance_ratios, race, residual_probs, truncate_support
from specdec.speculation.acceptance import count_accepted
from specdec.types import SamplingParams, VerificationMode
from tests.laws import (
    KINDS,
    MIN_P_VALUE,
    Float64Array,
    chi_square_p_value,
    conditional_levels,
    count_tuples,
    race_joint_law,
    tail_laws,
    toy_law,
    toy_next_token_law,
)

TOLERANCE = 1e-10
PROMPT = (1, 0, 1)
ALL_OF_IT = 64
NUM_PADDED = 3


@dataclass(frozen=True)
class Outcome:
    """One way a round can go: accepted draft tokens and the token behind them."""

    token_ids: tuple[int, ...]
    prob: float


@dataclass(frozen=True)
class Round:
    """One round of gamma draft tokens behind `PROMPT`, rows made by the production processors."""

    target: ToyLaw
    draft: ToyLaw
    gamma: int
    params: SamplingParams
    support: int = ALL_OF_IT
    stop_token_ids: frozenset[int] = frozenset()

    @property
    def vocab_size(self) -> int:
        return self.target.vocab_size

    def prefixes(self, num_tokens: int) -> Iterator[tuple[int, ...]]:
        return itertools.product(range(self.vocab_size), repeat=num_tokens)

    def processed(self, law: ToyLaw, num_drafted: int) -> torch.Tensor:
        """Processed logits behind every prefix of drafted tokens, [vocab ** num_drafted, vocab]."""
        tokens_to_come = (0,) * (self.gamma - num_drafted)
        contexts = [
            RowContext(
                params=self.params,
                token_ids=[*PROMPT, *prefix, *tokens_to_come],
                prompt_len=len(PROMPT),
                length=len(PROMPT) + num_drafted,
                stop_token_ids=self.stop_token_ids,
            )
            for prefix in self.prefixes(num_drafted)
        ]
        rows = torch.stack([law.row([*PROMPT, *prefix]) for prefix in self.prefixes(num_drafted)])
        padded = torch.nn.functional.pad(rows, (0, NUM_PADDED), value=1e4)
        return process_logits(mask_padding(padded, self.vocab_size), contexts)

    @cached_property
    def target_probs(self) -> list[torch.Tensor]:
        return [torch.softmax(self.processed(self.target, i), dim=-1) for i in range(self.gamma + 1)]

    @cached_property
    def supports(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Ids and probabilities the draft draws from, per number of drafted tokens."""
        return [
            truncate_support(torch.softmax(self.processed(self.draft, i), dim=-1), self.support)
            for i in range(self.gamma)
        ]

    @cached_property
    def draft_probs(self) -> list[torch.Tensor]:
        return [
            torch.zeros(ids.shape[0], self.vocab_size, dtype=probs.dtype).scatter(1, ids, probs)
            for ids, probs in self.supports
        ]

    def row(self, prefix: tuple[int, ...]) -> int:
        """Where the rows of a prefix stand."""
        return int(np.ravel_multi_index(prefix, (self.vocab_size,) * len(prefix))) if prefix else 0

    # The three modes ----------------------------------------------------------------------------------

    def outcomes(self) -> Iterator[Outcome]:
        match self.params.mode:
            case VerificationMode.GREEDY:
                return self.greedy_outcomes()
            case VerificationMode.REJECTION:
                return self.rejection_outcomes()
            case VerificationMode.COUPLED:
                return self.coupled_outcomes()

    def greedy_outcomes(self) -> Iterator[Outcome]:
        block: tuple[int, ...] = ()
        for _ in range(self.gamma):
            block += (int(self.processed(self.draft, len(block))[self.row(block)].argmax()),)
        chosen = [
            int(self.processed(self.target, i)[self.row(block[:i])].argmax()) for i in range(self.gamma + 1)
        ]
        num_accepted = count_accepted(self.params.mode, block, chosen, (), ())
        yield Outcome((*block[:num_accepted], chosen[num_accepted]), 1.0)

    def rejection_outcomes(self) -> Iterator[Outcome]:
        for block in self.prefixes(self.gamma):
            block_prob = self._block_prob(block)
            if block_prob == 0.0:
                continue
            ratios = [self._ratios[i][self.row(block[: i + 1])] for i in range(self.gamma)]
            for uniforms, cell_prob in _uniform_cells(ratios):
                num_accepted = count_accepted(
                    self.params.mode, block, (0,) * (self.gamma + 1), ratios, uniforms
                )
                row = self.row(block[:num_accepted])
                is_full = num_accepted == self.gamma
                law = (self.target_probs if is_full else self._residuals)[num_accepted][row].tolist()
                for token, prob in enumerate(law):
                    yield Outcome((*block[:num_accepted], token), block_prob * cell_prob * prob)

    def _block_prob(self, block: tuple[int, ...]) -> float:
        factors = [self.draft_probs[i][self.row(block[:i]), token].item() for i, token in enumerate(block)]
        return float(np.prod(factors))

    @cached_property
    def _ratios(self) -> list[list[float]]:
        """Acceptance ratios of every drafted prefix, [vocab ** (i + 1)] per position i."""
        ratios = []
        for probs, (ids, support_probs) in zip(self.target_probs, self.supports, strict=False):
            drafted = torch.arange(self.vocab_size).repeat(probs.shape[0])
            of_row = torch.arange(probs.shape[0]).repeat_interleave(self.vocab_size)
            ratios.append(
                acceptance_ratios(probs[of_row], drafted, ids[of_row], support_probs[of_row]).tolist()
            )
        return ratios

    @cached_property
    def _residuals(self) -> list[torch.Tensor]:
        return [
            residual_probs(probs, ids, support_probs)
            for probs, (ids, support_probs) in zip(self.target_probs, self.supports, strict=False)
        ]

    def coupled_outcomes(self) -> Iterator[Outcome]:
        for block, chosen, prob in self._races((), (), 1.0):
            num_accepted = count_accepted(self.params.mode, block, chosen, (), ())
            yield Outcome((*block[:num_accepted], chosen[num_accepted]), prob)

    def _races(
        self, block: tuple[int, ...], chosen: tuple[int, ...], prob: float
    ) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], float]]:
        """Draft block and target choices with their probability; noise is fresh at every position."""
        row = self.row(block)
        if len(block) == self.gamma:
            for token, bonus_prob in enumerate(self.target_probs[-1][row].tolist()):
                yield block, (*chosen, token), prob * bonus_prob
            return
        joint = race_joint_law(
            self.draft_probs[len(block)][row].numpy(), self.target_probs[len(block)][row].numpy()
        )
        for drafted, token in zip(*np.nonzero(joint), strict=True):
            drafted_block, chosen_tokens = (*block, int(drafted)), (*chosen, int(token))
            pair_prob = prob * float(joint[drafted, token])
            if drafted == token:
                yield from self._races(drafted_block, chosen_tokens, pair_prob)
            else:
                # Whatever follows a mismatch is thrown away: any tokens stand for all of them.
                num_more = self.gamma - len(drafted_block)
                yield drafted_block + (0,) * num_more, chosen_tokens + (0,) * (num_more + 1), pair_prob

    # The law ------------------------------------------------------------------------------------------

    def reference_levels(self) -> list[Float64Array]:
        law = toy_next_token_law(self.target, self.params, PROMPT, self.stop_token_ids)
        return conditional_levels(law, self.vocab_size, self.gamma + 1)

    def law(self, tails: list[Float64Array]) -> Float64Array:
        """Joint law of gamma + 1 tokens: what the round emits, then the target's own."""
        law = np.zeros((self.vocab_size,) * (self.gamma + 1))
        for outcome in self.outcomes():
            num_tokens = len(outcome.token_ids)
            law[outcome.token_ids] += outcome.prob * tails[num_tokens][outcome.token_ids]
        return law


def _uniform_cells(ratios: list[float]) -> Iterator[tuple[list[float], float]]:
    """Cut the unit cube of uniforms where the accept rule changes; one point per cell, and its volume.

    The points are the hardest ones: the largest draw below each ratio, and the ratio itself.
    """
    cells = []
    for ratio in ratios:
        edge = min(1.0, ratio)
        sides = [(float(np.nextafter(edge, 0.0)), edge), (edge, 1.0 - edge)]
        cells.append([(u, width) for u, width in sides if width > 0.0])
    for choice in itertools.product(*cells):
        yield [u for u, _ in choice], float(np.prod([width for _, width in choice]))


def assert_round_has_the_targets_law(round_: Round) -> None:
    tails = tail_laws(round_.reference_levels())
    law = round_.law(tails)
    np.testing.assert_allclose(law, tails[0], rtol=0.0, atol=TOLERANCE)
    assert law[tails[0] == 0.0].sum() == 0.0, "a block of probability 0 was emitted"


SHAPES = ((3, 2), (6, 1))
"""(vocabulary, gamma) for every pair of laws; others are below."""


@pytest.mark.parametrize("mode", list(VerificationMode))
@pytest.mark.parametrize("kinds", list(itertools.product(KINDS, KINDS)), ids=" and ".join)
def test_one_round_has_the_targets_law_for_any_pair_of_laws(mode, kinds):
    target_kind, draft_kind = kinds
    seed = KINDS.index(target_kind) * len(KINDS) + KINDS.index(draft_kind)
    for vocab_size, gamma in SHAPES:
        target = toy_law(target_kind, vocab_size, seed)
        draft = toy_law(draft_kind, vocab_size, seed + 1000)
        assert_round_has_the_targets_law(Round(target, draft, gamma, SamplingParams(mode=mode)))


@pytest.mark.parametrize("mode", list(VerificationMode))
@pytest.mark.parametrize(
    ("vocab_size", "gamma"), [(8, 3), (5, 3), (4, 3), (3, 3), (2, 3), (8, 2), (8, 1), (8, 0)]
)
def test_one_round_has_the_targets_law_for_blocks_of_up_to_three(mode, vocab_size, gamma):
    target, draft = toy_law("normal", vocab_size, 5), toy_law("holes", vocab_size, 6)
    assert_round_has_the_targets_law(Round(target, draft, gamma, SamplingParams(mode=mode)))


@pytest.mark.parametrize("mode", list(VerificationMode))
@pytest.mark.parametrize("support", [1, 2, 3, 5])
def test_truncating_the_drafts_support_leaves_the_law(mode, support):
    target, draft = toy_law("normal", 5, 7), toy_law("peaky", 5, 8)
    assert_round_has_the_targets_law(Round(target, draft, 2, SamplingParams(mode=mode), support))


@pytest.mark.parametrize("mode", list(VerificationMode))
def test_a_draft_with_the_targets_law_is_always_accepted(mode):
    law = toy_law("holes", 5, 9)
    round_ = Round(law, law, 3, SamplingParams(mode=mode))
    lengths = {len(outcome.token_ids) for outcome in round_.outcomes() if outcome.prob > 1e-12}
    assert lengths == {4}
    assert_round_has_the_targets_law(round_)


@pytest.mark.parametrize("mode", list(VerificationMode))
def test_a_draft_with_disjoint_support_is_never_accepted(mode):
    round_ = Round(toy_law("low half", 6, 1), toy_law("high half", 6, 2), 3, SamplingParams(mode=mode))
    lengths = {len(outcome.token_ids) for outcome in round_.outcomes() if outcome.prob > 0.0}
    assert lengths == {1}


PROCESSED = {
    "cold": {"temperature": 0.4},
    "hot": {"temperature": 1.7},
    "almost greedy": {"temperature": 2e-5},
    "top-k": {"top_k": 2},
    "top-p": {"top_p": 0.6},
    "min-p": {"min_p": 0.3},
    "bias": {"logit_bias": ((0, 1.5), (2, -100.0), (1, -0.5))},
    "presence": {"presence_penalty": 1.2},
    "frequency": {"frequency_penalty": 0.9},
    "negative frequency": {"frequency_penalty": -0.9},
    "repetition": {"repetition_penalty": 1.8},
    "encouraged repetition": {"repetition_penalty": 0.6},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.8, "repetition_penalty": 1.3},
    "bad words": {"bad_words": ((0,), (1, 2), (2, 2, 3))},
    "truncations": {"temperature": 1.3, "top_k": 3, "top_p": 0.8, "min_p": 0.2},
    "everything": {
        "temperature": 0.7,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.05,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.6,
        "repetition_penalty": 1.2,
        "logit_bias": ((1, 0.8), (3, -100.0)),
        "bad_words": ((2, 1), (0, 0)),
    },
}


@pytest.mark.parametrize("mode", list(VerificationMode))
@pytest.mark.parametrize("fields", PROCESSED.values(), ids=PROCESSED)
def test_one_round_has_the_processed_targets_law(mode, fields):
    params = SamplingParams(mode=mode, **fields)
    for seed, target_kind, draft_kind in ((1, "normal", "normal"), (2, "holes", "peaky")):
        target, draft = toy_law(target_kind, 4, seed), toy_law(draft_kind, 4, seed + 100)
        assert_round_has_the_targets_law(Round(target, draft, 3, params, support=3))


@pytest.mark.parametrize("mode", list(VerificationMode))
@pytest.mark.parametrize("min_tokens", [1, 2, 3])
def test_stops_become_possible_within_a_block(mode, min_tokens):
    """Rows of one block stand at different lengths of the output."""
    params = SamplingParams(mode=mode, min_tokens=min_tokens)
    target, draft = toy_law("normal", 4, 11), toy_law("holes", 4, 12)
    stops = frozenset({1, 3})
    round_ = Round(target, draft, 3, params, stop_token_ids=stops)
    assert_round_has_the_targets_law(round_)
    for num_before, probs in enumerate(round_.target_probs):
        assert (probs[:, [1, 3]].sum() == 0.0) == (num_before < min_tokens)


def test_penalties_see_the_tokens_drafted_before_in_the_same_block():
    """Without the draft prefix in the history the law of the second token would be another one."""
    params = SamplingParams(frequency_penalty=2.0)
    flat = toy_law("flat", 4, 3)
    round_ = Round(flat, flat, 1, params)
    for drafted, law in enumerate(round_.target_probs[1].tolist()):
        repeated = law[drafted]
        assert repeated == pytest.approx(np.exp(-2) / (3 + np.exp(-2)), rel=0.01)


# The closed form of the coupled law -------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", list(itertools.product(KINDS, KINDS)), ids=" and ".join)
def test_joint_law_of_coupled_races_has_both_laws_as_marginals(kinds):
    for vocab_size in (2, 5, 8):
        draft, target = (
            torch.softmax(toy_law(kind, vocab_size, seed).row([0, 1]), dim=-1).numpy()
            for seed, kind in enumerate(kinds)
        )
        joint = race_joint_law(draft, target)
        np.testing.assert_allclose(joint.sum(axis=1), draft, rtol=0.0, atol=1e-12)
        np.testing.assert_allclose(joint.sum(axis=0), target, rtol=0.0, atol=1e-12)


@pytest.mark.parametrize(
    "kinds", [("normal", "normal"), ("peaky", "flat"), ("holes", "peaky")], ids=" and ".join
)
def test_races_with_shared_noise_follow_the_joint_law(kinds):
    vocab_size, num_draws = 5, 30_000
    draft, target = (
        torch.softmax(toy_law(kind, vocab_size, seed).row([1, 2]), dim=-1)
        for seed, kind in enumerate(kinds, start=60)
    )
    noise = exponential_rows([(seed, 7) for seed in range(num_draws)], Purpose.TARGET, vocab_size)
    winners = torch.stack([race(law.expand(num_draws, -1), noise) for law in (draft, target)], dim=1)
    counts = count_tuples(winners.tolist(), vocab_size, 2)
    p_value = chi_square_p_value(counts, race_joint_law(draft.numpy(), target.numpy()))
    print(f"joint law of coupled races, {' and '.join(kinds)}: p = {p_value:.3g}")
    assert p_value > MIN_P_VALUE


def test_target_law_is_the_softmax_of_processed_logits():
    logits = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(top_k=2, temperature=0.5)
    rows = [RowContext(params=params, token_ids=[0], prompt_len=1, length=1)] * 3
    torch.testing.assert_close(target_law(logits, rows), torch.softmax(process_logits(logits, rows), dim=-1))
