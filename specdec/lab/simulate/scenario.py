"""What is simulated: the pair, its devices, the load, and how the coordinator decodes it."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

from specdec.config import MAX_SPECULATIVE_TOKENS, StepTimes
from specdec.lab.simulate.errors import SimulationError
from specdec.speculation.policy import expected_tokens
from specdec.types import Pipeline

Gamma = int | Literal["auto"]
Law = Literal["greedy", "sampled"]

Name = TypeVar("Name", bound=str)
PIPELINES: tuple[Pipeline, ...] = get_args(Pipeline)
LAWS: tuple[Law, ...] = get_args(Law)
GREEDY_VOCAB = 1000
"""A greedy text repeats itself sooner or later: with so many tokens, later than is simulated."""
SAMPLED_VOCAB = 64
"""As many as the draft's law is truncated to by default: more would cost acceptance."""
DRAFT_TIMES, TARGET_TIMES = StepTimes(step_s=0.002), StepTimes(step_s=0.016)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """All of it; the same scenario always gives the same result.

    Raises:
        SimulationError: a value is out of range.
    """

    acceptance_rate: float = 0.8
    """alpha, in [0, 1]: how often the next draft token is accepted."""
    profile: tuple[float, ...] = ()
    """Instead of alpha: how often the first token of a block is accepted, the second if the first was, and so
    on; the last entry holds for all further ones. Greedy law only."""
    law: Law = "greedy"
    """``sampled``: smooth laws at temperature 1 in rejection mode."""
    draft: StepTimes = DRAFT_TIMES
    target: StepTimes = TARGET_TIMES
    rpc_s: float = 0.0
    """One way between the coordinator and a worker."""
    gamma: Gamma = 4
    max_gamma: int = 8
    """Most that ``auto`` drafts."""
    pipeline: Pipeline = "serial"
    lookahead_branches: int = 8
    num_sequences: int = 1
    """All submitted at 0 s."""
    num_tokens: int = 1000
    """Output tokens of each sequence."""
    num_prompt_tokens: int = 16
    num_targets: int = 1
    num_drafts: int = 1
    draft_timeout_s: float = 5.0
    target_timeout_s: float = 60.0
    seed: int = 0
    """Of the laws, the prompts and the draws."""

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_probabilities()
        self._check_counts()
        self._check_times()

    @property
    def name(self) -> str:
        """Among scenarios that differ in gamma and pipeline."""
        return "plain" if self.gamma == 0 else f"γ = {self.gamma} {self.pipeline}"

    @property
    def vocab_size(self) -> int:
        return GREEDY_VOCAB if self.law == "greedy" else SAMPLED_VOCAB

    @property
    def expected_length(self) -> float | None:
        """E[N], tokens of a round with gamma draft tokens; None where gamma varies."""
        if self.gamma == "auto":
            return None
        if not self.profile:
            return expected_tokens(self.acceptance_rate, self.gamma)
        longer = (*self.profile, *[self.profile[-1]] * self.gamma)[: self.gamma]
        return 1.0 + math.fsum(itertools.accumulate(longer, operator.mul))

    @property
    def ideal_tokens_per_s(self) -> float | None:
        """``B E[N] / (gamma t_d + t_v)``, summed over target workers with B sequences each.

        What drafting in turn gives without a network, prompts or waiting for a draft worker that others use
        too; None where gamma varies.
        """
        return None if self.expected_length is None else self.ideal_with(self.expected_length)

    def ideal_with(self, length: float) -> float:
        """The same with another E[N]; gamma is a number."""
        gamma = 0 if self.gamma == "auto" else self.gamma
        rate = 0.0
        for lane in range(min(self.num_targets, self.num_sequences)):
            batch = len(range(lane, self.num_sequences, self.num_targets))
            draft_s = gamma * self.draft.of(batch, batch)
            rate += batch * length / (draft_s + self.target.of(batch, batch * (gamma + 1)))
        return rate

    def _check_choices(self) -> None:
        as_law(self.law)
        as_pipeline(self.pipeline)
        is_gamma = self.gamma == "auto" or _is_within(self.gamma, 0, MAX_SPECULATIVE_TOKENS)
        _require(is_gamma, f"gamma {self.gamma!r}: 0 to {MAX_SPECULATIVE_TOKENS} or auto is expected")
        _require(not self.profile or self.law == "greedy", "an acceptance profile needs the greedy law")

    def _check_probabilities(self) -> None:
        for rate in (self.acceptance_rate, *self.profile):
            _require(0.0 <= rate <= 1.0, f"acceptance rate {rate:g}: it must be in [0, 1]")

    def _check_counts(self) -> None:
        counts = {
            "sequences": self.num_sequences,
            "tokens": self.num_tokens,
            "prompt tokens": self.num_prompt_tokens,
            "target workers": self.num_targets,
            "draft workers": self.num_drafts,
        }
        for name, count in counts.items():
            _require(count >= 1, f"{count} {name}: at least one is needed")
        _require(
            _is_within(self.max_gamma, 1, MAX_SPECULATIVE_TOKENS),
            f"largest gamma {self.max_gamma}: 1 to {MAX_SPECULATIVE_TOKENS} is expected",
        )
        _require(
            _is_within(self.lookahead_branches, 1, 64),
            f"{self.lookahead_branches} look-ahead branches: 1 to 64 is expected",
        )
        _require(self.seed >= 0, f"seed {self.seed}: it must not be negative")

    def _check_times(self) -> None:
        _require(
            0.0 <= self.rpc_s < math.inf, f"network delay {1000 * self.rpc_s:g} ms: it must not be negative"
        )
        _require(self.target.of(1, 1) > 0.0, "the target's step must take some time")
        for timeout_s in (self.draft_timeout_s, self.target_timeout_s):
            _require(timeout_s > 0.0, f"deadline {timeout_s:g} s: it must be positive")


def as_law(text: str) -> Law:
    """Check a law.

    Raises:
        SimulationError: there is none of this name.
    """
    return _one_of(LAWS, text, "law")


def as_pipeline(text: str) -> Pipeline:
    """Check a pipeline.

    Raises:
        SimulationError: there is none of this name.
    """
    return _one_of(PIPELINES, text, "pipeline")


def _one_of(names: Sequence[Name], text: str, what: str) -> Name:
    for name in names:
        if name == text:
            return name
    raise SimulationError(f"{what} {text!r}: one of {', '.join(names)} is expected")


def step_times(role: str, step_ms: float, token_ms: float) -> StepTimes:
    """What a device's forward takes.

    Raises:
        SimulationError: a time is negative.
    """
    for name, value in (("step", step_ms), ("token", token_ms)):
        _require(0.0 <= value < math.inf, f"the {role}'s {name} time {value:g} ms: it must not be negative")
    return StepTimes(step_s=step_ms / 1000, token_s=token_ms / 1000)


def _is_within(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and low <= value <= high


def _require(is_met: bool, message: str) -> None:
    if not is_met:
        raise SimulationError(message)
