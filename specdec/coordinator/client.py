"""A gateway's side of one coordinator: submit, listen on one long-lived stream, share out the chunks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import Protocol

from specdec.errors import CoordinatorLost, GenerationFailed, SpecDecError
from specdec.messages import CoordinatorStatus, RoundUpdate
from specdec.types import GenerationRequest, SequenceId, TokenChunk

logger = logging.getLogger(__name__)


class CoordinatorPort(Protocol):
    """What a client needs of a coordinator; `Coordinator` itself has it, and so has its Serve handle."""

    async def submit(self, gateway_id: str, request: GenerationRequest) -> None: ...

    async def cancel(self, sequence_ids: Sequence[SequenceId]) -> None: ...

    def updates(self, gateway_id: str) -> AsyncGenerator[RoundUpdate, None]: ...

    async def poll(self, gateway_id: str) -> CoordinatorStatus: ...


class CoordinatorClient:
    """Use `generate` for requests; `close` when the coordinator is gone.

    Args:
        port: the coordinator.
        gateway_id: of this gateway.
        poll_interval_s: how often the coordinator hears of us and we of its state.
    """

    def __init__(self, port: CoordinatorPort, gateway_id: str, poll_interval_s: float = 0.5) -> None:
        self.status: CoordinatorStatus | None = None
        """As of the last poll; None when it was not answered."""
        self._port = port
        self._gateway_id = gateway_id
        self._poll_interval_s = poll_interval_s
        self._queues: dict[SequenceId, asyncio.Queue[TokenChunk | SpecDecError]] = {}
        self._background: set[asyncio.Task[None]] = set()
        loop = asyncio.get_running_loop()
        self._listener = loop.create_task(self._listen())
        self._poller = loop.create_task(self._poll_forever())

    @property
    def is_connected(self) -> bool:
        """False once the stream of updates has ended."""
        return not self._listener.done()

    @property
    def is_available(self) -> bool:
        """Whether it takes requests: connected, and the last poll was answered."""
        return self.is_connected and self.status is not None

    @property
    def num_requests(self) -> int:
        return len(self._queues)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        """See `specdec.gateway.backend.Backend.generate`."""
        queue: asyncio.Queue[TokenChunk | SpecDecError] = asyncio.Queue()
        self._queues[request.sequence_id] = queue
        is_over = False
        try:
            await self._port.submit(self._gateway_id, request)
            while not is_over:
                item = await queue.get()
                if isinstance(item, SpecDecError):
                    raise item
                is_over = item.is_last
                if item.error is not None:
                    raise GenerationFailed(item.error)
                yield item
        finally:
            del self._queues[request.sequence_id]
            if not is_over:
                self._in_background(self._cancel(request.sequence_id))

    async def close(self) -> None:
        tasks = (self._listener, self._poller)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _cancel(self, sequence_id: SequenceId) -> None:
        try:
            await self._port.cancel([sequence_id])
        except Exception as error:
            logger.info("could not cancel %s (%s); the coordinator will notice by itself", sequence_id, error)

    def _in_background(self, coroutine: Coroutine[None, None, None]) -> None:
        # The caller may be closing and cannot await: cancelling goes on without it.
        task = asyncio.get_running_loop().create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _poll_forever(self) -> None:
        while True:
            try:
                self.status = await self._port.poll(self._gateway_id)
            except Exception as error:
                logger.warning("coordinator does not answer: %s", error)
                self.status = None
            await asyncio.sleep(self._poll_interval_s)

    def _share_out(self, update: RoundUpdate) -> None:
        for chunk in update.chunks:
            if queue := self._queues.get(chunk.sequence_id):
                queue.put_nowait(chunk)

    async def _listen(self) -> None:
        error = CoordinatorLost("the coordinator serving this request was lost; please retry")
        try:
            async with aclosing(self._port.updates(self._gateway_id)) as updates:
                async for update in updates:
                    self._share_out(update)
        except asyncio.CancelledError:
            raise
        except Exception as cause:
            logger.warning("stream of updates ended: %s", cause)
        finally:
            # However the stream ended, nobody waits for chunks that cannot come.
            for queue in self._queues.values():
                queue.put_nowait(error)
