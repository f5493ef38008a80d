"""What a simulation cannot go on with; shown as one line by the command."""

from __future__ import annotations

from specdec.errors import SpecDecError


class SimulationError(SpecDecError):
    """The scenario makes no sense, or nothing would ever happen in it again."""
