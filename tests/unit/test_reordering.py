"""Texts are exact whatever the network does: what arrives late, twice or out of order changes none.

Greedy and coupled texts are compared with plain decoding, token by token, of the same law. What goes wrong is
listed in `tests.faulty_handles`; that it did is asserted each time.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.coordinator import lane
from specdec.engine import sessions
from specdec.engine.simulated import SimulatedRunner, ToyLaw
from specdec.engine.verifying import TargetEngine
from specdec.messages import Draft, Endpoint, ProposeReply, ProposeRequest, VerifyItem, VerifyRequest
from specdec.speculation.sequence import SequenceState
from specdec.transport import CallServer, CallTimeout, Channel, Method
from specdec.transport.frames import Call, Cancel, Done, Failed, Frame, FrameConnection, Hello, Item, raw
from specdec.types import GenerationRequest, SamplingParams, TokenChunk, VerificationMode
from tests.fakes import eventually
from tests.faulty_handles import (
    OWNER,
    TARGET_FAULTS,
    DraftWay,
    Effect,
    Fault,
    FaultySystem,
    Network,
    faulty_config,
    faulty_system,
)
from tests.laws import generation, plain_ids, runner, toy_law

VOCAB_SIZE = 8
TARGET = toy_law("normal", VOCAB_SIZE, 31)
DRAFTS = {
    "good": ToyLaw(TARGET._logits + 0.5 * toy_law("normal", VOCAB_SIZE, 32)._logits),
    "identical": TARGET,
    "random": toy_law("peaky", VOCAB_SIZE, 33),
}
MODES = (VerificationMode.GREEDY, VerificationMode.COUPLED)

OFTEN = {
    Fault.TWICE: 4,
    Fault.AGAIN_BEFORE: 4,
    Fault.AGAIN_BEHIND: 4,
    Fault.REQUEST_LATE: 9,
    Fault.ANSWER_LATE: 9,
    Fault.ANSWER_LOST: 6,
    Fault.RELEASE_LATE: 3,
    Fault.RELEASE_TWICE: 1,
    Fault.RELEASE_LOST: 4,
    Fault.HEARTBEAT_LATE: 5,
    Fault.DRAFT_AWAY: 6,
}
"""Every kind, at every worker."""


# References and runs ----------------------------------------------------------------------------------------


def plain_text(request: GenerationRequest) -> tuple[int, ...]:
    return plain_ids(TARGET, request)


def requests_of(count: int, *, max_tokens: int, seed: int = 0) -> list[GenerationRequest]:
    """Greedy and coupled ones by turns, prompts of one to nine tokens."""
    rng = random.Random(seed)
    return [
        generation(
            f"s{number}",
            SamplingParams(mode=MODES[number % 2], temperature=1.0, seed=1000 * seed + number),
            prompt=tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 9))),
            max_tokens=max_tokens,
        )
        for number in range(count)
    ]


async def text_of(system: FaultySystem, request: GenerationRequest) -> list[TokenChunk]:
    return [chunk async for chunk in system.client.generate(request)]


async def run(
    network: Network,
    requests: Sequence[GenerationRequest],
    *,
    gamma: int | str = 3,
    pipeline: str = "serial",
    draft: str = "good",
    num_targets: int = 1,
    num_drafts: int = 1,
    at_once: bool = False,
    kv_capacity_tokens: int = 1_000_000,
    target_faults: frozenset[Fault] = TARGET_FAULTS,
    **config: int,
) -> list[TokenChunk]:
    """All requests together over a bad network; their texts are checked, and that nothing of them is left."""

    def new(law: ToyLaw) -> SimulatedRunner:
        return SimulatedRunner(runner(law)._law, max_context=4096, kv_capacity_tokens=kv_capacity_tokens)

    poll_interval_s = 1e-6 if at_once else 1e-3
    with patch.object(sessions, "LIVE_GRACE_S", -1.0):  # heartbeats free at once
        async with faulty_system(
            faulty_config(gamma, pipeline, poll_interval_s=poll_interval_s, **config),
            network,
            [new(TARGET) for _ in range(num_targets)],
            [new(DRAFTS[draft]) for _ in range(num_drafts)],
            at_once=at_once,
            target_faults=target_faults,
        ) as system:
            async with asyncio.timeout(60):
                answers = await asyncio.gather(*(text_of(system, request) for request in requests))
            await system.ends_empty()
    assert network.errors == []
    for request, chunks in zip(requests, answers, strict=True):
        text = tuple(token for chunk in chunks for token in chunk.token_ids)
        assert text == plain_text(request), request.sequence_id
        assert chunks[-1].finish_reason == "length"
    return [chunk for chunks in answers for chunk in chunks]


def num_drafted(chunks: Sequence[TokenChunk]) -> int:
    return sum(chunk.num_drafted for chunk in chunks)


def num_accepted(chunks: Sequence[TokenChunk]) -> int:
    return sum(chunk.num_accepted for chunk in chunks)


# The whole system -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("pipeline", ["serial", "lookahead"])
@pytest.mark.parametrize("gamma", [1, 2, 3, 4, "auto"])
async def test_no_text_depends_on_when_and_how_often_messages_arrive(gamma, pipeline, draft):
    network = Network(f"{gamma} {pipeline} {draft}", OFTEN)
    # Of eight requests' releases all may be lost or late, and none left to arrive twice.
    chunks = await run(network, requests_of(16, max_tokens=20), gamma=gamma, pipeline=pipeline, draft=draft)
    assert not [fault for fault in Fault if not network.counts[fault]]
    assert num_drafted(chunks) > 0
    if draft != "random":
        assert num_accepted(chunks) > 0
    else:
        assert num_accepted(chunks) < num_drafted(chunks)


@pytest.mark.parametrize("pipeline", ["serial", "lookahead", "auto"])
@pytest.mark.parametrize(("num_targets", "num_drafts"), [(2, 2), (2, 1), (1, 3)])
async def test_sequences_that_move_between_workers_say_the_same(num_targets, num_drafts, pipeline):
    network = Network(f"{num_targets} {num_drafts} {pipeline}", OFTEN)
    chunks = await run(
        network,
        requests_of(10, max_tokens=24, seed=1),
        pipeline=pipeline,
        num_targets=num_targets,
        num_drafts=num_drafts,
        max_num_seqs=6,
    )
    assert not [fault for fault in Fault if not network.counts[fault]]
    assert num_accepted(chunks) > 0


@pytest.mark.parametrize("pipeline", ["serial", "lookahead", "auto"])
async def test_what_faults_can_lead_to_has_happened_and_changed_no_text(pipeline):
    """Otherwise the tests here would say little."""
    counts: Counter[Fault | Effect] = Counter()
    for seed in range(3):
        network = Network(seed, OFTEN)
        chunks = await run(network, requests_of(8, max_tokens=40, seed=seed), pipeline=pipeline, at_once=True)
        counts += network.counts
        assert num_accepted(chunks) > 0
    assert not [kind for kind in (*Fault, *Effect) if not counts[kind]]


async def test_drafts_that_were_prepared_are_taken_between_faults():
    network = Network(0, {fault: 6 * gap for fault, gap in OFTEN.items()})
    requests = requests_of(8, max_tokens=100)
    chunks = await run(network, requests, pipeline="lookahead", draft="identical", at_once=True)
    assert network.counts.total() > 50
    assert sum(chunk.is_prepared for chunk in chunks) > 10


async def test_without_faults_nothing_is_counted():
    """So what is counted elsewhere was injected there."""
    network = Network(0, {})
    chunks = await run(network, requests_of(4, max_tokens=30), draft="identical")
    assert +network.counts == Counter()
    assert num_accepted(chunks) == num_drafted(chunks) > 0


@pytest.mark.parametrize("prefill_chunk_tokens", [1, 4])
async def test_prompts_fed_in_chunks_say_the_same(prefill_chunk_tokens, monkeypatch):
    monkeypatch.setattr(lane, "MAX_LOSSES", 1_000_000)  # a cache may be lost again before it is filled
    network = Network(prefill_chunk_tokens, {fault: 3 * gap for fault, gap in OFTEN.items()})
    chunks = await run(
        network, requests_of(6, max_tokens=20, seed=2), prefill_chunk_tokens=prefill_chunk_tokens
    )
    assert network.counts.total() > 50
    assert num_accepted(chunks) > 0


@pytest.mark.parametrize("pipeline", ["serial", "lookahead"])
async def test_sequences_that_give_way_for_want_of_memory_say_the_same(pipeline, monkeypatch):
    """What arrives late takes room, too, and may drive out those who need it."""
    monkeypatch.setattr(lane, "RESERVED_OUTPUT_TOKENS", 1)
    monkeypatch.setattr(lane, "MEMORY_RETRY_S", 0.01)
    monkeypatch.setattr(lane, "RESUME_ROOM_TOKENS", 4)
    network = Network(pipeline, OFTEN)
    chunks = await run(
        network, requests_of(8, max_tokens=30, seed=3), pipeline=pipeline, kv_capacity_tokens=90
    )
    assert not [fault for fault in Fault if not network.counts[fault]]
    assert num_accepted(chunks) > 0


async def test_any_old_propose_request_may_come_again_at_any_time():
    """Nothing else goes wrong: the worker itself has to cope with it."""
    for draft in DRAFTS:
        network = Network(draft, {Fault.AGAIN_BEFORE: 2, Fault.AGAIN_BEHIND: 2, Fault.TWICE: 3})
        chunks = await run(
            network,
            requests_of(6, max_tokens=40, seed=4),
            draft=draft,
            pipeline="lookahead",
            target_faults=frozenset(),
        )
        assert network.counts[Fault.AGAIN_BEFORE] > 5
        assert network.counts[Fault.AGAIN_BEHIND] > 5
        assert num_drafted(chunks) > 0


def test_texts_are_plain_decoding_for_any_mix_of_faults():
    counts: Counter[Fault | Effect] = Counter()

    @settings(max_examples=40, deadline=None)
    @given(
        seed=st.integers(0, 2**32),
        gaps=st.dictionaries(st.sampled_from(list(Fault)), st.integers(3, 15), min_size=1),
        gamma=st.sampled_from([1, 2, 3, 4, "auto"]),
        pipeline=st.sampled_from(["serial", "lookahead", "auto"]),
        draft=st.sampled_from(list(DRAFTS)),
        workers=st.tuples(st.integers(1, 2), st.integers(1, 2)),
        num_requests=st.integers(1, 4),
    )
    def check(
        seed: int,
        gaps: Mapping[Fault, int],
        gamma: int | str,
        pipeline: str,
        draft: str,
        workers: tuple[int, int],
        num_requests: int,
    ) -> None:
        network = Network(seed, gaps)
        asyncio.run(
            run(
                network,
                requests_of(num_requests, max_tokens=14, seed=seed % 5),
                gamma=gamma,
                pipeline=pipeline,
                draft=draft,
                num_targets=workers[0],
                num_drafts=workers[1],
                at_once=True,
            )
        )
        counts.update(network.counts)

    check()
    assert not [fault for fault in Fault if not counts[fault]]


# One thing at a time ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["target", "draft"])
async def test_a_worker_that_does_the_work_behind_a_real_deadline_changes_no_text(role):
    """It hangs in the middle of a forward, is given up, and goes on when the others have gone on."""
    is_to_hang, gate = threading.Event(), threading.Event()
    ended: list[str] = []

    def latency(num_sequences: int, num_tokens: int) -> float:
        if is_to_hang.is_set():
            is_to_hang.clear()
            assert gate.wait(30)
            ended.append("late")
        return 0.0

    def new(law: ToyLaw, name: str) -> SimulatedRunner:
        return SimulatedRunner(runner(law)._law, **({"latency": latency} if name == role else {}))

    config = faulty_config(3, "serial", **{f"{role}_timeout_s": 0.1})
    targets = [new(TARGET, "target") for _ in range(2)]
    (request,) = requests_of(1, max_tokens=60)
    try:
        async with faulty_system(config, Network(0, {}), targets, [new(DRAFTS["good"], "draft")]) as system:
            text: list[int] = []
            async for chunk in system.client.generate(request):
                if len(text) < 10 <= len(text) + len(chunk.token_ids):
                    is_to_hang.set()
                text += chunk.token_ids
                if len(text) > 30:
                    assert not is_to_hang.is_set()
                    gate.set()
            assert tuple(text) == plain_text(request)
            await eventually(lambda: ended == ["late"])
            await system.ends_empty()
    finally:
        gate.set()


class HeldDraftWay(DraftWay):
    """Its answers wait at a gate."""

    num_waiting = 0
    is_gone = False

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.gate = asyncio.Event()

    def answers_poll(self) -> bool:
        return not self.is_gone

    async def propose(self, request: ProposeRequest) -> ProposeReply:
        reply = await super().propose(request)
        self.num_waiting += 1
        await self.gate.wait()
        return reply


async def test_an_answer_that_comes_when_its_sequences_have_left_the_draft_is_dropped():
    (request,) = requests_of(1, max_tokens=40)
    async with faulty_system(
        faulty_config(3, "serial"),
        Network(0, {}),
        [runner(TARGET)],
        [runner(TARGET)],
        draft_way=HeldDraftWay,
    ) as system:
        (draft,) = system.directory.drafts
        answer = asyncio.create_task(text_of(system, request))
        await eventually(lambda: draft.num_waiting == 1)
        draft.is_gone = True
        await eventually(lambda: not system.coordinator.status().drafts)
        draft.gate.set()
        chunks = await answer
        assert tuple(token for chunk in chunks for token in chunk.token_ids) == plain_text(request)
        assert num_drafted(chunks) == 0
        await system.ends_empty()


def test_a_late_copy_of_an_answered_verify_request_does_not_harm_what_was_fed_behind_it():
    """Refused drafts make it visible: the copy puts their tokens where committed ones are."""
    (request,) = requests_of(1, max_tokens=12)
    expected = plain_text(request)
    state, engine = SequenceState(request), TargetEngine(runner(TARGET))
    earlier: VerifyItem | None = None
    while state.finish_reason is None:
        wrong = (expected[state.log.num_output_tokens] + 1) % VOCAB_SIZE
        draft = Draft(sequence_id=state.sequence_id, epoch=0, token_ids=(wrong,) * 3)
        item = state.verify_item(draft, 100)
        reply = engine.verify(VerifyRequest(owner=OWNER, items=(item,)))
        if earlier is not None:
            engine.verify(VerifyRequest(owner=OWNER, items=(earlier,)))
        earlier = item
        for lost in reply.lost:
            state.on_target_lost(lost)
        for verdict in reply.verdicts:
            state.on_verdict(item.draft, verdict)
    assert state.log.output_ids == expected


# The transport ----------------------------------------------------------------------------------------------

HOST = "127.0.0.1"
DOUBLE = Method("double", tuple[int], int)
COUNT = Method("count", tuple[int], int)


class Script:
    """A server whose answers are sent by hand."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.cancelled: list[int] = []
        self.connection = FrameConnection(self._take, lambda: None)
        self._num_heard = 0

    def _take(self, frame: Frame) -> None:
        if isinstance(frame, Call):
            self.calls.append(frame)
        elif isinstance(frame, Cancel):
            self.cancelled.append(frame.call_id)

    def answer(self, call: Call) -> None:
        (number,) = DOUBLE.decode_args(call.args)
        self.connection.send(Done(call.call_id, raw(2 * number)))

    async def heard(self, num_calls: int) -> list[Call]:
        """The next so many calls, once all have come."""
        start, self._num_heard = self._num_heard, self._num_heard + num_calls
        await eventually(lambda: len(self.calls) >= self._num_heard)
        return self.calls[start : self._num_heard]


