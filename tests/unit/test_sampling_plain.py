"""Rows whose token is the likeliest one by the raw logits: they are not processed at all."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from specdec.sampling.drawing import best
from specdec.sampling.processors import is_plain
from specdec.types import SamplingParams, VerificationMode

OTHER_VALUES: dict[str, object] = {
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
    "logit_bias": ((3, 1.0),),
    "bad_words": ((1, 2),),
    "min_tokens": 3,
    "grammar": "root ::= [0-9]+",
    "mode": VerificationMode.REJECTION,
}
IRRELEVANT = {"temperature": 0.7, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 9}


def test_greedy_decoding_is_plain_whatever_it_does_not_look_at() -> None:
    assert is_plain(SamplingParams(mode=VerificationMode.GREEDY))
    assert is_plain(SamplingParams(mode=VerificationMode.GREEDY, **IRRELEVANT))


@pytest.mark.parametrize("field", [field.name for field in fields(SamplingParams)])
def test_anything_else_is_not(field: str) -> None:
    value = {**OTHER_VALUES, **IRRELEVANT}[field]
    params = SamplingParams(**{"mode": VerificationMode.GREEDY, field: value})
    assert is_plain(params) == (field in IRRELEVANT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_best_token_is_the_first_of_those_that_tie(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(0, 5, (200, 37), generator=generator).to(dtype)
    logits[0, :] = -torch.inf
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert best(logits).tolist() == expected
    assert best(logits[:, :9]).tolist() == [row.index(max(row)) for row in logits[:, :9].tolist()]
