"""The gateway's one view of the rest of the system: requests go in, committed tokens come out.

`specdec.cluster` implements it over Ray Serve; tests implement it in process.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Protocol

from specdec.messages import CoordinatorStatus
from specdec.types import GenerationRequest, TokenChunk


class Backend(Protocol):
    def generate(
        self, request: GenerationRequest, not_before: Callable[[], float]
    ) -> AsyncGenerator[tuple[TokenChunk, ...], None]:
        """Yield what the rounds committed, a chunk a round; the last chunk has ``finish_reason`` set.

        All chunks that are there when the caller asks for more come together, so a caller that is slow, or
        wants to be asked less often, gets fewer and larger batches.

        Closing the generator before its end cancels the sequence: both workers free its KV cache within
        a round.

        Args:
            request: the sequence.
            not_before: asked with every step: the time, in the running loop's, before which the caller wants
                to hear of nothing but the end.

        Raises:
            TooManyRequests: the waiting queue is full.
            ServiceUnavailable: no coordinator or target worker is ready, within a bounded wait.
            GenerationFailed: the sequence failed after it had started.
        """
        ...

    def is_ready(self) -> bool:
        """Whether a request sent now would be served."""
        ...

    def statuses(self) -> tuple[CoordinatorStatus, ...]:
        """The coordinators known, as of the last poll."""
        ...
