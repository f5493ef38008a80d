"""What a chaos run cannot go on with; shown as one line by the command."""

from __future__ import annotations

from specdec.errors import SpecDecError


class ChaosError(SpecDecError):
    """The run cannot be made: no server, a bad option, or texts that are not reproducible without faults."""
