"""Which token ids a draft should say: what each choice costs in accepted tokens, and what a step saves.

    python -m benchmarks.draft_vocabulary

A draft cannot change what the target says (greedily, or with a seed in coupled mode), so its texts
are made once. One forward of the draft over each then tells for every choice of ids where its token would
have been accepted, and from that follow the rounds for every gamma. In rejection mode a token was an
accepted draft token with probability min(1, draft / target), so rounds are expected ones, without luck.
Compared with the whole vocabulary on the same texts, small differences are therefore visible.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from benchmarks.common import save
from benchmarks.steps import step_ms
from specdec.config import DraftConfig, ModelConfig
from specdec.engine.decoder.forward import Decoder
from specdec.engine.decoder.weights import make_linear
from specdec.engine.loading import load_runner
from specdec.engine.model_runner import ModelRunner
from specdec.engine.runner import ForwardItem
from specdec.models import check_pair, load_tokenizer, model_info
from specdec.models.catalog import DRAFT_DATA
from specdec.sampling.drawing import draw
from specdec.sampling.noise import Purpose
from specdec.sampling.verification import truncate_support
from specdec.types import SequenceId
from tests.e2e.prompts import PROMPTS

GAMMAS = (1, 2, 3)
FIRST = (4096, 8192, 12288, 16384, 24576)
SUPPORT = 64
"""As `SpeculationConfig.draft_support`."""

VARIED = {
    "chat": (
        "I had a bad day at work. Any advice?",
        "What should I cook tonight with rice and eggs?",
        "Can you explain how vaccines work?",
        "How do I ask my boss for a raise?",
    ),
    "code": (
        "Write a Python class for a bank account with tests.",
        "Write a C function that sorts an array of integers.",
        "Write an SQL query that finds the ten best customers.",
        "Write a Bash script that renames all .txt files to .md.",
    ),
    "prose": (
        "Write the first page of a novel set on Mars.",
        "Write an essay about the French Revolution.",
        "Describe a storm at sea in the style of Melville.",
        "Write a news article about a new bridge in Lisbon.",
    ),
    "lists": (
        "List ten countries with their capitals and populations.",
        "Make a table of five programming languages and their creators.",
        "List the steps to change a tyre.",
        "List twelve chemical elements with symbol and atomic number.",
    ),
    "JSON": (
        "Give me a JSON array of three books with title, author and year.",
        "Write a JSON schema for an address.",
        "Write a YAML file for a Docker compose set-up with a database.",
        "Convert to JSON: Anna, 31, Berlin; Tom, 45, Oslo.",
    ),
    "Latin languages": (
        "Escribe un cuento corto sobre un perro.",
        "Explique la photosynthèse en français.",
        "Schreibe einen Brief an meine Großmutter.",
        "Scrivi una poesia sul mare.",
    ),
    "other languages": (
        "请用中文介绍一下北京。",
        "Расскажи мне о Москве.",
        "日本の食べ物について教えてください。",
        "اكتب قصة قصيرة عن البحر.",
    ),
}
"""None of them is among the prompts of the other benchmarks, which are compared as they are."""

USUAL = "prompts of the other benchmarks"


@dataclass(frozen=True, eq=False)
class Text:
    """What the target says to one prompt."""

    kind: str
    seed: int
    is_greedy: bool
    prompt_ids: list[int]
    token_ids: list[int]
    probs: list[float]
    """The target's, of each of its tokens."""

    def keys(self) -> list[tuple[int, int]]:
        return [(self.seed, len(self.prompt_ids) + idx) for idx in range(len(self.token_ids))]


def blank_texts(tokenizer: object) -> list[Text]:
    """Every prompt twice, greedy and sampled, without its text."""
    prompts = [(USUAL, prompt) for prompt in PROMPTS]
    prompts += [(kind, prompt) for kind, several in VARIED.items() for prompt in several]
    texts = []
    for seed, (kind, prompt) in enumerate(prompts):
        messages = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(  # type: ignore[attr-defined]
            messages, add_generation_prompt=True, return_dict=False
        )
        texts += [Text(kind, seed, is_greedy, list(ids), [], []) for is_greedy in (True, False)]
    return texts


