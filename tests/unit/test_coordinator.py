"""The coordinator against workers that fail, hang, forget and fill up; toy laws, real rounds, no Ray."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import pytest

from specdec.config import AppConfig, CoordinatorConfig, DraftConfig, ModelConfig, SpeculationConfig
from specdec.coordinator import lane
from specdec.coordinator.client import CoordinatorClient
from specdec.coordinator.coordinator import Coordinator
from specdec.coordinator.handles import Fleet
from specdec.coordinator.local import LocalDraftHandle, LocalTargetHandle
from specdec.engine.drafting import DraftEngine
from specdec.engine.simulated import SimulatedRunner, ToyLaw
from specdec.engine.verifying import TargetEngine
from specdec.engine.worker import DraftWorker, TargetWorker
from specdec.errors import (
    ContextLengthExceeded,
    DraftUnavailable,
    GenerationFailed,
    TargetFailed,
    TargetUnavailable,
    TooManyRequests,
)
from specdec.messages import Heartbeat, ProposeReply, ProposeRequest, VerifyReply, VerifyRequest
from specdec.types import (
    GenerationRequest,
    SamplingParams,
    SequenceId,
    StopCriteria,
    TokenChunk,
    VerificationMode,
)
from tests.fakes import eventually

LAW = ToyLaw.random(16, seed=1, scale=2.0)
DRAFT_LAW = LAW.perturbed(seed=2, scale=0.5)


class Draft:
    """A draft worker that can be told to fail; one object per life, as in a cluster."""

    def __init__(self, name: str = "draft-0", **runner: object) -> None:
        self.worker = DraftWorker(
            DraftEngine(SimulatedRunner(DRAFT_LAW, **runner), support=16), worker_id=name, model="d"
        )
        self.handle = FaultyDraftHandle(self.worker)


class FaultyDraftHandle(LocalDraftHandle):
    failure: str | None = None
    num_calls = 0

    async def propose(self, request: ProposeRequest, timeout_s: float) -> ProposeReply:
        self.num_calls += 1
        if self.failure == "dead":
            raise DraftUnavailable("the worker died")
        if self.failure == "late":
            # It does the work, but its answer is not waited for.
            await super().propose(request, timeout_s)
            raise DraftUnavailable(f"no answer within {timeout_s:g} s")
        return await super().propose(request, timeout_s)


class Target:
    def __init__(self, name: str = "target-0", **runner: object) -> None:
        self.worker = TargetWorker(TargetEngine(SimulatedRunner(LAW, **runner)), worker_id=name, model="t")
        self.handle = FaultyTargetHandle(self.worker)


class FaultyTargetHandle(LocalTargetHandle):
    fail_after: int | None = None
    poison: SequenceId | None = None
    num_calls = 0
    gate: asyncio.Event | None = None

    def __init__(self, worker: TargetWorker) -> None:
        super().__init__(worker)
        self.rounds: list[tuple[VerifyRequest, VerifyReply]] = []

    async def verify(self, request: VerifyRequest, timeout_s: float) -> VerifyReply:
        self.num_calls += 1
        if self.gate is not None:
            try:
                async with asyncio.timeout(timeout_s):
                    await self.gate.wait()
            except TimeoutError as error:
                raise TargetUnavailable(f"no answer within {timeout_s:g} s") from error
        if any(item.feed.sequence_id == self.poison for item in request.items):
            raise TargetFailed("ValueError: poison")
        if self.fail_after is not None and self.num_calls > self.fail_after:
            raise TargetUnavailable("the worker died")
        reply = await super().verify(request, timeout_s)
        self.rounds.append((request, reply))
        return reply


class Directory:
    def __init__(self, targets: Sequence[Target], drafts: Sequence[Draft]) -> None:
        self.targets, self.drafts = list(targets), list(drafts)

    async def poll(self, heartbeat: Heartbeat) -> Fleet:
        for member in (*self.targets, *self.drafts):
            await member.worker.heartbeat(heartbeat)
        return Fleet(
            targets=tuple(target.handle for target in self.targets),
            drafts=tuple(draft.handle for draft in self.drafts),
        )


class System:
    def __init__(self, directory: Directory, coordinator: Coordinator, client: CoordinatorClient) -> None:
        self.directory, self.coordinator, self.client = directory, coordinator, client

    async def text(self, request: GenerationRequest) -> list[int]:
        ids: list[int] = []
        async with aclosing(self.client.generate(request)) as chunks:
            async for chunk in chunks:
                ids += chunk.token_ids
        return ids

    def workers(self) -> list[DraftWorker | TargetWorker]:
        return [member.worker for member in (*self.directory.targets, *self.directory.drafts)]

    async def is_idle(self) -> None:
        await eventually(lambda: sum(w.status().num_sequences for w in self.workers()) == 0)
        assert self.coordinator.status().num_running == self.coordinator.status().num_waiting == 0


@asynccontextmanager
async def running(
    targets: Sequence[Target],
    drafts: Sequence[Draft],
    *,
    gamma: int = 4,
    pipeline: str = "serial",
    **coordinator: object,
) -> AsyncIterator[System]:
    config = AppConfig(
        target=ModelConfig(model="t"),
        draft=DraftConfig(model="d"),
        speculation=SpeculationConfig(num_speculative_tokens=gamma, pipeline=pipeline),
        coordinator=CoordinatorConfig(**{"poll_interval_s": 0.01, "draft_timeout_s": 0.05, **coordinator}),
    )
    directory = Directory(targets, drafts)
    core = Coordinator(config, directory, "coordinator-0")
    await core.start()
    client = CoordinatorClient(core, "gateway-0")
    try:
        yield System(directory, core, client)
    finally:
        await client.close()
        await core.close()
        for member in (*directory.targets, *directory.drafts):
            member.worker.close()


def ask(
    name: str = "s", *, max_tokens: int = 60, prompt: int = 3, gamma: int | None = None
) -> GenerationRequest:
    return GenerationRequest(
        sequence_id=SequenceId(name),
        prompt_ids=tuple(i % 16 for i in range(prompt)),
        sampling=SamplingParams(mode=VerificationMode.COUPLED, seed=5),
        stop=StopCriteria(max_tokens=max_tokens),
        max_draft_tokens=gamma,
    )


async def collect(chunks: AsyncIterator[TokenChunk]) -> list[TokenChunk]:
    return [chunk async for chunk in chunks]


@pytest.fixture
async def undisturbed() -> list[int]:
    async with running([Target()], []) as system:
        return await system.text(ask())


async def test_text_is_that_of_plain_decoding_and_drafts_were_used(undisturbed):
    async with running([Target()], [Draft()]) as system:
        assert await system.text(ask()) == undisturbed
        status = system.coordinator.status()
        assert 0 < status.num_accepted_draft_tokens < status.num_draft_tokens
        assert status.num_output_tokens == 60
        await system.is_idle()


def slow(num_sequences: int, num_tokens: int) -> float:
    return 0.004


@pytest.mark.parametrize("num_requests", [1, 6])
async def test_looking_ahead_changes_no_text_and_prepares_drafts(num_requests):
    requests = [ask(f"s{number}", prompt=3 + number) for number in range(num_requests)]
    async with running([Target()], []) as system:
        plain = [await system.text(request) for request in requests]
    target = Target(latency=slow)
    async with running([target], [Draft()], pipeline="lookahead") as system:
        texts = await asyncio.gather(*(system.text(request) for request in requests))
        assert texts == plain
        await system.is_idle()
    drafts = [item.draft for call, _ in target.handle.rounds for item in call.items if item.draft]
    assert sum(draft.is_prepared for draft in drafts) > len(drafts) // 3


async def test_sequences_that_ask_for_serial_rounds_are_not_put_into_groups():
    target, draft = Target(latency=slow), Draft(latency=slow)
    async with running([target], [draft], pipeline="groups") as system:
        requests = [replace(ask(f"s{i}", max_tokens=40), pipeline="serial") for i in range(4)]
        await asyncio.gather(*(system.text(request) for request in requests))
        asked = [len(request.items) for request, _ in target.handle.rounds]
        assert max(asked) == 4
        target.handle.rounds.clear()
        await asyncio.gather(*(system.text(replace(ask(f"g{i}"), pipeline="auto")) for i in range(4)))
        assert [len(request.items) for request, _ in target.handle.rounds].count(2) > 10


async def test_a_call_is_not_timed_when_the_one_before_was_of_another_kind():
    """What was prepared for other rounds says nothing of these, and the other way round."""
    draft = Draft()
    async with running([Target()], [draft], pipeline="serial") as system:
        (only,) = system.coordinator._lanes.values()
        timed: list[int] = []
        only._policy.on_proposed = lambda *_: timed.append(draft.handle.num_calls)
        for pipeline, gamma in (("serial", 4), ("lookahead", 4), ("lookahead", 2), ("serial", 2)):
            first = draft.handle.num_calls + 1
            await system.text(replace(ask(pipeline, prompt=1, gamma=gamma), pipeline=pipeline))
            assert first not in timed
            assert {first + 1, first + 2} <= set(timed)


@pytest.mark.parametrize("pipeline", ["serial", "lookahead"])
@pytest.mark.parametrize("failure", ["dead", "late"])
async def test_a_draft_that_fails_in_mid_stream_changes_nothing(undisturbed, failure, pipeline):
    draft = Draft()
    async with running([Target()], [draft], pipeline=pipeline) as system:
        ids: list[int] = []
        async with aclosing(system.client.generate(ask())) as chunks:
            async for chunk in chunks:
                ids += chunk.token_ids
                if len(ids) > 15:
                    draft.handle.failure = failure
        assert ids == undisturbed
        assert draft.handle.num_calls < 30  # asked until the failure, then left alone
        await system.is_idle()


async def test_drafts_come_back_with_a_new_worker(undisturbed):
    first, second = Draft("draft-0"), Draft("draft-1")
    # A little latency, so that the stream outlives a few polls.
    target = Target(latency=lambda sequences, tokens: 0.005)
    async with running([target], [first]) as system:
        ids: list[int] = []
        async with aclosing(system.client.generate(ask(max_tokens=200))) as chunks:
            async for chunk in chunks:
                ids += chunk.token_ids
                if len(ids) > 10 and system.directory.drafts == [first]:
                    first.handle.failure = "dead"
                    system.directory.drafts = [second]
        assert second.handle.num_calls > 3
        assert ids[:60] == undisturbed
        first.worker.close()


async def test_a_draft_that_missed_its_deadline_is_asked_again_later():
    draft = Draft()
    target = Target(latency=lambda sequences, tokens: 0.005)
    async with running([target], [draft], draft_timeout_s=0.5) as system:
        draft.handle.failure = "late"
        await system.text(ask("first", max_tokens=10))
        asked = draft.handle.num_calls
        assert asked == 1
        draft.handle.failure = None
        await system.text(ask("second", max_tokens=200))
        assert draft.handle.num_calls > asked


async def test_a_lost_target_hands_its_sequences_to_another_from_the_log(undisturbed):
    first, second = Target("target-0"), Target("target-1")
    first.handle.fail_after = 5
    async with running([first], [Draft()]) as system:
        generation = asyncio.create_task(system.text(ask()))
        await eventually(lambda: first.handle.num_calls > 5)
        system.directory.targets = [second]
        assert await generation == undisturbed
        await system.is_idle()
        first.worker.close()


async def test_a_sequence_is_not_moved_for_ever():
    targets = [Target(f"target-{i}") for i in range(4)]
    for target in targets:
        target.handle.fail_after = 0
    async with running(targets, [], max_moves=2) as system:
        with pytest.raises(GenerationFailed, match="lost too often"):
            await system.text(ask())
        assert sum(target.handle.num_calls for target in targets) == 3


async def test_without_a_target_a_request_waits_for_its_deadline_and_no_longer():
    async with running([], [], idle_wait_s=0.05) as system:
        with pytest.raises(GenerationFailed, match="no target worker"):
            await system.text(ask())
        assert system.coordinator.status().num_waiting == 0


async def test_the_requests_of_a_frozen_target_that_nobody_replaces_end_in_time():
    """A98: it is no target any more from the moment its call is late, and polls do not see it either."""
    target = Target()
    async with running([target], [Draft()], target_timeout_s=0.1, idle_wait_s=0.1) as system:
        stream = asyncio.create_task(system.text(ask(max_tokens=3000)))
        await eventually(lambda: target.handle.num_calls > 3)
        target.handle.gate = asyncio.Event()
        system.directory.targets = []
        waiting = asyncio.create_task(system.text(ask("late")))
        async with asyncio.timeout(5):
            for request in (stream, waiting):
                with pytest.raises(GenerationFailed, match="no target worker"):
                    await request
        assert system.coordinator.status().targets == ()
        target.handle.gate.set()
        target.worker.close()


async def test_a_target_that_comes_in_time_serves_the_waiting(undisturbed):
    async with running([], []) as system:
        generation = asyncio.create_task(system.text(ask()))
        await eventually(lambda: system.coordinator.status().num_waiting == 1)
        system.directory.targets = [Target()]
        assert await generation == undisturbed


async def test_a_worker_that_forgot_a_sequence_is_fed_again(undisturbed):
    target, draft = Target(), Draft()
    async with running([target], [draft]) as system:
        ids: list[int] = []
        async with aclosing(system.client.generate(ask())) as chunks:
            async for chunk in chunks:
                ids += chunk.token_ids
                if 10 < len(ids) < 30:
                    await target.worker.release([SequenceId("s")])
                    await draft.worker.release([SequenceId("s")])
        assert ids == undisturbed


async def test_cancelling_frees_both_workers_within_a_round():
    target, draft = Target(), Draft()
    async with running([target], [draft]) as system:
        generation = system.client.generate(ask(max_tokens=3000))
        async for chunk in generation:
            if chunk.num_drafted:
                break
        target.handle.gate = asyncio.Event()  # the next round hangs in verification
        await eventually(lambda: system.coordinator.status().num_running == 1)
        await generation.aclose()
        await eventually(lambda: system.coordinator.status().num_running == 0)
        calls = target.handle.num_calls
        target.handle.gate.set()
        await system.is_idle()
        assert target.handle.num_calls <= calls + 1


async def test_cancelling_a_waiting_request_is_enough():
    target = Target()
    target.handle.gate = asyncio.Event()
    async with running([target], [], max_num_seqs=1) as system:
        first = asyncio.create_task(system.text(ask("first")))
        await eventually(lambda: system.coordinator.status().num_running == 1)
        second = asyncio.create_task(system.text(ask("second")))
        await eventually(lambda: system.coordinator.status().num_waiting == 1)
        second.cancel()
        await eventually(lambda: system.coordinator.status().num_waiting == 0)
        target.handle.gate.set()
        assert len(await first) == 60


async def test_the_queue_is_bounded_and_what_was_accepted_is_served():
    async with running([Target()], [Draft()], max_num_seqs=2, max_waiting=3) as system:
        outcomes = await asyncio.gather(
            *(system.text(ask(f"s{i}")) for i in range(8)), return_exceptions=True
        )
        refused = [outcome for outcome in outcomes if isinstance(outcome, TooManyRequests)]
        served = [outcome for outcome in outcomes if isinstance(outcome, list)]
        assert (len(refused), len(served)) == (3, 5)
        assert len({tuple(ids) for ids in served}) == 1
        await system.is_idle()


async def test_a_batch_is_one_call_per_round_and_worker():
    target, draft = Target(), Draft()
    async with running([target], [draft], gamma=1) as system:
        texts = await asyncio.gather(*(system.text(ask(f"s{i}")) for i in range(10)))
        assert len({tuple(ids) for ids in texts}) == 1
        alone = Target()
    async with running([alone], [Draft()], gamma=1) as system:
        await system.text(ask())
    # All ten ran together: hardly more calls than one needs alone.
    assert target.handle.num_calls <= alone.handle.num_calls + 12
    assert draft.handle.num_calls <= target.handle.num_calls


async def test_a_long_prompt_is_prefilled_in_chunks_beside_a_running_stream(undisturbed):
    calls: list[tuple[int, int]] = []

    def latency(sequences: int, tokens: int) -> float:
        calls.append((sequences, tokens))
        return 0.0

    async with running([Target(latency=latency)], [Draft()], prefill_chunk_tokens=32) as system:
        stream = asyncio.create_task(system.text(ask()))
        await eventually(lambda: len(calls) > 2)
        long = await system.text(ask("long", prompt=1000, max_tokens=5))
        assert await stream == undisturbed
        assert len(long) == 5
        shared = [tokens for sequences, tokens in calls if sequences == 2]
        assert len(shared) > 5
        assert max(shared) <= 32 + 5
        await system.is_idle()


async def test_a_long_prompt_that_stalls_nobody_is_prefilled_in_fewer_chunks():
    tokens_per_call: list[int] = []

    def latency(sequences: int, tokens: int) -> float:
        tokens_per_call.append(tokens)
        return 0.0

    async with running([Target(latency=latency)], [], prefill_chunk_tokens=32) as system:
        await system.text(ask("long", prompt=300, max_tokens=2))
    assert tokens_per_call == [128, 128, 44, 1]


async def test_a_prompt_beyond_the_drafts_context_is_decoded_plainly():
    draft = Draft(max_context=40)
    async with running([Target()], [draft]) as system:
        assert len(await system.text(ask(prompt=100))) == 60
        assert draft.handle.num_calls == 0


async def test_a_draft_without_memory_is_no_failure(undisturbed):
    draft = Draft(kv_capacity_tokens=30)
    async with running([Target()], [draft]) as system:
        assert await system.text(ask()) == undisturbed
        assert draft.handle.num_calls > 0
        await system.is_idle()


async def test_sequences_wait_for_target_memory_and_none_is_lost():
    async with running([Target(kv_capacity_tokens=150)], [Draft()]) as system:
        texts = await asyncio.gather(*(system.text(ask(f"s{i}")) for i in range(6)))
        assert {len(ids) for ids in texts} == {60}
        await system.is_idle()


async def test_generation_ends_at_the_context_window():
    async with running([Target(max_context=50)], [Draft()]) as system:
        assert len(await system.text(ask(prompt=10, max_tokens=1000))) == 40
        with pytest.raises(ContextLengthExceeded):
            await system.text(ask("too-long", prompt=50))


async def test_a_gateway_that_stopped_listening_loses_its_sequences():
    target = Target(latency=lambda sequences, tokens: 0.002)
    async with running([target], [Draft()], orphan_timeout_s=0.05) as system:
        await system.coordinator.submit("gone-gateway", ask(max_tokens=3000))
        await eventually(lambda: target.handle.num_calls > 3)
        await eventually(lambda: system.coordinator.status().num_running == 0)
        await system.is_idle()


async def test_resuming_with_committed_tokens_gives_the_rest_of_the_text(undisturbed):
    async with running([Target()], [Draft()]) as system:
        for done in (1, 17, 59):
            request = ask(f"resume-{done}")
            resumed = GenerationRequest(
                sequence_id=request.sequence_id,
                prompt_ids=request.prompt_ids,
                sampling=request.sampling,
                stop=request.stop,
                output_ids=tuple(undisturbed[:done]),
            )
            assert undisturbed[:done] + await system.text(resumed) == undisturbed


async def test_a_sequence_the_target_cannot_process_fails_alone(undisturbed):
    target = Target()
    target.handle.poison = SequenceId("poison")
    async with running([target], [Draft()]) as system:
        outcomes = await asyncio.gather(
            system.text(ask("a")), system.text(ask("poison")), system.text(ask("b")), return_exceptions=True
        )
        assert outcomes[0] == outcomes[2] == undisturbed
        assert isinstance(outcomes[1], GenerationFailed)
        await system.is_idle()


async def test_a_freed_place_is_taken_at_once():
    # With one place and hardly any polls, a request that waited for the next poll would take a minute.
    async with running([Target()], [Draft()], max_num_seqs=1, poll_interval_s=60) as system:
        async with asyncio.timeout(10):
            texts = await asyncio.gather(*(system.text(ask(f"s{i}")) for i in range(4)))
            assert {len(ids) for ids in texts} == {60}
            first = system.client.generate(ask("leaves", max_tokens=3000))
            await anext(first)
            second = asyncio.create_task(system.text(ask("waits")))
            await eventually(lambda: system.coordinator.status().num_waiting == 1)
            await first.aclose()
            assert len(await second) == 60


async def test_several_drafts_share_the_sequences_of_one_target(undisturbed):
    drafts = [Draft("draft-0"), Draft("draft-1")]
    async with running([Target()], drafts) as system:
        texts = await asyncio.gather(*(system.text(ask(f"s{i}")) for i in range(4)))
        assert all(ids == undisturbed for ids in texts)
        calls = [draft.handle.num_calls for draft in drafts]
        assert min(calls) > 10
        await system.is_idle()


async def test_one_draft_serves_several_targets(undisturbed):
    targets, draft = [Target("target-0"), Target("target-1")], Draft()
    async with running(targets, [draft]) as system:
        texts = await asyncio.gather(*(system.text(ask(f"s{i}")) for i in range(4)))
        assert all(ids == undisturbed for ids in texts)
        assert min(target.handle.num_calls for target in targets) > 10
        assert draft.handle.num_calls > 20


async def test_growing_sequences_take_turns_when_the_targets_memory_is_too_small_for_all(undisturbed):
    # Each fits alone, two do not; with little room reserved for output all three are let in.
    prompts = [ask(f"s{i}", max_tokens=700) for i in range(3)]
    async with running([Target(kv_capacity_tokens=1200, max_context=1000)], [Draft()]) as system:
        texts = await asyncio.gather(*(system.text(request) for request in prompts))
        assert all(len(ids) == 700 and ids[:60] == undisturbed for ids in texts)
        await system.is_idle()


@pytest.fixture
def let_all_in(monkeypatch):
    """No room is kept for what sequences may still say."""
    monkeypatch.setattr(lane, "RESERVED_OUTPUT_TOKENS", 1)
    monkeypatch.setattr(lane, "MEMORY_RETRY_S", 0.01)


async def test_sequences_that_gave_way_come_back_when_there_is_room_for_all_of_them(undisturbed, let_all_in):
    target = Target(kv_capacity_tokens=420)
    async with running([target], [Draft()]) as system:
        texts = await asyncio.gather(*(system.text(ask(f"s{i}")) for i in range(15)))
        assert texts == [undisturbed] * 15
        await system.is_idle()
    away: dict[SequenceId, int] = {}
    num_returning: list[int] = []
    free, at_work = 0, set()
    for request, reply in target.handle.rounds:
        feeds = {item.feed.sequence_id: item.feed for item in request.items}
        back = feeds.keys() & away.keys()
        assert all((feeds[name].keep, feeds[name].epoch) == (0, away[name] + 1) for name in back)
        if at_work & feeds.keys():
            assert sum(len(feeds[name].token_ids) + lane.RESUME_ROOM_TOKENS for name in back) <= free
            num_returning.append(len(back))
        assert all(lost.out_of_memory for lost in reply.lost)
        away = {name: epoch for name, epoch in away.items() if name not in back}
        away |= {lost.sequence_id: lost.epoch for lost in reply.lost}
        free, at_work = reply.kv_free_tokens, feeds.keys() - away.keys()
    assert max(num_returning) > 1


async def test_the_oldest_sequence_never_gives_way(let_all_in):
    target = Target(kv_capacity_tokens=190)
    async with running([target], [Draft()]) as system:
        first = system.client.generate(ask("first"))
        await anext(first)
        others = asyncio.gather(*(system.text(ask(f"s{i}")) for i in range(5)))
        assert len([token for chunk in [c async for c in first] for token in chunk.token_ids]) >= 55
        await others
    lost = [lost.sequence_id for _, reply in target.handle.rounds for lost in reply.lost]
    assert lost
    assert "first" not in lost


async def test_a_sequence_that_waits_for_memory_can_be_cancelled(let_all_in):
    target = Target(kv_capacity_tokens=190, latency=lambda sequences, tokens: 0.001)
    async with running([target], []) as system:
        streams = [asyncio.create_task(system.text(ask(f"s{i}", max_tokens=150))) for i in range(3)]
        await eventually(lambda: any(reply.lost for _, reply in target.handle.rounds))
        waiting = [lost.sequence_id for _, reply in target.handle.rounds for lost in reply.lost][-1]
        streams.pop(int(waiting.removeprefix("s"))).cancel()
        assert {len(ids) for ids in await asyncio.gather(*streams)} == {150}
        await system.is_idle()


async def test_a_draft_that_ran_out_of_memory_is_asked_again_when_there_is_room():
    """The younger sequence loses its draft to the older one, goes on without, and gets it back."""
    draft, younger = Draft(kv_capacity_tokens=150), ask("younger", prompt=40, max_tokens=70)
    async with running([Target()], [draft]) as system:
        alone = await system.text(ask("alone", prompt=40, max_tokens=70))
        older = system.client.generate(ask("older", prompt=100, max_tokens=25))
        await anext(older)
        rest_of_older = asyncio.create_task(collect(older))
        chunks = await collect(system.client.generate(younger))
        await rest_of_older
        await system.is_idle()
    assert [token for chunk in chunks for token in chunk.token_ids] == alone
    drafted = "".join("+" if chunk.num_drafted else "-" for chunk in chunks[1:-1])
    assert re.fullmatch(r"\+*-+\++", drafted)


async def test_a_busy_poll_does_not_take_the_draft_away():
    draft = Draft()
    async with running([Target(latency=lambda sequences, tokens: 0.003)], [draft]) as system:
        answered = system.directory.drafts
        generation = asyncio.create_task(system.text(ask(max_tokens=150)))
        await eventually(lambda: draft.handle.num_calls > 2)
        system.directory.drafts = []  # one poll without an answer
        await asyncio.sleep(0.012)
        system.directory.drafts = answered
        await generation
        status = system.coordinator.status()
        assert status.num_spec_steps > 0.9 * status.num_sequence_rounds
