"""References for the law tests: slow, obvious, written without the code under test, plus small builders.

A *next-token law* maps the output tokens so far to the law of the next one. ``levels[i]`` holds it for every
prefix of ``i`` tokens, so it has the shape ``[vocab] * (i + 1)``.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import math
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import scipy.stats
import torch

from specdec.config import AppConfig, parse_config
from specdec.coordinator.local import LocalSystem, run_local
from specdec.engine.grammar import Grammars
from specdec.engine.simulated import SimulatedRunner, ToyLaw
from specdec.sampling.noise import Purpose, exponentials
from specdec.types import (
    FinishReason,
    GenerationRequest,
    SamplingParams,
    SequenceId,
    StopCriteria,
    TokenChunk,
)

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]
NextTokenLaw = Callable[[tuple[int, ...]], Float64Array]

MIN_P_VALUE = 1e-6
"""A right law fails a test of this level once in a million seeds; the seeds are fixed."""


# Processors, one row at a time ----------------------------------------------------------------------------


def reference_law(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    stop_token_ids: Collection[int] = (),
) -> Float64Array:
    """The law a client asked for, token by token in float64. Greedy is a point mass at the first maximum."""
    vocab = range(len(logits))
    bias = dict(params.logit_bias)
    scores = [float(logit) for logit in logits]
    excluded = {
        token
        for token in vocab
        if (token in stop_token_ids and len(output) < params.min_tokens)
        or any((*prompt, *output, token)[-len(word) :] == word for word in params.bad_words)
    }
    if any(scores[token] > -math.inf for token in set(vocab) - excluded):
        scores = [-math.inf if token in excluded else score for token, score in enumerate(scores)]
    for token in vocab:
        if token in prompt or token in output:
            factor = params.repetition_penalty
            scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
        times = list(output).count(token)
        scores[token] -= params.frequency_penalty * times
        scores[token] -= params.presence_penalty if times else 0.0
        scores[token] += bias.get(token, 0.0)
    if params.is_greedy:
        return np.eye(len(scores))[scores.index(max(scores))]
    best = max(scores)
    scores = [(score - best) / params.temperature for score in scores]

    kept = set(vocab)
    if 0 < params.top_k < len(scores):
        threshold = sorted(scores, reverse=True)[params.top_k - 1]
        kept = {token for token in vocab if scores[token] >= threshold}
    if params.top_p < 1.0:
        probs = _softmax(scores, kept)
        nucleus: set[int] = set()
        mass = 0.0
        for token in sorted(kept, key=lambda token: (-probs[token], token)):
            if nucleus and mass >= params.top_p:
                break
            nucleus.add(token)
            mass += probs[token]
        kept = nucleus
    if params.min_p > 0.0:
        kept = {token for token in kept if scores[token] >= math.log(params.min_p)}
    return _softmax(scores, kept)


def _softmax(scores: Sequence[float], kept: set[int]) -> Float64Array:
    weights = [math.exp(score) if token in kept else 0.0 for token, score in enumerate(scores)]
    return np.array(weights) / math.fsum(weights)


def toy_next_token_law(
    law: ToyLaw, params: SamplingParams, prompt: Sequence[int], stop_token_ids: Collection[int] = ()
) -> NextTokenLaw:
    """The processed law of a toy model behind a prompt."""

    def behind(output: tuple[int, ...]) -> Float64Array:
        return reference_law(law.row([*prompt, *output]).tolist(), params, prompt, output, stop_token_ids)

    return behind


# Laws of blocks -------------------------------------------------------------------------------------------


def conditional_levels(next_token_law: NextTokenLaw, vocab_size: int, num_tokens: int) -> list[Float64Array]:
    """``levels[0..num_tokens)`` by going through every prefix."""
    levels = []
    for num_before in range(num_tokens):
        level = np.empty((vocab_size,) * (num_before + 1))
        for prefix in itertools.product(range(vocab_size), repeat=num_before):
            level[prefix] = next_token_law(prefix)
        levels.append(level)
    return levels


def tail_laws(levels: Sequence[Float64Array]) -> list[Float64Array]:
    """``tails[i][prefix]``: joint law of all tokens from the i-th on behind that prefix; the last is 1."""
    tails = [np.ones_like(levels[-1])]
    for level in reversed(levels):
        tails.insert(0, level.reshape(level.shape + (1,) * (len(levels) - level.ndim)) * tails[0])
    return tails


def race_joint_law(draft_probs: Float64Array, target_probs: Float64Array) -> Float64Array:
    """Joint law of the winners of two exponential races that share their noise, [draft token, target token].

    With r the ratio of the winning times, the density of "i wins the draft's race and j the target's" is
    ``q_i p_j / S(r)**2`` for r between p_i/q_i and p_j/q_j, where ``S(r) = sum_k max(q_k r, p_k)`` is linear
    between the kinks p_k/q_k, so every piece integrates in closed form.
    """
    q, p = draft_probs, target_probs
    kinks = sorted({p[k] / q[k] for k in range(len(q)) if q[k] > 0})
    joint = np.zeros((len(q), len(p)))
    for i, j in itertools.product(np.flatnonzero(q), np.flatnonzero(p)):
        if i == j:
            joint[i, j] = 1.0 / sum(max(p[k] / p[i], q[k] / q[i]) for k in range(len(q)))
            continue
        low = p[i] / q[i]
        high = p[j] / q[j] if q[j] > 0 else math.inf
        if low < high:
            edges = [low, *(kink for kink in kinks if low < kink < high), high]
            pieces = (_race_piece(q, p, left, right) for left, right in itertools.pairwise(edges))
            joint[i, j] = q[i] * p[j] * math.fsum(pieces)
    return joint


def _race_piece(q: Float64Array, p: Float64Array, left: float, right: float) -> float:
    """Integral of 1 / S(r)**2 where S(r) = slope * r + offset has no kink inside."""
    middle = (left + right) / 2 if right < math.inf else left + 1.0
    is_draft = q * middle > p
    slope, offset = q[is_draft].sum(), p[~is_draft].sum()
    if right == math.inf:
        return 1.0 / (slope * (slope * left + offset))
    return (right - left) / ((slope * left + offset) * (slope * right + offset))


# Random laws ----------------------------------------------------------------------------------------------

KINDS = ("flat", "normal", "peaky", "holes", "low half", "high half", "one-hot")
"""``holes`` has zero entries; the halves have disjoint supports."""


def toy_law(kind: str, vocab_size: int, seed: int) -> ToyLaw:
    """A float64 toy law of the given kind, one independent row per pair of tokens."""
    generator = torch.Generator().manual_seed(seed)
    shape = (vocab_size,) * 3
    logits = torch.randn(shape, generator=generator, dtype=torch.float64)
    token = torch.arange(vocab_size).expand(shape)
    chosen = torch.randint(vocab_size, (vocab_size, vocab_size, 1), generator=generator)
    hidden = {
        "holes": (torch.rand(shape, generator=generator) < 0.4) & (token != chosen),
        "low half": token >= (vocab_size + 1) // 2,
        "high half": token < (vocab_size + 1) // 2,
        "one-hot": token != chosen,
    }.get(kind, torch.zeros(shape, dtype=torch.bool))
    scale = {"flat": 1e-3, "peaky": 8.0}.get(kind, 1.0)
    return ToyLaw((logits * scale).masked_fill(hidden, -torch.inf))


@functools.cache
def plain_ids(law: ToyLaw, request: GenerationRequest) -> tuple[int, ...]:
    """Plain decoding of a target: the argmax, or the winner of each position's race, one token at a time."""
    stops = request.stop.stop_token_ids
    probs_behind = toy_next_token_law(law, request.sampling, request.prompt_ids, stops)
    output: tuple[int, ...] = ()
    while len(output) < request.stop.max_tokens and not stops.intersection(output):
        probs = probs_behind(output)
        position = len(request.prompt_ids) + len(output)
        noise = exponentials(request.sampling.seed, position, Purpose.TARGET, len(probs)).astype(np.float64)
        times = [time / prob if prob > 0 else np.inf for time, prob in zip(noise, probs, strict=True)]
        output += (int(np.argmin(times)),)
    return output


