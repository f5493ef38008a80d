"""Draft and target laws whose acceptance rate is a setting, for simulated devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from specdec.config import SimulationConfig
from specdec.engine.simulated import SimulatedRunner, ToyLaw

NUM_CONTEXTS = 4096
"""Rows of a law's table: many more than a run visits often, and few megabytes."""
_RANKS = (1, 2, 9)
"""Which of the draft's choices the target's token is where it is not the first, counted from 0."""
_RANK_SHARES = (0.6, 0.2, 0.2)
_SCALE = 4.0
"""Standard deviation of a sampled law's logits: the likeliest of 1,000 tokens has 0.45 then, and the 64 that
a draft's law is cut to have nearly all."""


def make_pair(
    kind: Literal["greedy", "sampled"], acceptance_rate: float, vocab_size: int, seed: int
) -> tuple[ToyLaw, ToyLaw]:
    """Target and draft.

    Args:
        kind: of `greedy_pair` or `sampled_pair`.
        acceptance_rate: alpha, in [0, 1].
        vocab_size: at least 10 tokens.
        seed: of both laws.
    """
    make = greedy_pair if kind == "greedy" else sampled_pair
    return make(acceptance_rate, vocab_size, seed)


def greedy_pair(acceptance_rate: float, vocab_size: int, seed: int = 0) -> tuple[ToyLaw, ToyLaw]:
    """Laws whose greedy choices agree with a probability of ``acceptance_rate``, independently everywhere.

    Elsewhere the target's token is the draft's second choice (60 %), its third (20 %) or another one (20 %).
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(NUM_CONTEXTS, vocab_size, generator=generator).argsort(dim=-1)
    draft = torch.empty(NUM_CONTEXTS, vocab_size)
    draft.scatter_(1, order, torch.arange(vocab_size, 0, -1.0).expand(NUM_CONTEXTS, -1).contiguous())
    num_pairs = vocab_size**2
    luck = torch.rand(num_pairs, generator=generator)
    missed = torch.multinomial(torch.tensor(_RANK_SHARES), num_pairs, replacement=True, generator=generator)
    ranks = torch.where(luck < acceptance_rate, 0, torch.tensor(_RANKS)[missed])
    return _RankedLaw(draft, order, ranks), ToyLaw(draft)


class _RankedLaw(ToyLaw):
    """A greedy target: behind each pair of tokens the draft's choice of a given rank.

    Ranks are kept for every pair and not for every row: greedy text is a walk on the pairs, which would come
    round to where it was before long, and with few places a walk sees an acceptance rate of its own.

    Args:
        logits: the draft's, [contexts, vocab].
        order: [contexts, vocab] int64, the draft's choices from the best on.
        ranks: [vocab * vocab] int64 by pair.
    """

    def __init__(self, logits: torch.Tensor, order: torch.Tensor, ranks: torch.Tensor) -> None:
        super().__init__(logits)
        self._order, self._ranks = order, ranks

    def rows(self, contexts: Sequence[tuple[int, int]]) -> torch.Tensor:
        """See `ToyLaw.rows`."""
        rows, pairs = super().rows(contexts), self.pair_numbers(contexts)
        chosen = self._order[pairs % len(self._order), self._ranks[pairs]]
        return rows.scatter_(1, chosen.unsqueeze(1), float(2 * self.vocab_size))


def sampled_pair(acceptance_rate: float, vocab_size: int, seed: int = 0) -> tuple[ToyLaw, ToyLaw]:
    """Smooth laws, softmax of normal logits, whose mean overlap is ``acceptance_rate``.

    The overlap is the sum of the smaller ones of both probabilities of each token. The draft's logits are the
    target's plus noise, whose size is found by bisection: the overlap falls with it.
    """
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(NUM_CONTEXTS, vocab_size, generator=generator) * _SCALE
    noise = torch.randn(NUM_CONTEXTS, vocab_size, generator=generator)
    low, high = 0.0, 64.0
    sample = slice(0, 256)
    for _ in range(40):
        middle = (low + high) / 2
        if _overlap(target[sample], target[sample] + middle * noise[sample]) > acceptance_rate:
            low = middle
        else:
            high = middle
    return ToyLaw(target), ToyLaw(target + low * noise)


def _overlap(target: torch.Tensor, draft: torch.Tensor) -> float:
    """Mean probability that a token drafted from one law is accepted by the other (Leviathan et al. 2023)."""
    return float(torch.minimum(target.softmax(-1), draft.softmax(-1)).sum(-1).mean())


def make_runner(
    simulation: SimulationConfig, role: Literal["target", "draft"], *, kv_capacity_tokens: int
) -> SimulatedRunner:
    """One side of a simulated pair, whose device takes as long as it is to, and runs ahead as a GPU does."""
    laws = make_pair(simulation.law, simulation.acceptance_rate, simulation.vocab_size, simulation.seed)
    times = simulation.target if role == "target" else simulation.draft
    return SimulatedRunner(
        laws[0] if role == "target" else laws[1],
        max_context=simulation.max_context,
        kv_capacity_tokens=kv_capacity_tokens,
        latency=times.of,
        runs_ahead=True,
    )