@asynccontextmanager
async def scripted() -> AsyncIterator[tuple[Script, Channel]]:
    script = Script()
    server = await asyncio.get_running_loop().create_server(lambda: script.connection, HOST, 0)
    port = server.sockets[0].getsockname()[1]
    channel = Channel(Endpoint(host=HOST, port=port, token="token"), "callee")
    try:
        yield script, channel
    finally:
        channel.close()
        server.close()


def double(channel: Channel, number: int, timeout_s: float = 20.0) -> asyncio.Task[int]:
    return asyncio.create_task(channel.call(DOUBLE, number, timeout_s=timeout_s))


@pytest.mark.parametrize("seed", range(5))
async def test_every_call_gets_its_own_answer_in_whatever_order_and_however_often_they_come(seed):
    rng = random.Random(seed)
    async with scripted() as (script, channel):
        answers = [double(channel, number) for number in range(20)]
        calls = await script.heard(20)
        rng.shuffle(calls)
        for number, call in enumerate(calls):
            script.answer(call)
            for call_id in (rng.choice(calls[: number + 1]).call_id, rng.randrange(1000, 2000)):
                script.connection.send(
                    rng.choice(
                        [
                            Done(call_id, raw(-1)),
                            Failed(call_id, "TooManyRequests", "full"),
                            Item(call_id, raw(-1)),
                        ]
                    )
                )
        assert await asyncio.gather(*answers) == [2 * number for number in range(20)]
        last = double(channel, 21)
        script.answer((await script.heard(1))[0])
        assert await last == 42


