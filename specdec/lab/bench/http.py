"""As much of HTTP/1.1 as a load generator needs, on asyncio streams."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from specdec.lab.errors import BenchError, RequestFailed

CONNECT_TIMEOUT_S = 10.0
"""A server that does not accept a connection in this time counts as not reachable."""
_READ_SIZE = 65_536


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where an OpenAI-compatible server listens, with or without ``/v1`` in the address given."""

    host: str
    port: int
    is_tls: bool
    prefix: str
    """Path before ``/v1``, empty as a rule."""

    @classmethod
    def parse(cls, url: str) -> Endpoint:
        """Read ``http://host:port[/prefix][/v1]``.

        Raises:
            BenchError: not such an address.
        """
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = None
            parts = parts._replace(netloc="")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BenchError(f"--url {url!r}: an address like http://127.0.0.1:8000 is expected")
        is_tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if is_tls else 80), is_tls, prefix)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.is_tls else 'http'}://{host}:{self.port}{self.prefix}"


@dataclass(frozen=True, slots=True)
class Head:
    status: int
    headers: Mapping[str, str]
    """Names in lower case."""


class Connection:
    """One connection for one exchange; `connect` opens it."""

    def __init__(
        self, endpoint: Endpoint, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._endpoint = endpoint
        self._reader = reader
        self._writer = writer

    async def send(
        self, method: str, path: str, headers: Mapping[str, str], payload: object | None = None
    ) -> Head:
        """Send a request and wait for the head of its answer."""
        body = b"" if payload is None else json.dumps(payload).encode()
        lines = [
            f"{method} {self._endpoint.prefix}{path} HTTP/1.1",
            f"Host: {self._endpoint.host}:{self._endpoint.port}",
            "Connection: close",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        if payload is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        self._writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        await self._writer.drain()
        return _parse_head(await self._reader.readuntil(b"\r\n\r\n"))

    async def pieces(self, head: Head) -> AsyncIterator[bytes]:
        """The body as it arrives.

        Raises:
            asyncio.IncompleteReadError: the connection was closed before the body was complete.
        """
        if head.headers.get("transfer-encoding", "").lower() == "chunked":
            while size := int((await self._reader.readline()).split(b";")[0] or b"0", 16):
                yield (await self._reader.readexactly(size + 2))[:-2]
        elif (length := head.headers.get("content-length")) is not None:
            yield await self._reader.readexactly(int(length))
        else:
            while piece := await self._reader.read(_READ_SIZE):
                yield piece

    async def text(self, head: Head) -> str:
        return b"".join([piece async for piece in self.pieces(head)]).decode(errors="replace")


@asynccontextmanager
async def connect(endpoint: Endpoint) -> AsyncIterator[Connection]:
    """A connection of its own for one exchange.

    Raises:
        RequestFailed: nothing accepts connections there, with kind ``connection``.
    """
    # Without a limit of its own, a peer that does not say goodbye holds a TLS connection for half a minute.
    tls: dict[str, Any] = (
        {"ssl": ssl.create_default_context(), "ssl_shutdown_timeout": 1.0} if endpoint.is_tls else {}
    )
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port, **tls)
    except TimeoutError as error:
        raise RequestFailed("connection", f"no connection in {CONNECT_TIMEOUT_S:.0f} s") from error
    except OSError as error:
        raise RequestFailed("connection", f"cannot connect: {error.strerror or error}") from error
    try:
        yield Connection(endpoint, reader, writer)
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def data_lines(pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """The ``data:`` values of an event stream, whatever pieces it arrives in."""
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
    if rest.startswith(b"data:"):
        yield rest[5:].strip()


def error_message(body: str) -> str:
    """What an error answer says, in one line: OpenAI's envelope where it has that form."""
    try:
        content: Any = json.loads(body)
    except ValueError:
        return " ".join(body.split())[:300]
    if isinstance(content, dict):
        inner = content.get("error", content)
        if isinstance(inner, dict):
            content = inner.get("message", inner)
        elif isinstance(inner, str):
            content = inner
    return " ".join(str(content).split())[:300]


def _parse_head(raw: bytes) -> Head:
    first, *lines = raw.decode("latin-1").split("\r\n")
    fields = (line.partition(":") for line in lines if line)
    try:
        status = int(first.split()[1])
    except (IndexError, ValueError) as error:
        raise RequestFailed("broken_stream", f"not an HTTP answer: {first[:80]!r}") from error
    return Head(status, {name.strip().lower(): value.strip() for name, _, value in fields})
