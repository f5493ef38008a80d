"""The called side: methods behind one listening port."""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

from specdec.errors import ProtocolError, SpecDecError
from specdec.messages import Endpoint
from specdec.transport.frames import Call, Cancel, Done, Failed, Frame, FrameConnection, Hello, Item, raw
from specdec.transport.methods import Method

logger = logging.getLogger(__name__)

Unary = Callable[..., Awaitable[Any]]
Streaming = Callable[..., AsyncGenerator[Any, None]]


class CallServer:
    """Answers calls until closed; several at a time, from any number of connections.

    Args:
        unary: methods that return one value.
        streaming: methods that yield values; closed when the caller is gone.
    """

    def __init__(
        self, unary: Mapping[Method[Any], Unary], streaming: Mapping[Method[Any], Streaming] | None = None
    ) -> None:
        self.unary = {method.name: (method, function) for method, function in unary.items()}
        self.streaming = {method.name: (method, function) for method, function in (streaming or {}).items()}
        self.token = secrets.token_hex(32)
        self._server: asyncio.Server | None = None
        self._peers: set[_Peer] = set()

    async def start(self, host: str) -> Endpoint:
        """Listen on a free port of one of this machine's addresses; how to get there."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._accept, host, 0)
        return Endpoint(host=host, port=self._server.sockets[0].getsockname()[1], token=self.token)

    async def close(self) -> None:
        """Stop listening and drop all connections: what runs for them is cancelled."""
        if self._server is not None:
            self._server.close()
        for peer in list(self._peers):
            peer.connection.close()

    def _accept(self) -> FrameConnection:
        peer = _Peer(self, self._peers.discard)
        self._peers.add(peer)
        return peer.connection


class _Peer:
    """One connection and the calls that run for it."""

    def __init__(self, server: CallServer, on_lost: Callable[[_Peer], None]) -> None:
        self._server = server
        self._on_lost = on_lost
        self._is_trusted = False
        self._running: dict[int, asyncio.Task[None]] = {}
        self.connection = FrameConnection(self._take, self._lose)

    def _take(self, frame: Frame) -> None:
        if isinstance(frame, Hello):
            self._is_trusted = hmac.compare_digest(frame.token.encode(), self._server.token.encode())
        if not self._is_trusted:
            raise ProtocolError("a caller without our token")
        if isinstance(frame, Call):
            task = asyncio.get_running_loop().create_task(self._answer(frame))
            self._running[frame.call_id] = task
            task.add_done_callback(lambda _: self._running.pop(frame.call_id, None))
        elif isinstance(frame, Cancel) and (running := self._running.get(frame.call_id)):
            running.cancel()

    def _lose(self) -> None:
        for task in list(self._running.values()):
            task.cancel()
        self._on_lost(self)

    async def _answer(self, call: Call) -> None:
        try:
            answer = await self._run(call)
        except SpecDecError as error:
            answer = Failed(
                call.call_id, type(error).__name__, error.message, error.param, error.retry_after_s
            )
        except Exception as error:
            logger.exception("%s failed", call.method)
            answer = Failed(call.call_id, "", f"{type(error).__name__}: {error}")
        self.connection.send(answer)

    async def _run(self, call: Call) -> Frame:
        if found := self._server.unary.get(call.method):
            method, function = found
            value = await function(*method.decode_args(call.args))
            return Done(call.call_id, raw(value))
        if found_stream := self._server.streaming.get(call.method):
            method, generate = found_stream
            async with aclosing(generate(*method.decode_args(call.args))) as values:
                async for value in values:
                    self.connection.send(Item(call.call_id, raw(value)))
                    await self.connection.drained()
            return Done(call.call_id, raw(None))
        raise ProtocolError(f"there is no method {call.method}")