async def test_what_comes_for_a_closed_stream_and_items_for_a_call_disturb_no_call():
    async with scripted() as (script, channel):
        stream = channel.stream(COUNT, 3)
        first = asyncio.ensure_future(anext(stream))
        (call,) = await script.heard(1)
        other = double(channel, 5)
        (other_call,) = await script.heard(1)
        script.connection.send(Item(other_call.call_id, raw(-1)))
        script.connection.send(Item(call.call_id, raw(7)))
        assert await first == 7
        await stream.aclose()
        await eventually(lambda: script.cancelled == [call.call_id])
        for frame in (
            Item(call.call_id, raw(8)),
            Failed(call.call_id, "", "late"),
            Done(call.call_id, raw(None)),
        ):
            script.connection.send(frame)
        script.answer(other_call)
        assert await other == 10


async def test_an_answer_to_a_call_whose_time_is_over_disturbs_no_other():
    async with scripted() as (script, channel):
        waiting = double(channel, 1)
        (waiting_call,) = await script.heard(1)
        with pytest.raises(CallTimeout):
            await channel.call(DOUBLE, 2, timeout_s=0)
        (late_call,) = await script.heard(1)
        await eventually(lambda: script.cancelled == [late_call.call_id])
        behind = double(channel, 3)
        (behind_call,) = await script.heard(1)
        script.answer(late_call)
        script.connection.send(Failed(late_call.call_id, "TooManyRequests", "full"))
        script.answer(behind_call)
        assert await behind == 6
        assert not waiting.done()
        script.answer(late_call)
        script.answer(waiting_call)
        assert await waiting == 2


