"""What a lane decides before each round: how rounds overlap, and how many tokens to draft for whom."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from specdec.speculation.cost_model import RoundCosts, TimeCurve
from specdec.speculation.pipeline import PipelinePolicy
from specdec.speculation.policy import AdaptiveGamma, Candidate, FixedGamma, GammaPolicy
from specdec.types import Overlap

AHEAD_TRIAL_ROUNDS = 16
"""How long a gamma is tried with drafts made ahead: they are there at once or not at all, so only many of
them tell."""


class RoundPolicy:
    """The two choices of one lane together.

    Drafting costs something else with each overlap, and so does verification beside another group: each has a
    gamma policy of its own.

    Args:
        pipeline: chooses the overlap.
        gammas: choose gamma, by overlap.
    """

    def __init__(self, pipeline: PipelinePolicy, gammas: Mapping[Overlap, GammaPolicy]) -> None:
        self._pipeline = pipeline
        self._gammas = gammas

    @property
    def overlap(self) -> Overlap:
        """Of the next round."""
        return self._pipeline.overlap

    def choose(self, candidates: Sequence[Candidate]) -> list[int]:
        """See `GammaPolicy.choose`."""
        return self._gammas[self.overlap].choose(candidates)

    def on_proposed(self, batch_size: int, gamma: int, elapsed_s: float, drafted_share: float = 1.0) -> None:
        """See `GammaPolicy.on_proposed`."""
        self._gammas[self.overlap].on_proposed(batch_size, gamma, elapsed_s, drafted_share)

    def on_verified(self, num_tokens: int, elapsed_s: float) -> None:
        """See `GammaPolicy.on_verified`."""
        self._gammas[self.overlap].on_verified(num_tokens, elapsed_s)

    def on_round(self, num_sequences: int, num_expected: float, ended_at_s: float) -> None:
        """See `PipelinePolicy.on_round`."""
        self._pipeline.on_round(num_sequences, num_expected, ended_at_s)

    def on_drafts(self, *, shares_device: bool) -> None:
        """See `PipelinePolicy.on_drafts`."""
        self._pipeline.on_drafts(shares_device=shares_device)

    def on_idle(self) -> None:
        """See `PipelinePolicy.on_idle`."""
        self._pipeline.on_idle()


def new_round_policy(pipeline: PipelinePolicy, max_gamma: int, *, adapts_gamma: bool) -> RoundPolicy:
    """The policy of a lane.

    Args:
        pipeline: chooses the overlap.
        max_gamma: tokens to draft, at most if gamma adapts.
        adapts_gamma: whether it does.
    """
    alone = TimeCurve()  # what verification takes does not depend on when drafts are made
    verify_curves: dict[Overlap, Callable[[], TimeCurve]] = {
        "serial": lambda: alone,
        "lookahead": lambda: alone,
        "groups": TimeCurve,
    }

    def gamma_policy(overlap: Overlap) -> GammaPolicy:
        if not adapts_gamma:
            return FixedGamma(max_gamma)
        is_ahead = overlap == "lookahead"
        costs = RoundCosts(verify_curves[overlap](), is_ahead=is_ahead)
        return AdaptiveGamma(max_gamma, costs, AHEAD_TRIAL_ROUNDS if is_ahead else 1)

    return RoundPolicy(pipeline, {overlap: gamma_policy(overlap) for overlap in verify_curves})
