"""What the clients ask of a protocol: one try each, with errors of `specdec.errors`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from typing import Protocol

from specdec.client.options import Options, Prompt
from specdec.client.results import Answer, Piece


class Transport(Protocol):
    """For threads."""

    def generate(self, prompt: Prompt, options: Options, timeout_s: float) -> Answer:
        """Wait for a whole answer."""
        ...

    def stream(self, prompt: Prompt, options: Options, timeout_s: float) -> Generator[Piece]:
        """Yield pieces; closing the generator cancels the request."""
        ...

    def models(self, timeout_s: float) -> tuple[str, ...]:
        """Names of the models that can be used now."""
        ...

    def close(self) -> None:
        """Give connections back."""
        ...


class AsyncTransport(Protocol):
    """For an event loop."""

    async def generate(self, prompt: Prompt, options: Options, timeout_s: float) -> Answer:
        """Wait for a whole answer."""
        ...

    def stream(self, prompt: Prompt, options: Options, timeout_s: float) -> AsyncGenerator[Piece, None]:
        """Yield pieces; closing the generator cancels the request."""
        ...

    async def models(self, timeout_s: float) -> tuple[str, ...]:
        """Names of the models that can be used now."""
        ...

    async def close(self) -> None:
        """Give connections back."""
        ...