class Patient:
    """Methods that answer when a test lets them, cancelled or not."""

    def __init__(self) -> None:
        self.gates = {number: asyncio.Event() for number in range(10)}
        self.cancelled: list[int] = []
        self.done: list[int] = []
        self.started: list[int] = []

    async def double(self, number: int) -> int:
        self.started.append(number)
        try:
            await self.gates[number].wait()
        except asyncio.CancelledError:
            self.cancelled.append(number)
            await self.gates[number].wait()  # it was in the middle of something that cannot be stopped
        self.done.append(number)
        return 2 * number


@asynccontextmanager
async def patient() -> AsyncIterator[tuple[Patient, Endpoint]]:
    callee = Patient()
    server = CallServer({DOUBLE: callee.double})
    try:
        yield callee, await server.start(HOST)
    finally:
        for gate in callee.gates.values():
            gate.set()
        await server.close()


async def test_a_server_answers_in_the_order_in_which_its_methods_end():
    async with patient() as (callee, endpoint):
        channel = Channel(endpoint, "callee")
        answers = [double(channel, number) for number in range(5)]
        for number in (3, 0, 4, 2):
            callee.gates[number].set()
            assert await answers[number] == 2 * number
            assert not answers[1].done()
        callee.gates[1].set()
        assert await answers[1] == 2
        assert callee.done == [3, 0, 4, 2, 1]
        channel.close()


