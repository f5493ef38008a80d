"""What a measurement cannot go on with; shown as one line by the command."""

from __future__ import annotations

from specdec.errors import SpecDecError


class BenchError(SpecDecError):
    """The measurement as a whole cannot be made: no server, no such model, no request that succeeded."""


class RequestFailed(SpecDecError):
    """One request of a measurement failed; it is counted under ``kind`` and the others go on."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(kind, message)
        self.kind = kind
        self.message = message
