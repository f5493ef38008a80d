"""Drafting ahead against drafting in turn: real coordinator and workers, simulated devices, one process.

    python -m benchmarks.pipeline

Draft and target each sleep on a thread of their own, as if they had devices of their own. With probability
alpha the target's token is the draft's first choice, else its second (60 %), third (20 %) or another.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from contextlib import aclosing
from typing import Any

import torch

from benchmarks.common import save
from specdec.config import AppConfig, parse_config
from specdec.coordinator.local import LocalSystem, run_local
from specdec.engine.simulated import SimulatedRunner, ToyLaw
from specdec.speculation.policy import expected_tokens
from specdec.types import GenerationRequest, SamplingParams, SequenceId, StopCriteria, VerificationMode

VOCAB = 64
MODES = {
    "greedy": SamplingParams(temperature=0.0, mode=VerificationMode.GREEDY),
    "sampled": SamplingParams(temperature=1.0, mode=VerificationMode.REJECTION),
}


def ranked_pair(acceptance_rate: float, seed: int = 0) -> tuple[ToyLaw, ToyLaw]:
    """Target and draft whose greedy choices agree with this probability."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(VOCAB, VOCAB, VOCAB, generator=generator)
    choice = noise.argmax(dim=-1, keepdim=True)
    luck = torch.rand(VOCAB, VOCAB, 1, generator=generator)
    missed = (luck - acceptance_rate) / max(1e-9, 1.0 - acceptance_rate)
    rank = torch.where(
        luck < acceptance_rate, 0, torch.where(missed < 0.6, 1, torch.where(missed < 0.8, 2, 9))
    )
    others = torch.rand(VOCAB, VOCAB, VOCAB, generator=generator).scatter(2, choice, -1.0)
    order = others.argsort(dim=-1, descending=True)  # the target's choice comes last here
    logits = torch.empty_like(noise)
    logits.scatter_(2, order, -torch.arange(VOCAB, dtype=torch.float32).expand(VOCAB, VOCAB, -1).contiguous())
    # Between the draft's choices number rank - 1 and rank of the others.
    logits.scatter_(2, choice, 0.5 - rank.to(torch.float32))
    return ToyLaw(noise * 8.0), ToyLaw(logits)


def smooth_pair(seed: int = 0) -> tuple[ToyLaw, ToyLaw]:
    """Target and draft whose laws overlap by about 0.8."""
    law = ToyLaw.random(VOCAB, seed, scale=2.0)
    return law, law.perturbed(seed + 1, 0.5)


def settings(gamma: int, pipeline: str) -> AppConfig:
    return parse_config(
        {
            "target": {"model": "simulated"},
            "draft": {"model": "simulated"},
            "speculation": {"num_speculative_tokens": gamma, "pipeline": pipeline},
        }
    )


def request(number: int, sampling: SamplingParams, max_tokens: int) -> GenerationRequest:
    return GenerationRequest(
        sequence_id=SequenceId(f"s{number}"),
        prompt_ids=(1 + number % 60, 2),
        sampling=SamplingParams(temperature=sampling.temperature, mode=sampling.mode, seed=1000 + number),
        stop=StopCriteria(max_tokens=max_tokens),
    )


async def generate(system: LocalSystem, asked: GenerationRequest) -> tuple[int, int, int]:
    """Output tokens, draft tokens, accepted ones."""
    tokens = drafted = accepted = 0
    async with aclosing(system.client.generate(asked)) as chunks:
        async for chunk in chunks:
            tokens += len(chunk.token_ids)
            drafted += chunk.num_drafted
            accepted += chunk.num_accepted
    return tokens, drafted, accepted


async def measure(args: argparse.Namespace, mode: str, pipeline: str, num_sequences: int) -> dict[str, float]:
    target_law, draft_law = ranked_pair(args.alpha) if mode == "greedy" else smooth_pair()
    target = SimulatedRunner(target_law, latency=lambda *_: args.t_v)
    draft = SimulatedRunner(draft_law, latency=lambda *_: args.t_d)
    gamma = 0 if pipeline == "plain" else args.gamma
    config = settings(gamma, "lookahead" if pipeline == "lookahead" else "serial")
    async with run_local(config, target, draft) as system:
        started_s = time.perf_counter()
        requests = [request(number, MODES[mode], args.tokens) for number in range(num_sequences)]
        results = await asyncio.gather(*(generate(system, asked) for asked in requests))
        elapsed_s = time.perf_counter() - started_s
    tokens, drafted, accepted = (sum(column) for column in zip(*results, strict=True))
    return {"tokens_per_s": tokens / elapsed_s, "accepted": accepted / drafted if drafted else 0.0}


async def run(args: argparse.Namespace) -> dict[str, Any]:
    figures: dict[str, Any] = {"gamma": args.gamma, "t_d_s": args.t_d, "t_v_s": args.t_v, "alpha": args.alpha}
    for mode, num_sequences in (("greedy", 1), ("sampled", 1), ("greedy", 16)):
        rounds: dict[str, list[dict[str, float]]] = {"plain": [], "serial": [], "lookahead": []}
        for _ in range(args.rounds):
            for pipeline, measured in rounds.items():
                measured.append(await measure(args, mode, pipeline, num_sequences))
        rate = {
            name: statistics.median(m["tokens_per_s"] for m in measured) for name, measured in rounds.items()
        }
        ratios = [
            ahead["tokens_per_s"] / serial["tokens_per_s"]
            for ahead, serial in zip(rounds["lookahead"], rounds["serial"], strict=True)
        ]
        figures[f"{mode} {num_sequences}"] = {
            **{f"{name}_tokens_per_s": round(value, 1) for name, value in rate.items()},
            "accepted_over_drafted": round(rounds["serial"][0]["accepted"], 3),
            "lookahead_over_serial": round(statistics.median(ratios), 3),
        }
    ideal = expected_tokens(args.alpha, args.gamma) / (args.gamma * args.t_d + args.t_v)
    figures["ideal_serial_tokens_per_s"] = round(ideal, 1)
    figures["serial_over_ideal"] = round(figures["greedy 1"]["serial_tokens_per_s"] / ideal, 3)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--alpha", type=float, default=0.8)
    parser.add_argument("--t-d", type=float, default=0.002, help="seconds of a draft step")
    parser.add_argument("--t-v", type=float, default=0.016, help="seconds of a verification")
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    figures = asyncio.run(run(args))
    for name, value in figures.items():
        print(name, value)
    save("pipeline", figures)


if __name__ == "__main__":
    main()
