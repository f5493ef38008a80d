"""How many tokens to draft per sequence and round."""

from __future__ import annotations

from typing import Protocol


class GammaPolicy(Protocol):
    """Chooses gamma; asked once per sequence and round."""

    def num_speculative_tokens(self, batch_size: int) -> int:
        """Tokens to draft for each sequence of a lane that decodes ``batch_size`` together; 0 is plain."""
        ...


class FixedGamma:
    """The same gamma at any load."""

    def __init__(self, num_speculative_tokens: int) -> None:
        self._gamma = num_speculative_tokens

    def num_speculative_tokens(self, batch_size: int) -> int:
        return self._gamma