# Statistics -----------------------------------------------------------------------------------------------


def chi_square_p_value(counts: npt.NDArray[np.integer], law: Float64Array) -> float:
    """Pearson's test; cells expected fewer than five times are pooled. Impossible cells must be empty."""
    counts, law = counts.ravel(), law.ravel()
    assert counts[law == 0.0].sum() == 0, "a token of probability 0 was emitted"
    expected = counts.sum() * law
    is_rare = expected < 5
    observed = np.append(counts[~is_rare], counts[is_rare].sum())
    expected = np.append(expected[~is_rare], expected[is_rare].sum())
    if expected[-1] < 5:
        # What is left over is too rare to stand alone: it joins the smallest cell.
        smallest = int(expected[:-1].argmin())
        observed[smallest] += observed[-1]
        expected[smallest] += expected[-1]
        observed, expected = observed[:-1], expected[:-1]
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(scipy.stats.chi2.sf(statistic, len(expected) - 1))


def count_tuples(rows: Iterable[Sequence[int]], vocab_size: int, num_tokens: int) -> Int64Array:
    """How often each tuple of ``num_tokens`` tokens occurs, [vocab] * num_tokens."""
    table = np.array(list(rows), dtype=np.int64)
    assert table.shape[1] == num_tokens
    flat = np.ravel_multi_index(tuple(table.T), (vocab_size,) * num_tokens)
    return np.bincount(flat, minlength=vocab_size**num_tokens).reshape((vocab_size,) * num_tokens)