def write(runner: ModelRunner, texts: Sequence[Text], num_tokens: int, eos: int) -> None:
    """Let the target write all of them at once, each until its end or ``num_tokens``."""
    names = {idx: SequenceId(f"text-{idx}") for idx in range(len(texts))}
    for idx, text in enumerate(texts):
        runner.open(names[idx])
        runner.forward([ForwardItem(sequence_id=names[idx], token_ids=text.prompt_ids[:-1], num_rows=0)])
    going = list(names)
    while going:
        fed = [[(texts[idx].prompt_ids + texts[idx].token_ids)[-1]] for idx in going]
        items = [
            ForwardItem(sequence_id=names[idx], token_ids=ids, num_rows=1)
            for idx, ids in zip(going, fed, strict=True)
        ]
        laws = torch.softmax(runner.forward(items)[:, : runner.vocab_size].float(), dim=-1)
        keys = [(texts[idx].seed, len(texts[idx].prompt_ids) + len(texts[idx].token_ids)) for idx in going]
        drawn, best = draw(laws, keys, Purpose.TARGET), laws.argmax(dim=-1)
        for row, idx in enumerate(going):
            token = int((best if texts[idx].is_greedy else drawn)[row])
            texts[idx].token_ids.append(token)
            texts[idx].probs.append(float(laws[row, token]))
        going = [
            idx for idx in going if texts[idx].token_ids[-1] != eos and len(texts[idx].token_ids) < num_tokens
        ]
    for name in names.values():
        runner.close(name)


def draft_rows(runner: ModelRunner, text: Text) -> torch.Tensor:
    """The draft's logits of each token of a text, [tokens, vocab]."""
    name, num_tokens = SequenceId("draft"), len(text.token_ids)
    runner.open(name)
    fed = text.prompt_ids + text.token_ids[:-1]
    logits = runner.forward([ForwardItem(sequence_id=name, token_ids=fed, num_rows=num_tokens)])
    rows = logits[:, : runner.vocab_size].float()
    runner.close(name)
    return rows


def greedy_acceptance(rows: torch.Tensor, text: Text) -> list[float]:
    return (rows.argmax(dim=-1) == torch.tensor(text.token_ids)).double().tolist()


def coupled_acceptance(rows: torch.Tensor, text: Text) -> list[float]:
    drawn = draw(torch.softmax(rows, dim=-1), text.keys(), Purpose.TARGET)
    return (drawn == torch.tensor(text.token_ids)).double().tolist()


def rejection_acceptance(rows: torch.Tensor, text: Text) -> list[float]:
    """How likely each token of the text was an accepted draft token."""
    ids, law = truncate_support(torch.softmax(rows, dim=-1), SUPPORT)
    said = ids == torch.tensor(text.token_ids).unsqueeze(1)
    draft_probs = torch.where(said, law, 0.0).sum(dim=-1)
    return (draft_probs / torch.tensor(text.probs)).clamp_max(1.0).double().tolist()


MODES: dict[str, tuple[bool, Callable[[torch.Tensor, Text], list[float]]]] = {
    "greedy": (True, greedy_acceptance),
    "rejection": (False, rejection_acceptance),
    "coupled": (False, coupled_acceptance),
}
"""By name: whether the texts are greedy, and where draft tokens are accepted."""


def expected_rounds(acceptance: Sequence[float], gamma: int) -> float:
    """Rounds to the end of a text whose tokens, if drafted, are accepted with these probabilities."""
    rounds = [0.0] * (len(acceptance) + gamma + 2)
    padded = [*acceptance, *[0.0] * gamma]
    for position in reversed(range(len(acceptance))):
        reached, total = 1.0, 1.0
        for idx in range(gamma):
            total += reached * (1.0 - padded[position + idx]) * rounds[position + idx + 1]
            reached *= padded[position + idx]
        rounds[position] = total + reached * rounds[position + gamma + 1]
    return rounds[0]


def choices(vocab_size: int) -> dict[str, torch.Tensor]:
    """Ids by the name of the rule that chooses them."""
    listed = torch.from_numpy(np.load(DRAFT_DATA / "draft_vocab.npy").astype(np.int64))
    first = {f"first {count}": torch.arange(count) for count in FIRST}
    parts = {f"listed, below {count}": listed[listed < count] for count in (8192, 12288, 24576)}
    return {"all": torch.arange(vocab_size), **first, **parts, "listed": listed}


def acceptances(
    runner: ModelRunner, texts: Sequence[Text], rules: dict[str, torch.Tensor]
) -> dict[tuple[str, str], list[tuple[Text, list[float]]]]:
    """By rule and mode: each text with its tokens' acceptance."""
    found: dict[tuple[str, str], list[tuple[Text, list[float]]]] = {}
    for text in texts:
        rows = draft_rows(runner, text)
        for rule, ids in rules.items():
            spoken = torch.full_like(rows, -torch.inf).index_copy_(1, ids, rows[:, ids])
            for mode, (is_greedy, accept) in MODES.items():
                if is_greedy == text.is_greedy:
                    found.setdefault((rule, mode), []).append((text, accept(spoken, text)))
    return found


