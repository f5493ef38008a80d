"""When a client should try again, alike over HTTP and gRPC."""

from __future__ import annotations

from specdec.errors import ServiceUnavailable, SpecDecError, TooManyRequests

DEFAULT_RETRY_AFTER_S = 1.0
"""At least, and where nothing was measured: a queue moves in milliseconds, a worker is back in seconds."""


def retry_after_s(error: SpecDecError) -> float | None:
    """Seconds, at least one; None: trying again as it stands is of no use."""
    if not isinstance(error, TooManyRequests | ServiceUnavailable):
        return None
    return max(error.retry_after_s or 0.0, DEFAULT_RETRY_AFTER_S)
