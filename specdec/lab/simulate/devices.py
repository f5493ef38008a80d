"""Simulated devices, the workers on them, and the network in front of these."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from specdec.config import StepTimes
from specdec.coordinator.lane import CATCH_UP_TOKENS
from specdec.engine.drafting import DraftEngine
from specdec.engine.runner import ForwardItem
from specdec.engine.simulated import SimulatedRunner, ToyLaw
from specdec.engine.verifying import TargetEngine
from specdec.engine.worker import DraftWorker, TargetWorker
from specdec.lab.simulate.recording import Role, Span
from specdec.lab.simulate.scenario import Scenario
from specdec.lab.simulate.virtual_time import VirtualThread, VirtualTimeLoop
from specdec.messages import ProposeReply, ProposeRequest, VerifyReply, VerifyRequest
from specdec.types import SequenceId

KV_CAPACITY_TOKENS = 1_000_000_000
"""Memory is not what is simulated."""
SPARE_TOKENS = 64
"""Of the context: more than any block behind the last token."""


class Device:
    """One device with its model thread; it notes each forward.

    Args:
        name: of it and its worker.
        role: of its model.
        loop: which makes its time.
    """

    def __init__(self, name: str, role: Role, loop: VirtualTimeLoop) -> None:
        self.name = name
        self.role: Role = role
        self.thread = VirtualThread(loop)
        self.clock: Callable[[], float] = loop.time
        self.spans: list[Span] = []
        self._looks_ahead = False
        self._working_since_s: float | None = None

    def busy_s(self) -> float:
        """Seconds it has worked until now, the forward in progress included."""
        open_s = 0.0 if self._working_since_s is None else self.clock() - self._working_since_s
        return sum(span.end_s - span.start_s for span in self.spans) + open_s

    @contextmanager
    def looking_ahead(self) -> Iterator[None]:
        """Forwards within are not asked for yet."""
        self._looks_ahead = True
        try:
            yield
        finally:
            self._looks_ahead = False

    @contextmanager
    def forward(self, items: Sequence[ForwardItem]) -> Iterator[None]:
        """Note a forward; one that is abandoned is not."""
        self._working_since_s = start_s = self.clock()
        yield
        self._working_since_s = None
        self.spans.append(
            Span(
                name=self._name_of(items),
                start_s=start_s,
                end_s=self.clock(),
                num_sequences=len(items),
                num_tokens=sum(len(item.token_ids) for item in items),
            )
        )

    def _name_of(self, items: Sequence[ForwardItem]) -> str:
        if self._looks_ahead:
            return "look-ahead"
        if self.role == "target":
            is_prefill = any(len(item.token_ids) > item.num_rows for item in items)
            return "prefill" if is_prefill else "verify"
        return "prefill" if any(len(item.token_ids) > CATCH_UP_TOKENS for item in items) else "draft"


class DeviceRunner(SimulatedRunner):
    """A law on a device, which is busy as long as its forwards take."""

    def __init__(self, law: ToyLaw, device: Device, times: StepTimes, scenario: Scenario) -> None:
        super().__init__(
            law,
            max_context=scenario.num_prompt_tokens + scenario.num_tokens + SPARE_TOKENS,
            kv_capacity_tokens=KV_CAPACITY_TOKENS,
            latency=times.of,
            sleep=device.thread.sleep,
            clock=device.clock,
        )
        self._device = device

    def forward(
        self, items: Sequence[ForwardItem], device_token_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `Runner.forward`."""
        with self._device.forward(items):
            return super().forward(items, device_token_ids)


class DeviceDraftEngine(DraftEngine):
    """A draft engine that tells its device when it looks ahead."""

    def __init__(self, runner: DeviceRunner, support: int, device: Device) -> None:
        super().__init__(runner, support)
        self._device = device

    def look_ahead(self, is_interrupted: Callable[[], bool]) -> None:
        """See `DraftEngine.look_ahead`."""
        with self._device.looking_ahead():
            super().look_ahead(is_interrupted)


class DistantDraftWorker(DraftWorker):
    """A draft worker behind a network."""

    def __init__(self, engine: DeviceDraftEngine, device: Device, rpc_s: float) -> None:
        super().__init__(
            engine, worker_id=device.name, model="draft", device=device.name, thread=device.thread
        )
        self._rpc_s = rpc_s

    async def propose(self, request: ProposeRequest) -> ProposeReply:
        await asyncio.sleep(self._rpc_s)
        reply = await super().propose(request)
        await asyncio.sleep(self._rpc_s)
        return reply

    async def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        await asyncio.sleep(self._rpc_s)
        await super().release(sequence_ids)


class DistantTargetWorker(TargetWorker):
    """A target worker behind a network."""

    def __init__(self, engine: TargetEngine, device: Device, rpc_s: float) -> None:
        super().__init__(
            engine, worker_id=device.name, model="target", device=device.name, thread=device.thread
        )
        self._rpc_s = rpc_s

    async def verify(self, request: VerifyRequest) -> VerifyReply:
        await asyncio.sleep(self._rpc_s)
        reply = await super().verify(request)
        await asyncio.sleep(self._rpc_s)
        return reply

    async def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        await asyncio.sleep(self._rpc_s)
        await super().release(sequence_ids)
