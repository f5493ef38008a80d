"""A server's error as one of `specdec.errors`."""

from __future__ import annotations

from specdec.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    ServiceUnavailable,
    SpecDecError,
    TooManyRequests,
    Unauthenticated,
    UnknownModel,
)

_BY_CODE = {
    error.code: error
    for error in (
        ContextLengthExceeded,
        DeadlineExceeded,
        ServiceUnavailable,
        TooManyRequests,
        Unauthenticated,
        UnknownModel,
    )
}


def told(
    code: str | None,
    status_kind: type[SpecDecError],
    message: str,
    param: str | None,
    retry_after_s: float | None = None,
) -> SpecDecError:
    """Return the error with this code, or where the code is none of ours, the one its status stands for."""
    kind: type[SpecDecError] = _BY_CODE.get(code, status_kind) if code else status_kind
    return kind(message, param, retry_after_s)