# The real system in process -------------------------------------------------------------------------------


def runner(law: ToyLaw, *, max_context: int = 4096) -> SimulatedRunner:
    return SimulatedRunner(ToyLaw(law._logits.to(torch.float32)), max_context=max_context)


def app_config(
    gamma: int,
    *,
    draft_support: int = 64,
    max_num_seqs: int = 64,
    prefill_chunk_tokens: int = 4096,
    pipeline: str = "serial",
) -> AppConfig:
    return parse_config(
        {
            "target": {"model": "toy-target"},
            "draft": {"model": "toy-draft"},
            "speculation": {
                "num_speculative_tokens": gamma,
                "draft_support": draft_support,
                "pipeline": pipeline,
            },
            "coordinator": {
                "max_num_seqs": max_num_seqs,
                "max_waiting": 100_000,
                "prefill_chunk_tokens": prefill_chunk_tokens,
            },
        }
    )


def generation(
    name: str | int,
    sampling: SamplingParams,
    *,
    prompt: tuple[int, ...] = (0, 1),
    max_tokens: int = 16,
    stop_token_ids: Iterable[int] = (),
    max_draft_tokens: int | None = None,
) -> GenerationRequest:
    return GenerationRequest(
        sequence_id=SequenceId(str(name)),
        prompt_ids=prompt,
        sampling=sampling,
        stop=StopCriteria(max_tokens=max_tokens, stop_token_ids=frozenset(stop_token_ids)),
        max_draft_tokens=max_draft_tokens,
    )


@dataclass(slots=True)
class Generated:
    """What a client got for one request."""

    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    chunks: list[TokenChunk] = field(default_factory=list)

    @property
    def num_drafted(self) -> int:
        return sum(chunk.num_drafted for chunk in self.chunks)

    @property
    def num_accepted(self) -> int:
        return sum(chunk.num_accepted for chunk in self.chunks)


@asynccontextmanager
async def toy_system(
    config: AppConfig,
    target: ToyLaw,
    draft: ToyLaw | None,
    *,
    draft_context: int = 4096,
    grammars: Grammars | None = None,
) -> AsyncIterator[LocalSystem]:
    draft_runner = None if draft is None else runner(draft, max_context=draft_context)
    async with run_local(config, runner(target), draft_runner, grammars=grammars) as system:
        yield system


async def generate_all(
    config: AppConfig,
    target: ToyLaw,
    draft: ToyLaw | None,
    requests: Sequence[GenerationRequest],
    *,
    draft_context: int = 4096,
    grammars: Grammars | None = None,
) -> list[Generated]:
    """Run every request through the real coordinator, as many together as the lane takes."""
    results = [Generated() for _ in requests]
    queue = iter(zip(requests, results, strict=True))

    async with toy_system(config, target, draft, draft_context=draft_context, grammars=grammars) as system:

        async def work() -> None:
            for request, result in queue:
                async for chunk in system.client.generate(request):
                    result.chunks.append(chunk)
                    result.token_ids += chunk.token_ids
                result.finish_reason = result.chunks[-1].finish_reason

        async with asyncio.TaskGroup() as group:
            for _ in range(config.coordinator.max_num_seqs):
                group.create_task(work())
    return results
