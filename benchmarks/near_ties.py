"""How often speculation in bfloat16 says another word than plain decoding, and how close the two words were.

    python -m benchmarks.near_ties --tokens 128

Greedy, in one process. In exact arithmetic the texts are equal; in bfloat16 a batch of another shape may
round otherwise, which decides where two logits are nearly the same. Behind the first difference texts have
nothing in common, so only that one counts: the rate is differences per token compared.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.common import save
from benchmarks.soak import load
from specdec.config import parse_config
from specdec.coordinator.local import LocalSystem, run_local
from specdec.engine.model_runner import ModelRunner
from specdec.engine.runner import ForwardItem
from specdec.engine.worker import ModelThread
from specdec.models import load_tokenizer
from specdec.types import GenerationRequest, SamplingParams, SequenceId, StopCriteria, VerificationMode
from tests.e2e.prompts import PROMPTS

GAMMAS = (1, 2, 4, 8)
_PLAIN = SequenceId("plain")


@dataclass(frozen=True)
class Plain:
    """A text decoded one token at a time, with the row of logits behind each token."""

    token_ids: list[int]
    rows: list[torch.Tensor]


def decode(runner: ModelRunner, prompt_ids: Sequence[int], num_tokens: int) -> Plain:
    runner.open(_PLAIN)
    fed, plain = list(prompt_ids), Plain([], [])
    for _ in range(num_tokens):
        logits = runner.forward([ForwardItem(sequence_id=_PLAIN, token_ids=fed, num_rows=1)]).float()
        plain.rows.append(logits[0])
        plain.token_ids.append(int(logits[:, : runner.vocab_size].argmax(dim=-1)))
        fed = plain.token_ids[-1:]
    runner.close(_PLAIN)
    return plain


async def speculate(
    system: LocalSystem, prompt_ids: Sequence[int], num_tokens: int, gamma: int, name: str
) -> tuple[list[int], int]:
    """The tokens, and how many of them were accepted draft tokens."""
    request = GenerationRequest(
        sequence_id=SequenceId(name),
        prompt_ids=tuple(prompt_ids),
        sampling=SamplingParams(temperature=0.0, mode=VerificationMode.GREEDY),
        stop=StopCriteria(max_tokens=num_tokens),
        max_draft_tokens=gamma,
    )
    token_ids: list[int] = []
    accepted = 0
    async for chunk in system.client.generate(request):
        token_ids += chunk.token_ids
        accepted += chunk.num_accepted
    return token_ids, accepted


def first_difference(plain: Plain, other: Sequence[int]) -> tuple[int, float | None]:
    """Tokens compared, and the gap between the two words' logits in plain decoding where they part."""
    for idx, (own, foreign) in enumerate(zip(plain.token_ids, other, strict=True)):
        if own != foreign:
            row = plain.rows[idx]
            return idx + 1, float(row[own] - row[foreign])
    return len(other), None


async def measure(dtype: str, num_tokens: int) -> dict[str, object]:
    config = parse_config(
        {
            "target": {"model": "smollm2", "dtype": dtype},
            "draft": {"model": "smollm2-draft", "dtype": dtype},
            "speculation": {"num_speculative_tokens": max(GAMMAS)},
        }
    )
    thread, tokenizer = ModelThread(), load_tokenizer("smollm2")
    target, draft, _ = thread.run(lambda: load(config))
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
        )
        for prompt in PROMPTS
    ]
    figures: dict[str, object] = {"dtype": dtype, "texts": len(prompts), "tokens_a_text": num_tokens}
    plains = [thread.run(lambda ids=ids: decode(target, ids, num_tokens)) for ids in prompts]
    async with run_local(config, target, draft, thread) as system:
        for gamma in GAMMAS:
            gaps, compared, accepted = [], 0, 0
            for idx, (ids, plain) in enumerate(zip(prompts, plains, strict=True)):
                text, count = await speculate(system, ids, num_tokens, gamma, f"{gamma}-{idx}")
                seen, gap = first_difference(plain, text)
                compared, accepted = compared + seen, accepted + count
                gaps += [] if gap is None else [round(gap, 4)]
            figures[f"gamma_{gamma}"] = {
                "texts_that_differ": len(gaps),
                "tokens_compared": compared,
                "differences_per_1000_tokens": round(1000 * len(gaps) / compared, 2),
                "logit_gaps": sorted(gaps),
                "accepted_draft_tokens": accepted,
            }
            print(gamma, figures[f"gamma_{gamma}"], flush=True)
    top_two = torch.cat([torch.stack(plain.rows).topk(2).values for plain in plains])
    gaps_of_all = top_two[:, 0] - top_two[:, 1]
    figures["share_of_positions_with_a_gap_below"] = {
        str(limit): round(float((gaps_of_all < limit).float().mean()), 4) for limit in (0.0625, 0.125, 0.25)
    }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    figures = asyncio.run(measure(arguments.dtype, arguments.tokens))
    print(figures)
    save("near_ties", figures)


if __name__ == "__main__":
    main()
