"""The calling side: one connection to one server, made when it is first needed."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from typing import Any, TypeVar

from specdec import errors
from specdec.errors import SpecDecError, WorkerError
from specdec.messages import Endpoint
from specdec.transport.frames import Call, Cancel, Done, Failed, Frame, FrameConnection, Hello, Item, raw
from specdec.transport.methods import Method

Answer = TypeVar("Answer")

CONNECT_TIMEOUT_S = 2.0
LAST_LOOK_S = 0.05
"""Once the time of a call is up, whether its answer has come by now."""


class ChannelLost(WorkerError):
    """There is no connection to the other process, or it broke during the call."""


class CallTimeout(WorkerError):
    """The other process did not answer in time."""


class CallFailed(WorkerError):
    """It answered, but the method raised something unforeseen."""


class Channel:
    """Calls methods of a `CallServer`; any number at a time.

    Args:
        endpoint: where it listens.
        name: of the other process, for errors.
    """

    def __init__(self, endpoint: Endpoint, name: str) -> None:
        self._endpoint = endpoint
        self._name = name
        self._connection: FrameConnection | None = None
        self._connecting = asyncio.Lock()
        self._call_ids = itertools.count()
        self._answers: dict[int, asyncio.Future[Done]] = {}
        self._streams: dict[int, asyncio.Queue[Item | Done | SpecDecError]] = {}
        self._carriers: dict[int, FrameConnection] = {}
        """Which connection a call went over: it is lost with that one, and with no other."""
        self._is_closed = False

    async def call(self, method: Method[Answer], *args: object, timeout_s: float) -> Answer:
        """Call a method that returns one value.

        Raises:
            ChannelLost: the connection broke, or there is none.
            CallTimeout: no answer within ``timeout_s``; the call is cancelled there.
            CallFailed: the method raised something unforeseen, or does not exist.
            SpecDecError: what the method raised on purpose.
        """
        call_id = next(self._call_ids)
        answer = self._answers[call_id] = asyncio.get_running_loop().create_future()
        is_over = False
        try:
            async with asyncio.timeout(timeout_s):
                await self._send(call_id, method.name, args)
                # Not cancelled with the timeout: it may be there after all.
                done = await asyncio.shield(answer)
            is_over = True
        except TimeoutError:
            # A process that was stopped for a while finds its timers due before it has read what came
            # meanwhile: the other end is not to blame for that.
            await asyncio.wait({answer}, timeout=LAST_LOOK_S)
            if not answer.done():
                raise CallTimeout(f"{self._name}: no answer to {method.name} in {timeout_s:g} s") from None
            is_over, done = True, answer.result()
        except SpecDecError:
            is_over = True
            raise
        finally:
            del self._answers[call_id]
            self._cancel_unless(is_over, call_id)
        return method.decode_answer(done.body)

    async def stream(self, method: Method[Answer], *args: object) -> AsyncGenerator[Answer, None]:
        """Iterate over what a method yields; closing this cancels it there.

        Raises:
            ChannelLost: the connection broke, or there is none.
            CallFailed: the method raised something unforeseen, or does not exist.
            SpecDecError: what the method raised on purpose.
        """
        call_id = next(self._call_ids)
        items = self._streams[call_id] = asyncio.Queue()
        is_over = False
        try:
            await self._send(call_id, method.name, args)
            while isinstance(item := await items.get(), Item):
                yield method.decode_answer(item.body)
            is_over = True
            if isinstance(item, SpecDecError):
                raise item
        finally:
            del self._streams[call_id]
            self._cancel_unless(is_over, call_id)

    def close(self) -> None:
        """Drop the connection: whoever waits gets `ChannelLost`, and so does whoever calls later."""
        self._is_closed = True
        if self._connection is not None:
            self._connection.close()

    async def _send(self, call_id: int, method: str, args: tuple[object, ...]) -> None:
        connection = self._carriers[call_id] = await self._connected()
        connection.send(Call(call_id, method, raw(args)))

    async def _connected(self) -> FrameConnection:
        if self._connection is not None and self._connection.is_open:
            return self._connection
        async with self._connecting:
            if not self._is_closed and (self._connection is None or not self._connection.is_open):
                self._connection = await self._connect()
            if self._is_closed or self._connection is None:
                self.close()  # it may have been closed while it was being connected
                raise ChannelLost(f"{self._name} does not run any more")
            return self._connection

    async def _connect(self) -> FrameConnection:
        loop = asyncio.get_running_loop()
        connection = FrameConnection(self._take, lambda: self._lose(connection))
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await loop.create_connection(lambda: connection, self._endpoint.host, self._endpoint.port)
        except (OSError, TimeoutError) as error:
            raise ChannelLost(
                f"{self._name} cannot be reached: {error or 'no connection in time'}"
            ) from error
        connection.send(Hello(self._endpoint.token))
        return connection

    def _take(self, frame: Frame) -> None:
        if isinstance(frame, Failed):
            self._finish(frame.call_id, self._error(frame))
        elif isinstance(frame, Done):
            self._finish(frame.call_id, frame)
        elif isinstance(frame, Item) and (items := self._streams.get(frame.call_id)):
            items.put_nowait(frame)

    def _finish(self, call_id: int, end: Done | SpecDecError) -> None:
        """Hand an answer to who waits for it; nobody does once its time is over."""
        if items := self._streams.get(call_id):
            items.put_nowait(end)
        answer = self._answers.get(call_id)
        if answer is None or answer.done():
            return
        if isinstance(end, SpecDecError):
            answer.set_exception(end)
        else:
            answer.set_result(end)

    def _lose(self, connection: FrameConnection) -> None:
        for call_id, carrier in list(self._carriers.items()):
            if carrier is connection:
                self._finish(call_id, ChannelLost(f"{self._name}: the connection is lost"))

    def _cancel_unless(self, is_over: bool, call_id: int) -> None:
        carrier = self._carriers.pop(call_id, None)
        if not is_over and carrier is not None:
            carrier.send(Cancel(call_id))

    def _error(self, failed: Failed) -> SpecDecError:
        kind: Any = getattr(errors, failed.error, None) if failed.error else None
        if isinstance(kind, type) and issubclass(kind, SpecDecError):
            return kind(failed.message, failed.param, failed.retry_after_s)
        return CallFailed(f"{self._name}: {failed.message}")