async def test_a_method_that_ends_in_spite_of_being_cancelled_disturbs_no_other():
    async with patient() as (callee, endpoint):
        channel = Channel(endpoint, "callee")
        waiting = double(channel, 1)
        callee.gates[0].set()
        assert await channel.call(DOUBLE, 0, timeout_s=20) == 0
        given_up = double(channel, 2)
        await eventually(lambda: 2 in callee.started)
        given_up.cancel()
        await eventually(lambda: callee.cancelled == [2])
        callee.gates[2].set()
        await eventually(lambda: 2 in callee.done)
        callee.gates[1].set()
        assert await waiting == 2
        callee.gates[3].set()
        assert await channel.call(DOUBLE, 3, timeout_s=20) == 6
        channel.close()


async def test_a_server_takes_calls_and_cancellations_in_any_order_and_number():
    received: list[Frame] = []
    async with patient() as (callee, endpoint):
        loop = asyncio.get_running_loop()
        connection = FrameConnection(received.append, lambda: None)
        await loop.create_connection(lambda: connection, endpoint.host, endpoint.port)
        connection.send(Hello(endpoint.token))
        connection.send(Cancel(7))  # overtook its call
        connection.send(Cancel(99))  # of a call that never was
        for call_id, number in ((7, 1), (8, 2), (8, 2), (9, 3)):
            connection.send(Call(call_id, "double", raw((number,))))
        for number in (3, 2, 1):
            callee.gates[number].set()
            await eventually(lambda number=number: number in callee.done)
        await eventually(lambda: len(received) == 4)
        connection.send(Cancel(8))  # has ended
        answers = [(frame.call_id, DOUBLE.decode_answer(frame.body)) for frame in received]
        assert sorted(answers) == [(7, 2), (8, 4), (8, 4), (9, 6)]
        assert answers[0] == (9, 6)
        connection.close()


async def test_a_call_that_begins_while_the_old_connection_ends_goes_over_a_new_one():
    async with patient() as (callee, endpoint):
        channel = Channel(endpoint, "callee")
        for gate in callee.gates.values():
            gate.set()
        assert await channel.call(DOUBLE, 1, timeout_s=20) == 2
        channel._connection.close()  # as a malformed frame would
        try:
            assert await channel.call(DOUBLE, 2, timeout_s=20) == 4
        finally:
            channel.close()
