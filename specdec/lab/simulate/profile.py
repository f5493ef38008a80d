"""A draft whose acceptance depends on the place of a token in its block, as measured ones' does."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from specdec.engine.runner import ForwardItem
from specdec.engine.simulated import ToyLaw
from specdec.engine.simulated_pair import make_pair
from specdec.lab.simulate.devices import Device, DeviceRunner
from specdec.lab.simulate.scenario import Scenario
from specdec.types import SequenceId

_RANKS = (1, 2, 9)
"""Which of the draft's choices the target's token is where it is not the first, counted from 0,"""
_RANK_SHARES = (0.6, 0.2, 0.2)
"""and how often: as in `specdec.engine.simulated_pair.greedy_pair`."""


def profiled_target(vocab_size: int, seed: int) -> ToyLaw:
    """The target's law, which the draft knows."""
    return make_pair("greedy", 1.0, vocab_size, seed)[0]


class ProfiledRunner(DeviceRunner):
    """The target's own law, spoilt as often as the profile says.

    How far a block has come is told by what happens to its cache: each block begins with a rollback, an
    opened sequence or a fork, and every token drafted behind it is one forward further. Whether a token is
    spoilt depends on its context and its place in the block alone, so a block that is prepared is the one
    that would have been drafted.
    """

    def __init__(self, law: ToyLaw, device: Device, scenario: Scenario) -> None:
        super().__init__(law, device, scenario.draft, scenario)
        self._profile = scenario.profile
        self._seed = scenario.seed
        self._depth: dict[SequenceId, int] = {}
        """Tokens drawn since the block's beginning."""

    def open(self, sequence_id: SequenceId) -> None:
        super().open(sequence_id)
        self._depth[sequence_id] = 0

    def close(self, sequence_id: SequenceId) -> None:
        super().close(sequence_id)
        self._depth.pop(sequence_id, None)

    def rename(self, sequence_id: SequenceId, new_id: SequenceId) -> None:
        super().rename(sequence_id, new_id)
        self._depth[new_id] = self._depth.pop(sequence_id)

    def truncate(self, sequence_id: SequenceId, length: int) -> None:
        super().truncate(sequence_id, length)
        self._depth[sequence_id] = 0

    def forward(
        self, items: Sequence[ForwardItem], device_token_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `Runner.forward`."""
        rows = super().forward(items, device_token_ids)
        idx = 0
        for item in items:
            for _ in range(item.num_rows):
                rows[idx] = self._spoilt(item.sequence_id, rows[idx])
                idx += 1
        return rows

    def _spoilt(self, sequence_id: SequenceId, row: torch.Tensor) -> torch.Tensor:
        depth = self._depth[sequence_id]
        self._depth[sequence_id] = depth + 1
        tokens = self._tokens[sequence_id]
        luck = random.Random(f"{self._seed} {len(tokens)} {tokens[-2:]} {depth}")
        if luck.random() < self._profile[min(depth, len(self._profile) - 1)]:
            return row
        return _demoted(row, luck.choices(_RANKS, _RANK_SHARES)[0])


def _demoted(row: torch.Tensor, rank: int) -> torch.Tensor:
    """[vocab] the same logits with the likeliest token behind ``rank`` others."""
    best = row.topk(rank + 2)
    demoted = row.clone()
    demoted[best.indices[0]] = (best.values[rank] + best.values[rank + 1]) / 2
    return demoted
