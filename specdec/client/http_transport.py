"""The client's HTTP side, through httpx."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import httpx

from specdec.client import http_wire as wire
from specdec.client.options import Options, Prompt
from specdec.client.results import Answer, Piece
from specdec.errors import DeadlineExceeded


class HttpTransport:
    """One connection pool.

    Args:
        base_url: of the server, without ``/v1``.
        api_key: sent with every request.
        ca_file: PEM certificates to trust instead of the system's.
        transport: in place of the network.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None,
        ca_file: Path | str | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._client = httpx.Client(**wire.settings(base_url, api_key, ca_file), transport=transport)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def generate(self, prompt: Prompt, options: Options, timeout_s: float) -> Answer:
        """Wait for a whole answer."""
        with wire.network_errors():
            response = self._client.post(**wire.post(prompt, options, timeout_s))
        return wire.answer_of(response)

    def models(self, timeout_s: float) -> tuple[str, ...]:
        """Names of the models that can be used now."""
        with wire.network_errors():
            response = self._client.get(**wire.get_models(timeout_s))
        return wire.models_of(response)

    def stream(self, prompt: Prompt, options: Options, timeout_s: float) -> Generator[Piece]:
        """Yield the pieces with text, then the last."""
        deadline_s = time.monotonic() + timeout_s
        post = wire.post(prompt, options, timeout_s, is_streamed=True)
        with wire.network_errors(), self._client.stream("POST", **post) as response:
            if response.status_code != 200:
                response.read()
                wire.check_status(response)
            reader = wire.StreamReader()
            for line in response.iter_lines():
                _check(deadline_s)
                if piece := reader.read(line):
                    yield piece
            yield reader.end()


class AsyncHttpTransport:
    """The same on an event loop."""

    def __init__(
        self,
        base_url: str,
        api_key: str | None,
        ca_file: Path | str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._client = httpx.AsyncClient(**wire.settings(base_url, api_key, ca_file), transport=transport)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def generate(self, prompt: Prompt, options: Options, timeout_s: float) -> Answer:
        """Wait for a whole answer."""
        with wire.network_errors():
            response = await self._client.post(**wire.post(prompt, options, timeout_s))
        return wire.answer_of(response)

    async def models(self, timeout_s: float) -> tuple[str, ...]:
        """Names of the models that can be used now."""
        with wire.network_errors():
            response = await self._client.get(**wire.get_models(timeout_s))
        return wire.models_of(response)

    async def stream(self, prompt: Prompt, options: Options, timeout_s: float) -> AsyncGenerator[Piece, None]:
        """Yield the pieces with text, then the last."""
        deadline_s = time.monotonic() + timeout_s
        post = wire.post(prompt, options, timeout_s, is_streamed=True)
        with wire.network_errors():
            async with self._client.stream("POST", **post) as response:
                if response.status_code != 200:
                    await response.aread()
                    wire.check_status(response)
                reader = wire.StreamReader()
                async for line in response.aiter_lines():
                    _check(deadline_s)
                    if piece := reader.read(line):
                        yield piece
                yield reader.end()


def _check(deadline_s: float) -> None:
    if time.monotonic() > deadline_s:
        raise DeadlineExceeded("the stream did not end in time")
