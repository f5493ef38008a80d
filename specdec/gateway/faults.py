"""Our bugs in the log: where they happened, and nothing that a client or an operator wants kept."""

from __future__ import annotations

import logging
import traceback

from specdec.errors import SpecDecError

MAX_PLACES = 6
MAX_CAUSES = 4


def log_fault(logger: logging.Logger, what: str, error: BaseException) -> None:
    """Write one line: kinds of error, modules and lines.

    Not the message of a foreign error, which may quote a prompt, nor a trace, which names folders; at level
    DEBUG the trace follows.
    """
    logger.error("%s: %s", what, describe(error))
    logger.debug("%s: trace", what, exc_info=error)


def describe(error: BaseException) -> str:
    """Like ``KeyError at specdec.gateway.text:70 < specdec.gateway.service:161, from ValueError at ...``."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain and len(chain) < MAX_CAUSES:
        chain.append(cause)
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return ", from ".join(_describe_one(item) for item in chain)


def _describe_one(error: BaseException) -> str:
    places = [
        f"{frame.f_globals.get('__name__', '?')}:{line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    kind = type(error).__name__
    said = f" ({error.message})" if isinstance(error, SpecDecError) else ""
    return f"{kind}{said} at {' < '.join(places[: -MAX_PLACES - 1 : -1])}" if places else f"{kind}{said}"
