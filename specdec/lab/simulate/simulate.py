"""From a scenario to figures: coordinator, workers and clients as they are, devices and time simulated."""

from __future__ import annotations

import asyncio
import functools
import random
import statistics
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace

from specdec.config import AppConfig, CoordinatorConfig, DraftConfig, ModelConfig, SpeculationConfig
from specdec.coordinator.client import CoordinatorClient
from specdec.coordinator.coordinator import Coordinator
from specdec.engine.simulated import ToyLaw
from specdec.engine.simulated_pair import make_pair
from specdec.engine.verifying import TargetEngine
from specdec.lab.simulate.devices import (
    Device,
    DeviceDraftEngine,
    DeviceRunner,
    DistantDraftWorker,
    DistantTargetWorker,
)
from specdec.lab.simulate.profile import ProfiledRunner, profiled_target
from specdec.lab.simulate.recording import (
    DeviceRecord,
    RecordedDirectory,
    Recorder,
    Role,
    Round,
    SequenceRecord,
)
from specdec.lab.simulate.scenario import Gamma, Law, Scenario
from specdec.lab.simulate.virtual_time import VirtualTimeLoop, run_in_virtual_time
from specdec.types import (
    GenerationRequest,
    Pipeline,
    SamplingParams,
    SequenceId,
    StopCriteria,
    VerificationMode,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What happened in one scenario, and the figures of it. Times are virtual seconds."""

    scenario: Scenario
    elapsed_s: float
    """From the submission of all sequences to the last token of the last one."""
    devices: tuple[DeviceRecord, ...]
    rounds: tuple[Round, ...]
    sequences: tuple[SequenceRecord, ...]

    @property
    def texts(self) -> tuple[tuple[int, ...], ...]:
        """The token ids of each sequence."""
        return tuple(tuple(sequence.token_ids) for sequence in self.sequences)

    @property
    def num_tokens(self) -> int:
        return sum(len(sequence.token_ids) for sequence in self.sequences)

    @property
    def tokens_per_s(self) -> float:
        """Of all sequences together, prompts and the last round included."""
        return self.num_tokens / self.elapsed_s

    @property
    def tpot_s(self) -> float | None:
        """Median over sequences of the time per token after the first; None if all have one token."""
        times = [tpot_s for sequence in self.sequences if (tpot_s := sequence.tpot_s) is not None]
        return statistics.median(times) if times else None

    @property
    def num_rounds(self) -> int:
        """Verify calls that committed tokens."""
        return sum(done.num_committed > 0 for done in self.rounds)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per spec step of one sequence: accepted draft tokens and the one behind them."""
        steps = sum(sequence.num_spec_steps for sequence in self.sequences)
        return 1.0 + self._num_accepted / steps if steps else 1.0

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Accepted over verified draft tokens; None when nothing was drafted."""
        drafted = sum(sequence.num_draft_tokens for sequence in self.sequences)
        return self._num_accepted / drafted if drafted else None

    @property
    def prepared_share(self) -> float | None:
        """Of the blocks asked for, how many had been prepared while the target was at work; None if none was
        asked for.
        """
        hits = sum(done.num_hits for done in self.rounds)
        asked = hits + sum(done.num_misses for done in self.rounds)
        return hits / asked if asked else None

    def utilisation(self, role: Role) -> float:
        """How much of the time the devices of one role were at work, in [0, 1]."""
        busy = [device.busy_s for device in self.devices if device.role == role]
        return sum(busy) / (len(busy) * self.elapsed_s)

    @property
    def _num_accepted(self) -> int:
        return sum(sequence.num_accepted_draft_tokens for sequence in self.sequences)


def simulate(scenario: Scenario) -> Simulation:
    """Run it; takes about as long as its arithmetic, however long the devices take.

    Raises:
        SimulationError: nothing would ever happen again.
        GenerationFailed: the coordinator gave a sequence up.
    """
    return run_in_virtual_time(lambda loop: _run(scenario, loop))


def sweep(scenario: Scenario, gammas: Iterable[Gamma], pipelines: Sequence[Pipeline]) -> list[Scenario]:
    """The scenario with each gamma and each pipeline; plain decoding once, for it has no pipeline."""
    found: list[Scenario] = []
    for gamma in dict.fromkeys(gammas):
        ways: Sequence[Pipeline] = ("serial",) if gamma == 0 else pipelines
        found += [replace(scenario, gamma=gamma, pipeline=pipeline) for pipeline in ways]
    return found


def best_of(simulations: Sequence[Simulation]) -> Simulation:
    """The one with the most tokens per second; the first of equals."""
    return max(simulations, key=lambda simulation: simulation.tokens_per_s)


async def _run(scenario: Scenario, loop: VirtualTimeLoop) -> Simulation:
    recorder = Recorder(loop.time)
    targets = [Device(f"target-{idx}", "target", loop) for idx in range(scenario.num_targets)]
    drafts = [Device(f"draft-{idx}", "draft", loop) for idx in range(scenario.num_drafts)]
    async with _system(scenario, targets, drafts, recorder) as client:
        requests = [_request(scenario, idx) for idx in range(scenario.num_sequences)]
        await asyncio.gather(*(_generate(client, request, recorder) for request in requests))
        return Simulation(
            scenario=scenario,
            elapsed_s=max(sequence.last_s for sequence in recorder.sequences.values()),
            devices=tuple(_record(device) for device in (*targets, *drafts)),
            rounds=tuple(recorder.rounds),
            sequences=tuple(recorder.sequences[request.sequence_id] for request in requests),
        )


@asynccontextmanager
async def _system(
    scenario: Scenario, targets: Sequence[Device], drafts: Sequence[Device], recorder: Recorder
) -> AsyncGenerator[CoordinatorClient, None]:
    config = _config(scenario)
    target_workers = [_target_worker(scenario, device) for device in targets]
    draft_workers = [_draft_worker(scenario, device, config) for device in drafts]
    directory = RecordedDirectory(target_workers, draft_workers, recorder)
    coordinator = Coordinator(config, directory, "coordinator-0", clock=recorder.clock)
    await coordinator.start()
    client = CoordinatorClient(coordinator, "gateway-0")
    try:
        yield client
    finally:
        await client.close()
        await coordinator.close()
        for worker in (*target_workers, *draft_workers):
            worker.close()


def _config(scenario: Scenario) -> AppConfig:
    return AppConfig(
        target=ModelConfig(model="simulated"),
        draft=DraftConfig(model="simulated"),
        speculation=SpeculationConfig(
            num_speculative_tokens=scenario.gamma,
            max_speculative_tokens=scenario.max_gamma,
            pipeline=scenario.pipeline,
            lookahead_branches=scenario.lookahead_branches,
        ),
        coordinator=CoordinatorConfig(
            max_num_seqs=scenario.num_sequences,
            max_waiting=scenario.num_sequences,
            draft_timeout_s=scenario.draft_timeout_s,
            target_timeout_s=scenario.target_timeout_s,
        ),
    )


def _target_worker(scenario: Scenario, device: Device) -> DistantTargetWorker:
    runner = DeviceRunner(_laws(scenario)[0], device, scenario.target, scenario)
    return DistantTargetWorker(TargetEngine(runner), device, scenario.rpc_s)


def _draft_worker(scenario: Scenario, device: Device, config: AppConfig) -> DistantDraftWorker:
    law = _laws(scenario)[1]
    if scenario.profile:
        runner: DeviceRunner = ProfiledRunner(law, device, scenario)
    else:
        runner = DeviceRunner(law, device, scenario.draft, scenario)
    engine = DeviceDraftEngine(runner, config.speculation.draft_support, device)
    return DistantDraftWorker(engine, device, scenario.rpc_s)


def _laws(scenario: Scenario) -> tuple[ToyLaw, ToyLaw]:
    """Target and draft."""
    if scenario.profile:
        law = _profiled_law(scenario.vocab_size, scenario.seed)
        return law, law
    return _pair(scenario.law, scenario.acceptance_rate, scenario.vocab_size, scenario.seed)


# One sweep has the same laws throughout, and they take longer to make than to use.
@functools.lru_cache(maxsize=2)
def _pair(law: Law, acceptance_rate: float, vocab_size: int, seed: int) -> tuple[ToyLaw, ToyLaw]:
    return make_pair(law, acceptance_rate, vocab_size, seed)


@functools.lru_cache(maxsize=1)
def _profiled_law(vocab_size: int, seed: int) -> ToyLaw:
    return profiled_target(vocab_size, seed)


def _request(scenario: Scenario, idx: int) -> GenerationRequest:
    chance = random.Random(f"{scenario.seed} {idx}")
    sampling = (
        SamplingParams(temperature=0.0, mode=VerificationMode.GREEDY)
        if scenario.law == "greedy"
        else SamplingParams(temperature=1.0, seed=chance.getrandbits(63), mode=VerificationMode.REJECTION)
    )
    return GenerationRequest(
        sequence_id=SequenceId(f"s{idx}"),
        prompt_ids=tuple(chance.randrange(scenario.vocab_size) for _ in range(scenario.num_prompt_tokens)),
        sampling=sampling,
        stop=StopCriteria(max_tokens=scenario.num_tokens),
    )


async def _generate(client: CoordinatorClient, request: GenerationRequest, recorder: Recorder) -> None:
    async with aclosing(client.generate(request)) as chunks:
        async for chunk in chunks:
            recorder.on_chunk(chunk)


def _record(device: Device) -> DeviceRecord:
    return DeviceRecord(name=device.name, role=device.role, busy_s=device.busy_s(), spans=tuple(device.spans))
