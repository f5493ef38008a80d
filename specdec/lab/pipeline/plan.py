"""What is measured, and which figures come of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from specdec.config import SimulationConfig, StepTimes
from specdec.lab.pipeline.measure import Choice, Measured

GAMMA = 4
FIXED_GAMMAS = (1, 2, 4, 8)
PLAIN = Choice(gamma=0)
SERIAL, LOOKAHEAD = Choice(gamma=GAMMA, pipeline="serial"), Choice(gamma=GAMMA, pipeline="lookahead")
AUTO = Choice(gamma=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One deployment, what is asked of it, and what becomes of that."""

    name: str
    simulation: SimulationConfig
    num_sequences: int
    num_targets: int = 1
    num_drafts: int = 1
    choices: tuple[Choice, ...]
    """With a number for gamma: of the deployment whose gamma is fixed and high; else of one that adapts."""

    @property
    def fixed(self) -> tuple[Choice, ...]:
        return tuple(choice for choice in self.choices if choice.gamma is not None)

    @property
    def adaptive(self) -> tuple[Choice, ...]:
        return tuple(choice for choice in self.choices if choice.gamma is None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One line of the table."""

    name: str
    value: float
    at_least: float | None = None
    at_most: float | None = None
    aim: float

    @property
    def is_reached(self) -> bool:
        is_enough = self.at_least is None or self.value >= self.at_least
        return is_enough and (self.at_most is None or self.value <= self.at_most)


Results = Mapping[tuple[str, Choice], Measured]
"""By scenario's name and choice: medians."""


def simulation(
    alpha: float,
    draft_s: float,
    target_s: float,
    law: str = "greedy",
    token_s: float = 0.0,
    draft_token_s: float = 0.0,
) -> SimulationConfig:
    """Two devices: seconds of a draft step and of a verification, and of each token of these."""
    return SimulationConfig.model_validate(
        {
            "law": law,
            "acceptance_rate": alpha,
            "max_context": 1_000_000,
            "draft": StepTimes(step_s=draft_s, token_s=draft_token_s),
            "target": StepTimes(step_s=target_s, token_s=token_s),
        }
    )


USUAL = simulation(0.8, 0.002, 0.016)
EVERY_FIXED = (PLAIN, *(Choice(gamma=g, pipeline=p) for p in ("serial", "lookahead") for g in FIXED_GAMMAS))
GRID = (
    Scenario(
        name="grid: good draft, 1 sequence", simulation=USUAL, num_sequences=1, choices=(*EVERY_FIXED, AUTO)
    ),
    Scenario(
        name="grid: good draft, 16 sequences",
        simulation=USUAL,
        num_sequences=16,
        choices=(*EVERY_FIXED, AUTO),
    ),
    Scenario(
        name="grid: slow draft, 1 sequence",
        simulation=simulation(0.5, 0.006, 0.016),
        num_sequences=1,
        choices=(*EVERY_FIXED, AUTO),
    ),
    Scenario(
        name="grid: target bound by tokens, 16 sequences",
        simulation=simulation(0.7, 0.004, 0.004, token_s=0.0005),
        num_sequences=16,
        choices=(*EVERY_FIXED, AUTO),
    ),
)
USELESS = Scenario(
    name="useless draft", simulation=simulation(0.02, 0.002, 0.016), num_sequences=1, choices=(PLAIN, AUTO)
)
OVERHEAD = Scenario(
    name="no device time", simulation=simulation(0.8, 0.0, 0.0), num_sequences=1, choices=(SERIAL,)
)
ONE = Scenario(name="1 sequence", simulation=USUAL, num_sequences=1, choices=(PLAIN, SERIAL, LOOKAHEAD))
SAMPLED = Scenario(
    name="1 sequence, sampled",
    simulation=simulation(0.8, 0.002, 0.016, law="sampled"),
    num_sequences=1,
    choices=(SERIAL, LOOKAHEAD),
)
SIXTEEN = Scenario(name="16 sequences", simulation=USUAL, num_sequences=16, choices=(SERIAL, LOOKAHEAD))
MANY = Scenario(
    name="256 sequences", simulation=simulation(0.8, 0.002, 0.040), num_sequences=256, choices=(SERIAL,)
)
SCENARIOS = (OVERHEAD, ONE, SAMPLED, SIXTEEN, MANY, USELESS, *GRID)


def figures(results: Results) -> Iterator[Figure]:
    """The table of what was measured; scenarios that were left out make no lines."""

    def has(*wanted: tuple[Scenario, Choice]) -> bool:
        return all((scenario.name, choice) in results for scenario, choice in wanted)

    def rate(scenario: Scenario, choice: Choice) -> float:
        return results[scenario.name, choice].tokens_per_s

    if has((OVERHEAD, SERIAL)):
        overhead_s = results[OVERHEAD.name, SERIAL].round_s
        yield Figure(name="control overhead per round, ms", value=1000 * overhead_s, at_most=2.5, aim=1.0)
    if has((ONE, SERIAL)):
        share = rate(ONE, SERIAL) / ideal_tokens_per_s(ONE, results[ONE.name, SERIAL])
        yield Figure(name="serial ÷ ideal, 1 sequence", value=share, at_least=0.88, aim=0.95)
    for scenario, at_least, aim in ((ONE, 1.25, 1.40), (SAMPLED, 1.15, 1.35), (SIXTEEN, 1.20, 1.35)):
        if has((scenario, SERIAL), (scenario, LOOKAHEAD)):
            gain = rate(scenario, LOOKAHEAD) / rate(scenario, SERIAL)
            yield Figure(name=f"lookahead ÷ serial, {scenario.name}", value=gain, at_least=at_least, aim=aim)
    for scenario in GRID:
        if has(*((scenario, choice) for choice in scenario.choices)):
            best = max(rate(scenario, choice) for choice in scenario.fixed)
            yield Figure(
                name=f"auto ÷ best fixed, {scenario.name}",
                value=rate(scenario, AUTO) / best,
                at_least=0.95,
                aim=1.0,
            )
    if has((USELESS, PLAIN), (USELESS, AUTO)):
        ratio = rate(USELESS, AUTO) / rate(USELESS, PLAIN)
        yield Figure(name="auto ÷ plain, useless draft", value=ratio, at_least=0.97, aim=0.99)
    if has((MANY, SERIAL)):
        share = rate(MANY, SERIAL) / ideal_tokens_per_s(MANY, results[MANY.name, SERIAL])
        yield Figure(name="serial ÷ ideal, 256 sequences", value=share, at_least=0.80, aim=0.92)


def ideal_tokens_per_s(scenario: Scenario, measured: Measured) -> float:
    """``E[N] / (gamma t_d + t_v)`` per sequence, with the tokens per round that were measured."""
    times = scenario.simulation
    batch = scenario.num_sequences
    draft_s = GAMMA * times.draft.of(batch, batch)
    return batch * measured.tokens_per_round / (draft_s + times.target.of(batch, batch * (GAMMA + 1)))
