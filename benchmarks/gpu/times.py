"""How long steps and texts take, with and without CUDA graphs, beside transformers and the memory's limit."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.gpu.models import Source, bytes_per_step, free, runner_of
from benchmarks.gpu.rounds import CHUNK, GREEDY, OWNER, generate
from benchmarks.gpu.settings import Budget, Settings, random_tokens
from specdec.engine.decoder.forward import Decoder
from specdec.engine.decoder.graphs import GraphedDecoder
from specdec.engine.drafting import DraftEngine
from specdec.engine.model_runner import ModelRunner
from specdec.engine.verifying import TargetEngine
from specdec.messages import Draft, Feed, Opening, ProposeItem, ProposeRequest, VerifyItem, VerifyRequest
from specdec.types import SequenceId

MAX_CONTEXT = 2048
ASSUMED_ACCEPTANCE = (0.6, 0.8, 0.9)
"""Random weights say nothing about acceptance, so texts are projected from step times for these."""


def seconds(function: Callable[[], object], settings: Settings, warm_up: int = 2) -> float:
    """Median of several calls, each waited for."""
    taken = []
    for i in range(warm_up + settings.repeats):
        _wait(settings.device)
        started_s = time.perf_counter()
        function()
        _wait(settings.device)
        if i >= warm_up:
            taken.append(time.perf_counter() - started_s)
    return statistics.median(taken)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _ms(seconds_taken: float) -> float:
    return round(1000 * seconds_taken, 3)


class Pair:
    """The decoders under test; runners over them are made anew for each variant."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.target_source = Source(settings.target, settings.device)
        self.draft_source = Source(settings.draft, settings.device, seed=7)
        self.target = self.target_source.decoder(settings.dtype, MAX_CONTEXT)
        self.draft = self.draft_source.decoder(settings.dtype, MAX_CONTEXT)
        self.vocab_size = min(self.target_source.vocab_size, self.draft_source.vocab_size)

    @property
    def variants(self) -> tuple[bool, ...]:
        """Without graphs, and with them where there are any."""
        return (False, True) if GraphedDecoder.supports(self.target) else (False,)

    def runner(self, decoder: Decoder, *, graphs: bool) -> ModelRunner:
        settings = self.settings
        longest = max(settings.prompt_tokens + settings.text_tokens, settings.prefill_tokens)
        capacity = (longest + 256) * max(settings.batches)
        return runner_of(decoder, self.vocab_size, max_context=MAX_CONTEXT, capacity=capacity, graphs=graphs)


# Steps ----------------------------------------------------------------------------------------------------


def steps(pair: Pair, budget: Budget) -> dict[str, Any]:
    """Draft and verify steps in milliseconds."""
    figures: dict[str, Any] = {"verify": [], "draft": [], "prefill": [], "capture_s": {}}
    for graphs in pair.variants:
        figures["prefill"].append({"graphs": graphs} | _prefill(pair, graphs))
        figures["verify"] += _verify_steps(pair, budget, graphs)
        for unseen in (False, True):
            figures["draft"] += _draft_steps(pair, budget, graphs, unseen)
        free(pair.settings.device)
    if True in pair.variants:
        figures["capture_s"] = {
            "target": _capture_s(pair, pair.target),
            "draft": _capture_s(pair, pair.draft),
        }
    figures["cut_short"] = budget.is_spent
    return figures


def _capture_s(pair: Pair, decoder: Decoder) -> float:
    """Seconds to capture all a worker captures at start."""
    runner = pair.runner(decoder, graphs=True)
    graphed = runner.model
    assert isinstance(graphed, GraphedDecoder)
    started_s = time.perf_counter()
    graphed.prepare()
    _wait(pair.settings.device)
    return round(time.perf_counter() - started_s, 2)


def _feed(name: str, token_ids: Sequence[int], keep: int = 0) -> Feed:
    opening = Opening(prompt_len=len(token_ids), sampling=GREEDY)
    return Feed(
        sequence_id=SequenceId(name),
        epoch=0,
        serial=0,  # each feed may follow each other one
        keep=keep,
        token_ids=tuple(token_ids),
        opening=None if keep else opening,
    )


def _names(batch: int) -> list[str]:
    return [f"s{i}" for i in range(batch)]


def _fill(engine: TargetEngine | DraftEngine, pair: Pair) -> None:
    """Prompts of the most sequences there will be, all different."""
    for i, name in enumerate(_names(max(pair.settings.batches))):
        feed = _feed(name, random_tokens(pair.settings.prompt_tokens, pair.vocab_size, seed=100 + i))
        if isinstance(engine, TargetEngine):
            engine.verify(VerifyRequest(owner=OWNER, items=(VerifyItem(feed=feed, num_rows=0),)))
        else:
            item = ProposeItem(feed=feed, num_draft_tokens=0)
            engine.propose(ProposeRequest(owner=OWNER, items=(item,)))


