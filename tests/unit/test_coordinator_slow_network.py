"""Calls that take their time on the way and on the way back, within their deadlines: the same text, later."""

from __future__ import annotations

import asyncio
import random

import pytest

from specdec.coordinator.local import LocalDraftHandle, LocalTargetHandle
from specdec.messages import ProposeReply, ProposeRequest, VerifyReply, VerifyRequest
from tests.unit.test_coordinator import Draft, Target, ask, running

SLOWEST_S = 0.02
DRAFT_TIMEOUT_S = 1.0


class Way:
    """Delays that differ from call to call, from a seed."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.num_calls = 0

    async def wait(self) -> None:
        self.num_calls += 1
        await asyncio.sleep(self._rng.uniform(0.0, SLOWEST_S))


class FarDraft(Draft):
    def __init__(self, way: Way) -> None:
        super().__init__()

        class Handle(LocalDraftHandle):
            async def propose(self, request: ProposeRequest, timeout_s: float) -> ProposeReply:
                await way.wait()
                reply = await super().propose(request, timeout_s)
                await way.wait()
                return reply

        self.handle = Handle(self.worker)


class FarTarget(Target):
    def __init__(self, way: Way) -> None:
        super().__init__()

        class Handle(LocalTargetHandle):
            async def verify(self, request: VerifyRequest, timeout_s: float) -> VerifyReply:
                await way.wait()
                reply = await super().verify(request, timeout_s)
                await way.wait()
                return reply

        self.handle = Handle(self.worker)


@pytest.mark.parametrize("pipeline", ["serial", "lookahead", "groups"])
@pytest.mark.parametrize("far", ["draft", "target", "both"])
async def test_a_slow_network_changes_no_text_and_loses_no_draft(pipeline, far):
    requests = [ask(f"s{number}", prompt=3 + number, max_tokens=30) for number in range(3)]
    async with running([Target()], [], pipeline=pipeline) as system:
        alone = [await system.text(request) for request in requests]
    way = Way(seed=1)
    target = FarTarget(way) if far != "draft" else Target()
    draft = FarDraft(way) if far != "target" else Draft()
    async with running([target], [draft], pipeline=pipeline, draft_timeout_s=DRAFT_TIMEOUT_S) as system:
        texts = await asyncio.gather(*(system.text(request) for request in requests))
        status = system.coordinator.status()
        await system.is_idle()
    assert list(texts) == alone
    assert way.num_calls > 10
    assert status.num_accepted_draft_tokens > 20
