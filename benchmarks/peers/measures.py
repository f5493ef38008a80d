"""What is measured: one step is one peer doing one thing, and gives one dictionary of figures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.prompts import PromptIds
from benchmarks.peers.servers import Server
from benchmarks.peers.transformers_peer import TransformersPeer
from specdec.lab.bench.acceptance import Acceptance
from specdec.lab.bench.figures import summarise
from specdec.lab.bench.http import Endpoint
from specdec.lab.bench.load import Load, run_load
from specdec.lab.bench.prompts import Body
from specdec.lab.bench.server import ServedModel, read_counters

REQUESTS_OF_ONE_STREAM = 2
LONG_PROMPTS = 3

Peer = Server | TransformersPeer
Figures = dict[str, float]


class StepFailed(Exception):
    """Not every request succeeded with the number of tokens asked for."""


@dataclass(frozen=True)
class Settings:
    concurrency: tuple[int, ...]
    max_tokens: int
    gamma: int
    long_prompt_tokens: int


@dataclass(frozen=True)
class Step:
    key: str
    peer: str
    run: Callable[[Any, int], Figures]
    """Takes the peer and the number of the round."""


def steps(settings: Settings, prompts: PromptIds) -> list[Step]:
    """One round, in an order that alternates between the peers of each ratio."""
    return [*_plain(settings, prompts), *_speculative(settings, prompts), *_first_token(settings, prompts)]


def _plain(settings: Settings, prompts: PromptIds) -> Iterator[Step]:
    for streams in settings.concurrency:
        for peer in ("specdec", "vllm"):
            yield _http(f"{peer}_plain_{streams}", peer, settings, prompts, streams)
        yield Step(f"transformers_plain_{streams}", "transformers", _batch(settings, prompts, streams))


def _speculative(settings: Settings, prompts: PromptIds) -> Iterator[Step]:
    gamma = settings.gamma
    for streams in settings.concurrency:
        for peer in ("specdec", "vllm_draft"):
            yield _http(
                f"{peer.removesuffix('_draft')}_draft_{streams}",
                peer,
                settings,
                prompts,
                streams,
                gamma=gamma,
            )
    yield Step("transformers_assisted_1", "transformers", _assisted(settings, prompts))
    for key, used in (("specdec_plain_1_temperature_1", 0), ("specdec_draft_1_temperature_1", gamma)):
        yield _http(key, "specdec", settings, prompts, 1, gamma=used, temperature=1.0)


def _first_token(settings: Settings, prompts: PromptIds) -> Iterator[Step]:
    num_tokens = settings.long_prompt_tokens

    def long_prompts(round_index: int, offset: int) -> list[list[int]]:
        first = (round_index * 3 + offset) * LONG_PROMPTS
        return [prompts.long(first + index, num_tokens) for index in range(LONG_PROMPTS)]

    def measure(gamma: int, offset: int) -> Callable[[Server, int], Figures]:
        def run(server: Server, round_index: int) -> Figures:
            load = _load(server, max_tokens=2, gamma=gamma, temperature=0.0)
            return _measure_load(server, load, long_prompts(round_index, offset), 1)

        return run

    yield Step("specdec_long_prompt", "specdec", measure(0, 0))
    yield Step("vllm_long_prompt", "vllm", measure(0, 0))
    yield Step("specdec_long_prompt_draft", "specdec", measure(settings.gamma, 1))


def _http(
    key: str,
    peer: str,
    settings: Settings,
    prompts: PromptIds,
    streams: int,
    *,
    gamma: int = 0,
    temperature: float = 0.0,
) -> Step:
    def run(server: Server, round_index: int) -> Figures:
        load = _load(server, max_tokens=settings.max_tokens, gamma=gamma, temperature=temperature)
        return _measure_load(server, load, prompts.short(round_index, _num_requests(streams)), streams)

    return Step(key, peer, run)


def _num_requests(streams: int) -> int:
    """Several streams start and end together; one stream answers more than one prompt, as prompts differ."""
    return REQUESTS_OF_ONE_STREAM if streams == 1 else streams


def _load(server: Server, *, max_tokens: int, gamma: int, temperature: float) -> Load:
    is_specdec = server.name == "specdec"
    # Speculation is the server's to adapt; a request can only do without.
    cap = {} if gamma else {"num_speculative_tokens": 0}
    speculative = {"speculative": {**cap, "metrics": True}}
    return Load(
        endpoint=Endpoint.parse(server.url),
        model=server.model,
        max_tokens=max_tokens,
        temperature=temperature,
        ignore_eos=True,
        idle_timeout_s=120.0,
        extra_body=speculative if is_specdec else {},
    )


def _measure_load(server: Server, load: Load, prompts: list[list[int]], streams: int) -> Figures:
    return asyncio.run(_measure(server, load, [{"prompt": ids} for ids in prompts], streams))


async def _measure(server: Server, load: Load, bodies: list[Body], streams: int) -> Figures:
    served = ServedModel(server.model, server.name)
    before = await read_counters(load.endpoint, served, {})
    outcomes, elapsed_s = await run_load(load, bodies, streams)
    after = await read_counters(load.endpoint, served, {})
    figures = summarise(streams, outcomes, elapsed_s, after.since(before) if after and before else None)
    if figures.num_succeeded < len(bodies) or figures.num_tokens != len(bodies) * load.max_tokens:
        raise StepFailed(
            f"{server.name}: {figures.num_succeeded} of {len(bodies)} requests, {figures.num_tokens} tokens: "
            f"{figures.first_error}"
        )
    assert figures.ttft_s is not None
    assert figures.tpot_s is not None
    return {
        "tokens_per_s": figures.tokens_per_s,
        "ttft_ms": 1000 * figures.ttft_s.p50,
        "tpot_ms": 1000 * figures.tpot_s.p50,
        **_rates(figures.acceptance),
    }


def _rates(acceptance: Acceptance | None) -> Figures:
    if acceptance is None or not acceptance.num_draft_tokens:
        return {}
    return {
        "draft_acceptance_rate": acceptance.draft_acceptance_rate,
        "mean_acceptance_length": acceptance.mean_acceptance_length,
    }


def _batch(
    settings: Settings, prompts: PromptIds, streams: int
) -> Callable[[TransformersPeer, int], Figures]:
    """One batch in which all sequences start and end together: what ``generate`` is best at."""

    def run(peer: TransformersPeer, round_index: int) -> Figures:
        ids = prompts.short(round_index, streams)
        return peer.generate(ids, settings.max_tokens, is_assisted=False)

    return run


def _assisted(settings: Settings, prompts: PromptIds) -> Callable[[TransformersPeer, int], Figures]:
    def run(peer: TransformersPeer, round_index: int) -> Figures:
        return peer.generate(prompts.short(round_index, 1), settings.max_tokens, is_assisted=True)

    return run
