"""What travels on a connection: frames behind their length, from one asyncio transport to another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import msgspec

from specdec.errors import ProtocolError
from specdec.transport.codec import Decoder, encode

LENGTH_BYTES = 4
MAX_FRAME_BYTES = 256 * 1024 * 1024
"""A prompt of 1,000,000 tokens takes 5 MB; what claims to be larger than this is not one of us."""


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """First on every connection: proof that the caller may call."""

    token: str


class Call(msgspec.Struct, frozen=True, array_like=True, tag=True):
    call_id: int
    method: str
    args: msgspec.Raw


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Nobody waits for this call any more."""

    call_id: int


class Item(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One of the values of a call that answers with a stream."""

    call_id: int
    body: msgspec.Raw


class Done(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer, or the end of a stream."""

    call_id: int
    body: msgspec.Raw


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What the method raised."""

    call_id: int
    error: str
    """Name of a class of `specdec.errors`; empty for anything else."""
    message: str
    param: str | None = None
    retry_after_s: float | None = None


Frame = Hello | Call | Cancel | Item | Done | Failed
_decode: Decoder[Frame] = Decoder(Frame)  # type: ignore[arg-type]


def raw(value: object) -> msgspec.Raw:
    """A value inside a frame."""
    return msgspec.Raw(encode(value))


class FrameConnection(asyncio.Protocol):
    """One end of a connection.

    Args:
        on_frame: takes each frame; what it raises closes the connection.
        on_lost: called once, when the connection has ended, however it did.
    """

    def __init__(self, on_frame: Callable[[Frame], None], on_lost: Callable[[], None]) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._can_write = asyncio.Event()
        self._can_write.set()

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, frame: Frame) -> None:
        """Hand a frame to the operating system, or to the buffer in front of it; closed, it drops them."""
        if self._transport is None or not self.is_open:
            return
        data = encode(frame)
        self._transport.write(len(data).to_bytes(LENGTH_BYTES, "little") + data)

    async def drained(self) -> None:
        """Until the other end has taken most of what was sent; at once when the connection is lost."""
        await self._can_write.wait()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by class

    def connection_lost(self, exc: Exception | None) -> None:
        self._can_write.set()
        self._on_lost()

    def pause_writing(self) -> None:
        self._can_write.clear()

    def resume_writing(self) -> None:
        self._can_write.set()

    def data_received(self, data: bytes) -> None:
        self._received += data
        try:
            while (frame := self._next_frame()) is not None:
                self._on_frame(frame)
        except ProtocolError:
            self.close()

    def _next_frame(self) -> Frame | None:
        start = LENGTH_BYTES
        if len(self._received) < start:
            return None
        size = int.from_bytes(self._received[:start], "little")
        if size > MAX_FRAME_BYTES:
            raise ProtocolError(f"a frame of {size} bytes")
        if len(self._received) < start + size:
            return None
        data = bytes(self._received[start : start + size])
        del self._received[: start + size]
        return _decode(data)
