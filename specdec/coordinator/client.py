"""A gateway's side of one coordinator: submit, listen on one long-lived stream, share out the chunks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
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


def at_once() -> float:
    """A `not_before` of `CoordinatorClient.batches` that never waits."""
    return 0.0


class _Mailbox:
    """One sequence's chunks between the stream of updates and its reader, who may be slower.

    It holds at most what the sequence may still say, since nobody but the sequence puts anything in.
    """

    def __init__(self) -> None:
        self._chunks: list[TokenChunk] = []
        self._error: SpecDecError | None = None
        self._is_over = False
        self._reader: asyncio.Future[None] | None = None
        self._due_s = 0.0

    def put(self, chunk: TokenChunk) -> None:
        self._chunks.append(chunk)
        self._is_over = self._is_over or chunk.is_last
        self._wake()

    def fail(self, error: SpecDecError) -> None:
        """Nothing more will come; what is there can still be read."""
        self._error = error
        self._is_over = True
        self._wake()

    async def take(self, not_before_s: float) -> tuple[TokenChunk, ...]:
        """Everything there is, once there is something; the end of the sequence does not wait for the time.

        Args:
            not_before_s: in the running loop's time.

        Raises:
            SpecDecError: the one given to `fail`, when all chunks have been read.
        """
        self._due_s = not_before_s
        while not self._is_ready():
            await self._next_wake()
        if not self._chunks and self._error is not None:
            raise self._error
        chunks, self._chunks = tuple(self._chunks), []
        return chunks

    def _is_ready(self) -> bool:
        loop_time_s = asyncio.get_running_loop().time()
        return self._is_over or (bool(self._chunks) and loop_time_s >= self._due_s)

    async def _next_wake(self) -> None:
        """Until the time has come, where only that is missing, else until something is put in."""
        loop = asyncio.get_running_loop()
        self._reader = loop.create_future()
        timer = loop.call_at(self._due_s, self._wake_reader) if self._due_s > loop.time() else None
        try:
            await self._reader
        finally:
            self._reader = None
            if timer is not None:
                timer.cancel()

    def _wake(self) -> None:
        # Before its time a reader sleeps on: that is what spares the work.
        if self._reader is not None and self._is_ready():
            self._wake_reader()

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class CoordinatorClient:
    """Use `batches` or `generate` for requests; `close` when the coordinator is gone.

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
        self._mailboxes: dict[SequenceId, _Mailbox] = {}
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
        return len(self._mailboxes)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        """Chunk by chunk, what `batches` gives."""
        async with aclosing(self.batches(request)) as batches:
            async for batch in batches:
                for chunk in batch:
                    yield chunk

    async def batches(
        self, request: GenerationRequest, not_before: Callable[[], float] = at_once
    ) -> AsyncGenerator[tuple[TokenChunk, ...], None]:
        """See `specdec.gateway.backend.Backend.generate`."""
        mailbox = _Mailbox()
        self._mailboxes[request.sequence_id] = mailbox
        is_over = False
        try:
            await self._port.submit(self._gateway_id, request)
            while not is_over:
                chunks = await mailbox.take(not_before())
                last = chunks[-1]
                is_over = last.is_last
                good = chunks if last.error is None else chunks[:-1]
                if good:
                    yield good
                if last.error is not None:
                    raise GenerationFailed(last.error)
        finally:
            del self._mailboxes[request.sequence_id]
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
            if mailbox := self._mailboxes.get(chunk.sequence_id):
                mailbox.put(chunk)

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
            for mailbox in self._mailboxes.values():
                mailbox.fail(error)