def _verify_steps(pair: Pair, budget: Budget, graphs: bool) -> list[dict[str, Any]]:
    engine = TargetEngine(pair.runner(pair.target, graphs=graphs))
    _fill(engine, pair)
    rows = []
    for batch in pair.settings.batches:
        for gamma in pair.settings.gammas:
            if budget.is_spent:
                return rows
            request = VerifyRequest(
                owner=OWNER, items=tuple(_verify_item(name, pair, gamma) for name in _names(batch))
            )
            taken = seconds(lambda request=request: engine.verify(request), pair.settings)
            rows.append({"batch": batch, "gamma": gamma, "graphs": graphs, "ms": _ms(taken)})
    return rows


def _verify_item(name: str, pair: Pair, gamma: int) -> VerifyItem:
    block = random_tokens(gamma + 1, pair.vocab_size, seed=gamma)
    draft = Draft(sequence_id=SequenceId(name), epoch=0, token_ids=tuple(block[1:]))
    feed = _feed(name, block, keep=pair.settings.prompt_tokens)
    return VerifyItem(feed=feed, num_rows=gamma + 1, draft=draft if gamma else None)


def _draft_steps(pair: Pair, budget: Budget, graphs: bool, unseen: bool) -> list[dict[str, Any]]:
    engine = DraftEngine(pair.runner(pair.draft, graphs=graphs), support=64, draws_unseen=unseen)
    _fill(engine, pair)
    rows = []
    for batch in (pair.settings.batches[0], pair.settings.batches[len(pair.settings.batches) // 2]):
        for gamma in filter(None, pair.settings.gammas):
            if budget.is_spent:
                return rows
            items = tuple(
                ProposeItem(feed=_feed(name, [5], keep=pair.settings.prompt_tokens), num_draft_tokens=gamma)
                for name in _names(batch)
            )
            request = ProposeRequest(owner=OWNER, items=items)
            taken = seconds(lambda request=request: engine.propose(request), pair.settings)
            row = {"batch": batch, "gamma": gamma, "graphs": graphs, "unseen": unseen, "ms": _ms(taken)}
            rows.append(row)
    return rows


def _prefill(pair: Pair, graphs: bool) -> dict[str, Any]:
    """Of one prompt that nothing is known of, whole and in chunks."""
    engine = TargetEngine(pair.runner(pair.target, graphs=graphs))
    seeds = iter(range(10_000))

    def prefill(chunk: int) -> None:
        token_ids = random_tokens(pair.settings.prefill_tokens, pair.vocab_size, seed=next(seeds))
        for start in range(0, len(token_ids), chunk):
            part = token_ids[start : start + chunk]
            num_rows = int(start + chunk >= len(token_ids))
            item = VerifyItem(feed=_feed("prompt", part, keep=start), num_rows=num_rows)
            engine.verify(VerifyRequest(owner=OWNER, items=(item,)))

    whole = seconds(lambda: prefill(pair.settings.prefill_tokens), pair.settings, warm_up=1)
    chunked = seconds(lambda: prefill(CHUNK), pair.settings, warm_up=1)
    return {"tokens": pair.settings.prefill_tokens, "whole_ms": _ms(whole), "chunks_of_512_ms": _ms(chunked)}


# Texts ----------------------------------------------------------------------------------------------------


def texts(pair: Pair, budget: Budget) -> list[dict[str, Any]]:
    """Tokens per second of whole texts. A random draft is never right: this is what speculation costs."""
    rows: list[dict[str, Any]] = []
    gamma = 4
    for graphs in reversed(pair.variants):
        target = TargetEngine(pair.runner(pair.target, graphs=graphs))
        draft = DraftEngine(pair.runner(pair.draft, graphs=graphs), support=64)
        for batch in (1, max(pair.settings.batches)):
            for drafting, used in ((None, 0), (draft, gamma)):
                if not budget.is_spent:
                    rows.append(_our_text(pair, target, drafting, batch, used) | {"graphs": graphs})
    free(pair.settings.device)
    rows += _transformers_texts(pair, budget, gamma)
    return rows


def _prompt(pair: Pair, seed: int) -> list[int]:
    return random_tokens(pair.settings.prompt_tokens, pair.vocab_size, seed)


def _our_text(
    pair: Pair, target: TargetEngine, draft: DraftEngine | None, batch: int, gamma: int
) -> dict[str, Any]:
    prompts = [_prompt(pair, seed) for seed in range(batch)]

    def run() -> float:
        # The first run leaves the prompts in the cache: what is timed is decoding, nearly alone.
        started_s = time.perf_counter()
        text = generate(target, draft, prompts, gamma=gamma, max_tokens=pair.settings.text_tokens)
        _wait(pair.settings.device)
        elapsed_s = time.perf_counter() - started_s
        return sum(map(len, text.token_ids)) / elapsed_s

    run()
    return {"who": "specdec", "batch": batch, "gamma": gamma, "tokens_per_s": round(max(run(), run()), 1)}


def _transformers_texts(pair: Pair, budget: Budget, gamma: int) -> list[dict[str, Any]]:
    settings = pair.settings
    model = pair.target_source.model(settings.dtype)
    assistant = pair.draft_source.model(settings.dtype)
    assistant.generation_config.num_assistant_tokens = gamma
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    rows = []
    for used, kwargs in ((0, {}), (gamma, {"assistant_model": assistant})):
        if budget.is_spent:
            break
        row: dict[str, Any] = {"who": "transformers", "batch": 1, "gamma": used, "graphs": False}
        try:
            row["tokens_per_s"] = round(_transformers_speed(model, pair, kwargs), 1)
        except Exception as error:  # another project's code: it must not end the run
            row["error"] = f"{type(error).__name__}: {error}"[:300]
        rows.append(row)
    return rows


def _transformers_speed(model: PreTrainedModel, pair: Pair, kwargs: dict[str, Any]) -> float:
    """Decoding alone: the time of a short text is taken off."""
    ids = torch.tensor([_prompt(pair, seed=0)], device=pair.settings.device)

    def taken_s(num_tokens: int) -> float:
        _wait(pair.settings.device)
        started_s = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            **kwargs,
        )
        _wait(pair.settings.device)
        return time.perf_counter() - started_s

    few, many = 2, pair.settings.text_tokens
    taken_s(few)
    return (many - few) / max(1e-9, taken_s(many) - taken_s(few))


def projected(figures: dict[str, Any]) -> list[dict[str, Any]]:
    """Tokens per second of one stream that measured steps would give at assumed acceptance rates."""
    best = max(row["graphs"] for row in figures["verify"])
    verify = {
        row["gamma"]: row["ms"] for row in figures["verify"] if row["batch"] == 1 and row["graphs"] == best
    }
    draft = {
        row["gamma"]: row["ms"]
        for row in figures["draft"]
        if row["batch"] == 1 and row["graphs"] == best and row["unseen"]
    }
    rows = []
    for gamma, verify_ms in verify.items():
        round_ms = verify_ms + draft.get(gamma, 0.0)
        if gamma and gamma not in draft:
            continue
        row = {"gamma": gamma, "round_ms": round(round_ms, 3)}
        for rate in ASSUMED_ACCEPTANCE:
            tokens = (1 - rate ** (gamma + 1)) / (1 - rate)
            row[f"tokens_per_s_at_{rate}"] = round(1000 * tokens / round_ms, 1)
        rows.append(row)
    return rows


# The memory's limit ---------------------------------------------------------------------------------------


def roofline(settings: Settings, figures: dict[str, Any] | None) -> dict[str, Any]:
    """The least a step of one stream can take: its weights' bytes by the bandwidth measured."""
    bandwidth = _read_bandwidth(settings)
    found: dict[str, Any] = {"read_gb_per_s": round(bandwidth / 1e9, 1)}
    for role, name in (("target", settings.target), ("draft", settings.draft)):
        size = bytes_per_step(Source(name, settings.device), settings.dtype)
        found[role] = {"model": name, "mb": round(size / 1e6, 1), "least_ms": _ms(size / bandwidth)}
    if figures:
        for row in figures["verify"]:
            if row["batch"] == 1 and row["gamma"] == 0:
                share = found["target"]["least_ms"] / row["ms"]
                found["target"][f"share_reached_{'with' if row['graphs'] else 'without'}_graphs"] = round(
                    share, 3
                )
    return found


def _read_bandwidth(settings: Settings) -> float:
    """Bytes per second, the best of several readings."""
    buffer = torch.ones(settings.bandwidth_bytes // 4, device=settings.device)
    best_s = float("inf")
    for _ in range(5):
        _wait(settings.device)
        started_s = time.perf_counter()
        buffer.sum()
        _wait(settings.device)
        best_s = min(best_s, time.perf_counter() - started_s)
    return settings.bandwidth_bytes / best_s
