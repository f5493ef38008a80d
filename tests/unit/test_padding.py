"""Padded embedding rows: ids no tokenizer knows are never emitted, even where the model likes them best."""

from __future__ import annotations

import pytest
import torch

from specdec.config import AppConfig, DraftConfig, ModelConfig, SpeculationConfig
from specdec.coordinator.local import run_local
from specdec.engine.runner import ForwardItem
from specdec.engine.simulated import SimulatedRunner, ToyLaw
from specdec.types import GenerationRequest, SamplingParams, SequenceId, StopCriteria, VerificationMode

VOCAB_SIZE = 11


class PaddedRunner(SimulatedRunner):
    """Rows are wider than the vocabulary, and the padding has the highest logits."""

    def __init__(self, law: ToyLaw, num_padded: int) -> None:
        super().__init__(law)
        self._num_padded = num_padded

    def forward(self, items: list[ForwardItem]) -> torch.Tensor:
        logits = super().forward(items)
        return torch.cat([logits, torch.full((len(logits), self._num_padded), 1e4)], dim=1)


@pytest.mark.parametrize("mode", list(VerificationMode))
async def test_padded_ids_are_never_emitted_and_change_no_text(mode: VerificationMode) -> None:
    law = ToyLaw.random(VOCAB_SIZE, seed=3, scale=1.5)
    draft_law = law.perturbed(seed=4, scale=0.5)
    config = AppConfig(
        target=ModelConfig(model="t"),
        draft=DraftConfig(model="d"),
        # In rejection mode the length of a block decides which noise is used, and left to itself it follows
        # measured times; a block that is drafted ahead is as long as it got.
        speculation=SpeculationConfig(num_speculative_tokens=2, pipeline="serial"),
    )
    texts = []
    for target, draft in (
        (SimulatedRunner(law), SimulatedRunner(draft_law)),
        (PaddedRunner(law, 5), PaddedRunner(draft_law, 2)),
        (SimulatedRunner(law), PaddedRunner(draft_law, 7)),
    ):
        async with run_local(config, target, draft) as system:
            ids: list[int] = []
            request = GenerationRequest(
                sequence_id=SequenceId("s"),
                prompt_ids=(1, 2),
                sampling=SamplingParams(seed=9, mode=mode),
                stop=StopCriteria(max_tokens=80),
            )
            async for chunk in system.client.generate(request):
                ids += chunk.token_ids
            assert system.coordinator.status().num_accepted_draft_tokens > 0
        assert max(ids) < VOCAB_SIZE
        texts.append(ids)
    assert texts[0] == texts[1] == texts[2]
