"""Does the engine say what the model says? Against transformers on the same device, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.gpu.models import Source, free, runner_of
from benchmarks.gpu.rounds import Text, generate
from benchmarks.gpu.settings import Budget, Settings, random_tokens
from specdec.engine.decoder.forward import Decoder
from specdec.engine.decoder.graphs import GraphedDecoder
from specdec.engine.drafting import DraftEngine
from specdec.engine.model_runner import ModelRunner
from specdec.engine.runner import ForwardItem
from specdec.engine.verifying import TargetEngine
from specdec.types import SequenceId

MAX_CONTEXT = 1024
CAPACITY = 16_384
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PERTURBATION = 0.01
TIE = 10
"""A token may be this many of transformers' mean errors, in the same dtype, below float32's best one."""
FLOAT32_ERROR = 1e-4
"""In standard deviations of the logits."""


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check(settings: Settings, budget: Budget) -> dict[str, Any]:
    """Every comparison by name; ``failures`` lists those that did not hold."""
    source = Source(settings.exactness, settings.device)
    reference = source.model(torch.float32)
    source = Source(source.name, source.device, state=reference.state_dict())
    figures: dict[str, Any] = {"model": source.name, "logits": [], "greedy": [], "failures": []}
    for dtype in DTYPES:
        if not budget.is_spent:
            _check_dtype(source, reference, dtype, settings, budget, figures)
            free(settings.device)
    figures["cut_short"] = budget.is_spent
    figures["failures"] = _failures(figures)
    return figures


def _check_dtype(
    source: Source,
    reference: PreTrainedModel,
    dtype: torch.dtype,
    settings: Settings,
    budget: Budget,
    figures: dict[str, Any],
) -> None:
    decoder = source.decoder(dtype, MAX_CONTEXT)
    drafts = _drafts(source, decoder, dtype)
    for graphs in (False, True) if GraphedDecoder.supports(decoder) else (False,):
        row = {"dtype": name_of(dtype), "graphs": graphs}
        figures["logits"].append(row | _logits(decoder, reference, source, dtype, graphs))
        for draft_name, draft in drafts.items():
            if not budget.is_spent:
                found = _greedy(decoder, draft, reference, settings, graphs)
                figures["greedy"].append(row | {"draft": draft_name} | found)


def _failures(figures: dict[str, Any]) -> list[str]:
    failed = [
        f"logits {row}"
        for row in figures["logits"]
        if not row["error"] <= 2 * row["error_of_transformers"] + FLOAT32_ERROR
    ]
    errors = {row["dtype"]: row["error_of_transformers"] for row in figures["logits"]}
    for row in figures["greedy"]:
        if not row["worst_choice"] <= TIE * errors[row["dtype"]] + FLOAT32_ERROR:
            failed.append(f"greedy {row}")
        if row["draft"] == "equal" and not row["acceptance"] >= 0.8:
            failed.append(f"drafts not used {row}")
    return failed


# Logits ---------------------------------------------------------------------------------------------------


def _logits(
    decoder: Decoder, reference: PreTrainedModel, source: Source, dtype: torch.dtype, graphs: bool
) -> dict[str, float]:
    """Mean error of the served rows in standard deviations of the logits, beside transformers' own."""
    token_ids = random_tokens(300, source.vocab_size, seed=5)
    expected = _own_logits(reference, token_ids)
    own = source.model(dtype)
    own_logits = _own_logits(own, token_ids)
    del own
    runner = runner_of(decoder, source.vocab_size, max_context=MAX_CONTEXT, capacity=CAPACITY, graphs=graphs)
    served, first = _served_logits(runner, token_ids)
    expected, own_logits = expected[first:], own_logits[first:]
    spread = expected.std()
    return {
        "error": float((served - expected).abs().mean() / spread),
        "error_of_transformers": float((own_logits - expected).abs().mean() / spread),
    }


