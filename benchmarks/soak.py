"""Thousands of mixed requests through one pair in one process: no block is lost, memory does not grow.

    python -m benchmarks.soak --requests 2000

Short and long, greedy and sampled, speculative and plain, with prompts that begin alike; every fifth client
leaves in the middle of its answer. In the end every block of both KV caches must be free and every law of
their bookkeeping must hold; resident memory is noted along the way.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from contextlib import aclosing
from dataclasses import dataclass, field

import psutil

from benchmarks.common import save
from specdec.config import AppConfig, parse_config
from specdec.coordinator.local import LocalSystem, run_local
from specdec.engine.loading import load_runner
from specdec.engine.model_runner import ModelRunner
from specdec.engine.worker import ModelThread
from specdec.models import check_pair, model_info
from specdec.types import GenerationRequest, SamplingParams, SequenceId, StopCriteria, VerificationMode

CONCURRENCY = 32
NUM_PREFIXES = 5
CANCELLED_SHARE = 0.2
SAMPLES = 10


@dataclass
class Tally:
    finished: int = 0
    cancelled: int = 0
    output_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    rss_mib: list[int] = field(default_factory=list)


def config() -> AppConfig:
    return parse_config(
        {
            # Little enough for sequences to give way now and then.
            "target": {"model": "smollm2", "kv_capacity_tokens": 12_288},
            "draft": {"model": "smollm2-draft", "kv_capacity_tokens": 12_288},
            "speculation": {"num_speculative_tokens": 3},
        }
    )


def request(idx: int, rng: random.Random, vocab_size: int) -> GenerationRequest:
    prefix_rng = random.Random(idx % NUM_PREFIXES)
    prefix = [prefix_rng.randrange(100, vocab_size) for _ in range(200)]
    shared = prefix[: rng.choice([0, 30, 200])]
    own = [rng.randrange(100, vocab_size) for _ in range(rng.choice([1, 8, 60, 300]))]
    modes = [VerificationMode.GREEDY, VerificationMode.REJECTION, VerificationMode.COUPLED]
    mode = rng.choice(modes)
    return GenerationRequest(
        sequence_id=SequenceId(f"soak-{idx}"),
        prompt_ids=(*shared, *own),
        sampling=SamplingParams(
            temperature=0.0 if mode is VerificationMode.GREEDY else 1.0, seed=idx, mode=mode
        ),
        stop=StopCriteria(max_tokens=rng.choice([1, 8, 24, 64])),
        max_draft_tokens=rng.choice([0, None, None]),
    )


async def serve_one(system: LocalSystem, wanted: GenerationRequest, leaves: bool, tally: Tally) -> None:
    async with aclosing(system.client.generate(wanted)) as chunks:
        async for chunk in chunks:
            tally.output_tokens += len(chunk.token_ids)
            tally.drafted += chunk.num_drafted
            tally.accepted += chunk.num_accepted
            if leaves:
                tally.cancelled += 1
                return
    tally.finished += 1


async def soak(system: LocalSystem, num_requests: int, vocab_size: int) -> Tally:
    tally, rng, process = Tally(), random.Random(0), psutil.Process()
    slots = asyncio.Semaphore(CONCURRENCY)

    async def one(idx: int) -> None:
        try:
            await serve_one(system, request(idx, rng, vocab_size), rng.random() < CANCELLED_SHARE, tally)
        finally:
            slots.release()

    async with asyncio.TaskGroup() as group:
        for idx in range(num_requests):
            await slots.acquire()
            if idx % max(1, num_requests // SAMPLES) == 0:
                tally.rss_mib.append(process.memory_info().rss // 2**20)
                print(f"{idx} requests, {tally.rss_mib[-1]} MiB resident", flush=True)
            group.create_task(one(idx))
    tally.rss_mib.append(process.memory_info().rss // 2**20)
    return tally


async def wait_until_free(runners: list[ModelRunner], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while any(runner.kv_tokens_in_use for runner in runners):
        if time.monotonic() > deadline:
            raise SystemExit(f"blocks still in use: {[runner.cache.blocks.num_used for runner in runners]}")
        await asyncio.sleep(0.1)


def load(values: AppConfig) -> tuple[ModelRunner, ModelRunner, int]:
    assert values.draft is not None
    info, pair = model_info(values.target.model), check_pair(values.target.model, values.draft.model)
    target = load_runner(values.target, vocab_size=info.vocab_size, max_context=info.max_context)
    draft = load_runner(values.draft, vocab_size=pair.vocab_size, max_context=pair.draft_context)
    return target, draft, info.vocab_size


async def run(num_requests: int) -> None:
    values, thread = config(), ModelThread()
    target, draft, vocab_size = thread.run(lambda: load(values))
    started_s = time.perf_counter()
    async with run_local(values, target, draft, thread) as system:
        tally = await soak(system, num_requests, vocab_size)
        await wait_until_free([target, draft])
    for runner in (target, draft):
        runner.cache.blocks.check_invariants()
    settled = tally.rss_mib[len(tally.rss_mib) // 4 :]
    figures = {
        "requests": num_requests,
        "finished": tally.finished,
        "cancelled": tally.cancelled,
        "output_tokens": tally.output_tokens,
        "accepted_of_drafted": f"{tally.accepted}/{tally.drafted}",
        "seconds": round(time.perf_counter() - started_s, 1),
        "resident_mib": tally.rss_mib,
        "growth_behind_the_first_quarter_mib": settled[-1] - settled[0],
        "blocks_in_use_at_the_end": [target.cache.blocks.num_used, draft.cache.blocks.num_used],
    }
    print(figures)
    save("soak", figures)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=2000)
    asyncio.run(run(parser.parse_args().requests))


if __name__ == "__main__":
    main()
