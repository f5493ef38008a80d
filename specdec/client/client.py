"""The clients: chat, complete, stream; for threads and for event loops."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Iterator, Sequence
from contextlib import aclosing, closing
from pathlib import Path
from types import TracebackType
from typing import TypeVar, Unpack
from urllib.parse import urlsplit

from specdec.client.grpc_transport import AsyncGrpcTransport, GrpcTransport
from specdec.client.http_transport import AsyncHttpTransport, HttpTransport
from specdec.client.options import Message, Options, Prompt
from specdec.client.results import Answer, Piece
from specdec.client.retrying import Tries
from specdec.client.transport import AsyncTransport, Transport
from specdec.errors import ConfigError, SpecDecError

DEFAULT_TIMEOUT_S = 600.0
DEFAULT_MAX_RETRIES = 2

Result = TypeVar("Result")


class Client:
    """Talks to one server; use as a context manager, or close it. May be shared by threads.

    Args:
        base_url: ``http://`` or ``https://`` for HTTP, ``grpc://`` or ``grpcs://`` (over TLS) for gRPC, with
            host and port, as in ``grpc://127.0.0.1:9000``.
        api_key: where the server asks for one.
        timeout_s: for a request with all its tries, to the end of its answer.
        max_retries: tries after the first, of what was refused with 429 or 503 (RESOURCE_EXHAUSTED,
            UNAVAILABLE), after the pause the server asks for. A stream that has begun is never tried again.
        ca_file: PEM certificates to trust instead of the system's.

    Raises:
        ConfigError: the URL is none of these.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        max_retries: int = DEFAULT_MAX_RETRIES,
        ca_file: Path | str | None = None,
    ) -> None:
        grpc_address, is_secure = _parsed(base_url)
        self._transport: Transport = (
            HttpTransport(base_url, api_key, ca_file)
            if grpc_address is None
            else GrpcTransport(grpc_address, api_key, ca_file, is_secure=is_secure)
        )
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        self._sleep: Callable[[float], None] = time.sleep

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give connections back."""
        self._transport.close()

    def chat(self, messages: Sequence[Message], **options: Unpack[Options]) -> Answer:
        """Answer a conversation.

        Raises:
            SpecDecError: one of `specdec.errors`, as the server named it.
        """
        return self._try(lambda timeout_s: self._transport.generate(messages, options, timeout_s))

    def complete(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> Answer:
        """Continue a text or token ids; raises as `chat` does."""
        return self._try(lambda timeout_s: self._transport.generate(prompt, options, timeout_s))

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Iterator[Piece]:
        """Yield the answer to a conversation, or the continuation of a text or of token ids, as it comes.

        The server is asked when the first piece is. Leaving the iterator cancels the request.

        Raises:
            SpecDecError: as `chat` does; also between pieces.
        """

        def begin(timeout_s: float) -> tuple[Piece, Generator[Piece]]:
            pieces = self._transport.stream(prompt, options, timeout_s)
            return next(pieces), pieces

        first, rest = self._try(begin)
        with closing(rest):
            yield first
            yield from rest

    def models(self) -> tuple[str, ...]:
        """Names that the option ``model`` may have now; raises as `chat` does."""
        return self._try(self._transport.models)

    def _try(self, call: Callable[[float], Result]) -> Result:
        tries = Tries(self._max_retries, self._timeout_s)
        while True:
            try:
                return call(tries.remaining_s)
            except SpecDecError as error:
                self._sleep(tries.pause_s(error))


class AsyncClient:
    """`Client` for an event loop: the same arguments and errors; ``stream`` is an asynchronous iterator."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        max_retries: int = DEFAULT_MAX_RETRIES,
        ca_file: Path | str | None = None,
    ) -> None:
        grpc_address, is_secure = _parsed(base_url)
        self._transport: AsyncTransport = (
            AsyncHttpTransport(base_url, api_key, ca_file)
            if grpc_address is None
            else AsyncGrpcTransport(grpc_address, api_key, ca_file, is_secure=is_secure)
        )
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        self._sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Give connections back."""
        await self._transport.close()

    async def chat(self, messages: Sequence[Message], **options: Unpack[Options]) -> Answer:
        """Answer a conversation; raises as `Client.chat` does."""
        return await self._try(lambda timeout_s: self._transport.generate(messages, options, timeout_s))

    async def complete(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> Answer:
        """Continue a text or token ids; raises as `Client.chat` does."""
        return await self._try(lambda timeout_s: self._transport.generate(prompt, options, timeout_s))

    async def stream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncIterator[Piece]:
        """Yield as `Client.stream` does."""

        async def begin(timeout_s: float) -> tuple[Piece, AsyncGenerator[Piece, None]]:
            pieces = self._transport.stream(prompt, options, timeout_s)
            return await anext(pieces), pieces

        first, rest = await self._try(begin)
        async with aclosing(rest):
            yield first
            async for piece in rest:
                yield piece

    async def models(self) -> tuple[str, ...]:
        """Return as `Client.models` does."""
        return await self._try(self._transport.models)

    async def _try(self, call: Callable[[float], Awaitable[Result]]) -> Result:
        tries = Tries(self._max_retries, self._timeout_s)
        while True:
            try:
                return await call(tries.remaining_s)
            except SpecDecError as error:
                await self._sleep(tries.pause_s(error))


def _parsed(base_url: str) -> tuple[str | None, bool]:
    """The address for gRPC, None for HTTP; and whether it is over TLS."""
    parts = urlsplit(base_url)
    if parts.scheme in ("http", "https") and parts.netloc:
        return None, parts.scheme == "https"
    if parts.scheme in ("grpc", "grpcs") and parts.netloc and parts.path in ("", "/"):
        return parts.netloc, parts.scheme == "grpcs"
    raise ConfigError(f"base_url must be http(s)://HOST:PORT or grpc(s)://HOST:PORT, got {base_url!r}")
