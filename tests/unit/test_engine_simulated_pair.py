"""Simulated pairs: their acceptance rate is the one that was asked for."""

from __future__ import annotations

import time

import pytest
import torch

from specdec.config import SimulationConfig
from specdec.engine.runner import ForwardItem
from specdec.engine.simulated_pair import greedy_pair, make_runner, sampled_pair
from specdec.models.simulated import simulated_info, simulated_tokenizer
from specdec.types import SequenceId

VOCAB = 200
PAIRS = [(a, b) for a in range(VOCAB) for b in range(VOCAB)]


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.8, 1.0])
def test_greedy_choices_agree_as_often_as_asked_and_elsewhere_they_are_the_next_ones(alpha):
    target, draft = greedy_pair(alpha, VOCAB)
    chosen = target.rows(PAIRS).argmax(-1, keepdim=True)
    drafted = draft.rows(PAIRS)
    rank = (drafted > drafted.gather(1, chosen)).sum(-1)
    assert (rank == 0).float().mean() == pytest.approx(alpha, abs=0.01)
    if alpha < 1.0:
        missed = rank[rank > 0]
        shares = [float((missed == choice).float().mean()) for choice in (1, 2)]
        assert shares == pytest.approx([0.6, 0.2], abs=0.02)


@pytest.mark.parametrize("alpha", [0.3, 0.8])
def test_sampled_laws_overlap_by_as_much_as_asked(alpha):
    target, draft = (law.rows(PAIRS[:4000]).softmax(-1) for law in sampled_pair(alpha, VOCAB))
    assert float(torch.minimum(target, draft).sum(-1).mean()) == pytest.approx(alpha, abs=0.02)


def test_both_sides_of_a_pair_are_made_alike_in_processes_of_their_own():
    simulation = SimulationConfig(law="sampled", vocab_size=VOCAB)
    for role in ("target", "draft"):
        logits = []
        for _ in range(2):
            runner = make_runner(simulation, role, kv_capacity_tokens=1000)
            runner.open(SequenceId("s"))
            logits.append(
                runner.forward([ForwardItem(sequence_id=SequenceId("s"), token_ids=[3, 4], num_rows=1)])
            )
        assert torch.equal(*logits)


def test_a_device_takes_as_long_as_it_is_told_to_while_the_host_runs_ahead():
    simulation = SimulationConfig.model_validate(
        {"vocab_size": VOCAB, "target": {"step_s": 0.2, "token_s": 0.1}, "draft": {"step_s": 0.0}}
    )
    runner = make_runner(simulation, "target", kv_capacity_tokens=1000)
    runner.open(SequenceId("s"))
    item = ForwardItem(sequence_id=SequenceId("s"), token_ids=[1, 2, 3], num_rows=3)
    runner.wait()  # for nothing
    started_s = time.perf_counter()
    runner.forward([item])
    runner.forward([item])
    asked_s = time.perf_counter() - started_s
    runner.wait()
    elapsed_s = time.perf_counter() - started_s
    assert elapsed_s >= 1.0  # one forward behind the other
    assert asked_s < elapsed_s / 2


def test_words_are_tokens_and_tokens_words():
    tokenizer = simulated_tokenizer(VOCAB)
    assert tokenizer.encode("w17 w3  w199 nothing") == [17, 3, 199, 0]
    assert tokenizer.decode([17, 3, 199]) == "w17 w3 w199"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "w5 w6"}], tokenize=False) == "w5 w6 "
    assert simulated_info(VOCAB, 100).eos_token_ids == frozenset()