@torch.inference_mode()
def _own_logits(model: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    ids = torch.tensor([list(token_ids)], device=model.device)
    return model(input_ids=ids, use_cache=False).logits[0].float()


def _served_logits(runner: ModelRunner, token_ids: Sequence[int]) -> tuple[torch.Tensor, int]:
    """Rows from some position on: a prefill, single tokens and blocks over a block's edge, and rollbacks."""
    name, other = SequenceId("a"), SequenceId("b")
    runner.open(name)
    runner.open(other)
    first = 240
    runner.forward([_item(name, token_ids[:first], 0), _item(other, token_ids[:33], 0)])
    rows, done = [], first
    for size in (1, 5, 8, 9, 1, 3, 2):
        wrong = [token_ids[0]] * min(size, 3)
        runner.forward([_item(name, wrong, len(wrong)), _item(other, token_ids[:1], 1)])
        runner.truncate(name, done)
        part = token_ids[done : done + size]
        logits = runner.forward([_item(other, token_ids[:2], 1), _item(name, part, size)])
        rows.append(logits[1:].float().clone())
        done += size
    rows.append(runner.forward([_item(name, token_ids[done:], len(token_ids) - done)]).float())
    runner.close(name)
    runner.close(other)
    return torch.cat(rows), first


def _item(name: SequenceId, token_ids: Sequence[int], num_rows: int) -> ForwardItem:
    return ForwardItem(sequence_id=name, token_ids=token_ids, num_rows=num_rows)


# Text -----------------------------------------------------------------------------------------------------


def _drafts(source: Source, decoder: Decoder, dtype: torch.dtype) -> dict[str, Decoder]:
    """By name: one that is always right, one that often is, one that never is."""
    return {
        "equal": decoder,
        "perturbed": source.perturbed(PERTURBATION).decoder(dtype, MAX_CONTEXT),
        "random": Source(source.name, source.device, seed=99).decoder(dtype, MAX_CONTEXT),
    }


def _greedy(
    decoder: Decoder,
    draft: Decoder,
    reference: PreTrainedModel,
    settings: Settings,
    graphs: bool,
) -> dict[str, Any]:
    """Speculative text of prompts that share a prefix and cross blocks, judged by the float32 model."""
    vocab_size = int(reference.config.vocab_size)
    limits = {"max_context": MAX_CONTEXT, "capacity": CAPACITY, "graphs": graphs}
    target = TargetEngine(runner_of(decoder, vocab_size, **limits))
    drafting = DraftEngine(runner_of(draft, vocab_size, **limits), support=64)
    prompts = _prompts(vocab_size)
    text = generate(target, drafting, prompts, gamma=4, max_tokens=settings.exactness_tokens)
    # Again, in a cache that knows the prompts.
    again = generate(target, drafting, prompts[::-1], gamma=3, max_tokens=settings.exactness_tokens)
    plain = generate(target, None, prompts, gamma=0, max_tokens=settings.exactness_tokens)
    for runner in (target.runner, drafting.runner):
        assert isinstance(runner, ModelRunner)
        runner.cache.blocks.check_invariants()
        assert runner.kv_tokens_in_use == 0
    return {
        "worst_choice": max(
            _worst_choice(reference, prompts, text), _worst_choice(reference, prompts[::-1], again)
        ),
        "same_as_plain": _same(text.token_ids, plain.token_ids),
        "same_again": _same(text.token_ids, again.token_ids[::-1]),
        "acceptance": round(text.num_accepted / max(1, text.num_drafted), 3),
    }


def _prompts(vocab_size: int) -> list[list[int]]:
    """Around the edge of a block of 256, and some that begin alike."""
    long = random_tokens(600, vocab_size, seed=1)
    return [
        random_tokens(7, vocab_size, seed=2),
        random_tokens(250, vocab_size, seed=3),
        random_tokens(255, vocab_size, seed=4),
        long[:300],
        [*long[:280], *random_tokens(40, vocab_size, seed=6)],
        long[:520],
    ]


def _same(a: list[list[int]], b: list[list[int]]) -> str:
    return f"{sum(x == y for x, y in zip(a, b, strict=True))} of {len(a)}"


def _worst_choice(reference: PreTrainedModel, prompts: Sequence[Sequence[int]], text: Text) -> float:
    """How far below the best token the chosen one was at most, in standard deviations; 0 is exact."""
    worst = 0.0
    for prompt, output in zip(prompts, text.token_ids, strict=True):
        logits = _own_logits(reference, [*prompt, *output])[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(output, device=logits.device).unsqueeze(1)).squeeze(1)
        gap = (logits.max(dim=-1).values - chosen) / logits.std(dim=-1)
        worst = max(worst, float(gap.max()))
    return worst
