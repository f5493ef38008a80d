"""What a coordinator reports of its load, for whoever decides how many workers there are."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes import eventually
from tests.unit.test_coordinator import Draft, Target, ask, running

IDLE = {"num_running": 0, "num_waiting": 0, "kv_wanted_tokens": 0, "round_s": 0.0, "draft_share": 0.0}


async def test_running_and_waiting_sequences_count_and_so_does_the_cache_promised_to_them():
    target = Target()
    target.handle.gate = asyncio.Event()
    async with running([target], [], max_num_seqs=2) as system:
        assert system.coordinator.load() == IDLE
        tasks = [asyncio.create_task(system.text(ask(f"s{idx}", max_tokens=3000))) for idx in range(3)]
        await eventually(lambda: system.coordinator.load()["num_waiting"] == 1)
        load = system.coordinator.load()
        assert load["num_running"] == 2
        assert load["kv_wanted_tokens"] == 3 * (3 + 512)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        target.handle.gate.set()
        await system.is_idle()
        assert system.coordinator.load() == IDLE


@pytest.mark.parametrize(
    ("draft_s", "target_s", "low", "high"), [(0.001, 0.05, 0.0, 0.3), (0.03, 0.001, 0.7, 1.0)]
)
async def test_the_drafts_share_of_a_round_is_what_passes_until_they_are_there(draft_s, target_s, low, high):
    target = Target(latency=lambda sequences, tokens: target_s)
    draft = Draft(latency=lambda sequences, tokens: draft_s)
    async with running([target], [draft], gamma=4, draft_timeout_s=5.0) as system:
        task = asyncio.create_task(system.text(ask(max_tokens=400)))
        await eventually(lambda: system.coordinator.status().num_output_tokens > 15)
        load = system.coordinator.load()
        assert load["round_s"] > 0.5 * max(draft_s, target_s)
        assert low < load["draft_share"] < high
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
