"""The accept rule of the three verification modes, and how often it accepts."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.types import VerificationMode


def count_accepted(
    mode: VerificationMode,
    draft_ids: Sequence[int],
    token_ids: Sequence[int],
    ratios: Sequence[float],
    uniforms: Sequence[float],
) -> int:
    """How many leading draft tokens are accepted.

    Args:
        mode: verification mode of the sequence.
        draft_ids: gamma drafted tokens.
        token_ids: gamma + 1 tokens of the verdict.
        ratios: gamma acceptance ratios, rejection mode only.
        uniforms: gamma draws in [0, 1), rejection mode only.
    """
    if mode is VerificationMode.REJECTION:
        # Strictly below: a token the target excludes has ratio 0 and is refused even by a draw of 0.0.
        accepted = [u < ratio for u, ratio in zip(uniforms, ratios, strict=True)]
        return accepted.index(False) if False in accepted else len(accepted)
    for number, drafted in enumerate(draft_ids):
        if drafted != token_ids[number]:
            return number
    return len(draft_ids)


INITIAL_RATE = 0.6
"""Assumed of a draft that nothing is known of: high enough to try it."""
PRIOR_STEPS = 8.0
"""What is known of other sequences weighs as much as this many draft tokens of the sequence's own."""
OWN_MEMORY = 0.985
SHARED_MEMORY = 0.99
"""What a spec step leaves of those before it, in one sequence and over all of them."""


class SmoothedAcceptance:
    """How likely the next draft token is accepted, from the latest spec steps.

    Of gamma draft tokens the first refused one ends the step, so ``a`` accepted tokens are ``a`` successes
    and, if ``a < gamma``, one failure: the maximum likelihood estimate of a geometric law cut off at gamma.

    Args:
        shared: over all sequences of a lane, told of each step too; a new sequence starts with its rate.
    """

    def __init__(self, shared: SmoothedAcceptance | None = None) -> None:
        self._shared = shared
        self._memory = OWN_MEMORY if shared else SHARED_MEMORY
        self._accepted = 0.0
        self._refused = 0.0

    @property
    def rate(self) -> float:
        """In [0, 1]."""
        prior = self._shared.rate if self._shared else INITIAL_RATE
        num_known = self._accepted + self._refused + PRIOR_STEPS
        return (self._accepted + PRIOR_STEPS * prior) / num_known

    def record(self, num_drafted: int, num_accepted: int) -> None:
        """One verified draft of ``num_drafted`` > 0 tokens."""
        self._accepted = self._accepted * self._memory + num_accepted
        self._refused = self._refused * self._memory + (num_accepted < num_drafted)
        if self._shared:
            self._shared.record(num_drafted, num_accepted)