def tokens_per_round(results: Sequence[tuple[Text, list[float]]], gamma: int) -> float:
    return sum(len(found) for _, found in results) / sum(
        expected_rounds(found, gamma) for _, found in results
    )


def coverage(texts: Sequence[Text], ids: torch.Tensor) -> float:
    """Share of the texts' tokens that are among ``ids``."""
    said = torch.tensor([token for text in texts for token in text.token_ids])
    return float(torch.isin(said, ids).double().mean())


def step_times(
    runner: ModelRunner, rules: dict[str, torch.Tensor], repeats: int
) -> dict[str, dict[str, float]]:
    """Median of a step of one token, in turns; ratios are to all ids within a turn."""
    decoder = runner.model
    assert isinstance(decoder, Decoder)
    whole, head = decoder.weights, decoder.weights.embed.weight  # tied
    weights = {
        rule: whole if rule == "all" else replace(whole, head=make_linear(head[ids], None), vocab_map=ids)
        for rule, ids in rules.items()
    }
    times: dict[str, list[float]] = {rule: [] for rule in rules}
    for turn in range(repeats):
        for rule in list(rules)[:: 1 if turn % 2 else -1]:
            decoder.weights = weights[rule]
            times[rule].append(step_ms(runner, 1, 1))
    decoder.weights = whole
    return {
        rule: {
            "ms": round(statistics.median(own), 2),
            "ratio": round(statistics.median(a / b for a, b in zip(own, times["all"], strict=True)), 3),
        }
        for rule, own in times.items()
    }


def figures_of(
    rule: str,
    ids: torch.Tensor,
    texts: Sequence[Text],
    found: dict[tuple[str, str], list[tuple[Text, list[float]]]],
) -> dict[str, object]:
    """Coverage, and tokens per round by mode and gamma: of all texts, and relative to all ids by kind."""
    kinds = list(dict.fromkeys(text.kind for text in texts))

    def ratio(mode: str, kind: str) -> float:
        own, whole = (
            tokens_per_round([pair for pair in found[name, mode] if pair[0].kind == kind], 2)
            for name in (rule, "all")
        )
        return round(own / whole, 4)

    usual = {key: [pair for pair in pairs if pair[0].kind == USUAL] for key, pairs in found.items()}
    return {
        "ids": len(ids),
        "coverage": {
            kind: round(coverage([text for text in texts if text.kind == kind], ids), 4) for kind in kinds
        },
        "tokens_per_round": {
            mode: [round(tokens_per_round(usual[rule, mode], gamma), 3) for gamma in GAMMAS] for mode in MODES
        },
        "ratio_to_all_ids": {
            mode: [
                round(tokens_per_round(usual[rule, mode], g) / tokens_per_round(usual["all", mode], g), 4)
                for g in GAMMAS
            ]
            for mode in MODES
        },
        "ratio_by_kind_at_gamma_2": {
            mode: {kind: ratio(mode, kind) for kind in kinds} for mode in ("greedy", "rejection")
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=96, help="at most, per text")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--turns", type=int, default=5, help="of the step's timing")
    parser.add_argument("--threads", type=int, default=None)
    arguments = parser.parse_args()
    info, pair = model_info("smollm2"), check_pair("smollm2", "smollm2-draft")
    common = {"dtype": arguments.dtype, "num_threads": arguments.threads, "prefix_caching": False}
    draft = load_runner(
        DraftConfig(model="smollm2-draft", draft_vocab_map=None, **common),
        vocab_size=pair.vocab_size,
        max_context=pair.draft_context,
    )
    rules = choices(pair.vocab_size)
    times = step_times(draft, rules, arguments.turns)
    print(times, flush=True)
    target = load_runner(
        ModelConfig(model="smollm2", **common), vocab_size=info.vocab_size, max_context=info.max_context
    )
    tokenizer = load_tokenizer("smollm2")
    texts = blank_texts(tokenizer)
    write(target, texts, arguments.tokens, tokenizer.eos_token_id)
    print(sum(len(text.token_ids) for text in texts), "tokens", flush=True)
    found = acceptances(draft, texts, rules)
    figures = {
        rule: {**figures_of(rule, ids, texts, found), "step": times[rule]} for rule, ids in rules.items()
    }
    for rule, values in figures.items():
        print(rule, values)
    save(
        "draft_vocabulary",
        {
            "dtype": arguments.dtype,
            "texts": len(texts),
            "tokens": sum(len(text.token_ids) for text in texts),
            "gammas": GAMMAS,
            "choices": figures,
        },
    )


if __name__ == "__main__":
    main()
