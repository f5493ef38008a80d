"""A worker: one model thread, an event loop that always answers, and messages that survive pickling."""

import asyncio
import os
import pickle
import threading
from contextlib import asynccontextmanager
from dataclasses import fields, is_dataclass

import numpy as np
import pytest

from specdec import errors, messages, types
from specdec.engine import sessions
from specdec.engine.drafting import DraftEngine
from specdec.engine.simulated import SimulatedRunner, ToyLaw
from specdec.engine.threads import pin_threads, set_num_threads
from specdec.engine.verifying import TargetEngine
from specdec.engine.worker import DraftWorker, ModelThread, TargetWorker
from specdec.errors import KVCacheFull
from specdec.messages import Heartbeat
from specdec.transport.codec import Decoder, encode
from tests.tiny_models import (
    OWNER,
    REJECTION,
    VOCAB_SIZE,
    feed,
    judge,
    propose,
    sequence_id,
    simulated_runner,
    tokens,
    verify,
)

A, B = sequence_id("a"), sequence_id("b")


class Gate:
    """Holds the model thread inside a forward until opened."""

    def __init__(self):
        self.entered = threading.Event()
        self.opened = threading.Event()

    def wait(self, _seconds):
        self.entered.set()
        assert self.opened.wait(timeout=10.0)

    async def until_entered(self):
        await asyncio.to_thread(self.entered.wait, 10.0)
        assert self.entered.is_set()


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.opened.set()


def gated_runner(gate):
    return SimulatedRunner(
        ToyLaw.random(VOCAB_SIZE, 0), latency=lambda num_sequences, num_tokens: 1.0, sleep=gate.wait
    )


@asynccontextmanager
async def running(worker):
    try:
        yield worker
    finally:
        worker.close()


def target_worker(runner):
    return running(TargetWorker(TargetEngine(runner), worker_id="target-0", model="toy", node_id="node-7"))


def draft_worker(runner):
    return running(DraftWorker(DraftEngine(runner, 16), worker_id="draft-0", model="toy-draft"))


def beat(*live):
    return Heartbeat(owner=OWNER, live=frozenset(live))


# The model thread -----------------------------------------------------------------------------------------


async def test_status_states_who_and_how_full():
    async with target_worker(simulated_runner(max_context=100, kv_capacity_tokens=200)) as worker:
        await worker.verify(verify(judge(feed("a", tokens(5))), judge(feed("b", tokens(3)))))
        status = worker.status()
        assert status == await worker.heartbeat(beat(A, B))
    assert (status.worker_id, status.role, status.model, status.node_id) == (
        "target-0",
        "target",
        "toy",
        "node-7",
    )
    assert status.pid == os.getpid()
    assert (status.vocab_size, status.max_context) == (VOCAB_SIZE, 100)
    assert (status.kv_capacity_tokens, status.kv_tokens_in_use, status.num_sequences) == (200, 8, 2)
    assert status.num_calls == 1


async def test_draft_worker_proposes_and_says_so():
    async with draft_worker(simulated_runner()) as worker:
        reply = await worker.propose(propose((feed("a", tokens(5)), 3)))
        assert len(reply.drafts[0].token_ids) == 3
        assert (worker.status().role, worker.status().model) == ("draft", "toy-draft")


async def test_heartbeat_answers_while_the_model_is_busy(gate):
    async with target_worker(gated_runner(gate)) as worker:
        call = asyncio.create_task(worker.verify(verify(judge(feed("a", tokens(5))))))
        await gate.until_entered()
        async with asyncio.timeout(5.0):
            status = await worker.heartbeat(beat(A))
        assert status.num_calls == 1
        assert not call.done()
        gate.opened.set()
        assert len((await call).verdicts) == 1


async def test_release_waits_for_the_forward_that_uses_the_cache(gate):
    async with target_worker(gated_runner(gate)) as worker:
        call = asyncio.create_task(worker.verify(verify(judge(feed("a", tokens(5))))))
        await gate.until_entered()
        release = asyncio.create_task(worker.release([A]))
        await worker.heartbeat(beat(A))
        assert not release.done()
        gate.opened.set()
        assert len((await call).verdicts) == 1
        await release
        assert (worker.status().num_sequences, worker.status().kv_tokens_in_use) == (0, 0)


async def test_status_is_as_of_the_last_finished_work(gate):
    """What the model thread is changing is not looked at from outside."""
    async with target_worker(gated_runner(gate)) as worker:
        call = asyncio.create_task(worker.verify(verify(judge(feed("a", tokens(5))))))
        await gate.until_entered()
        assert (worker.status().num_sequences, worker.status().kv_tokens_in_use) == (0, 0)
        gate.opened.set()
        await call
        assert (worker.status().num_sequences, worker.status().kv_tokens_in_use) == (1, 5)


async def test_worker_says_how_long_it_has_been_busy(gate):
    async with target_worker(gated_runner(gate)) as worker:
        assert worker.busy_s() == 0.0
        call = asyncio.create_task(worker.verify(verify(judge(feed("a", tokens(5))))))
        await gate.until_entered()
        first = worker.busy_s()
        assert 0.0 < first <= worker.busy_s() < 10.0
        gate.opened.set()
        await call
        assert worker.busy_s() == 0.0


async def test_calls_run_in_the_order_they_came(gate):
    async with target_worker(gated_runner(gate)) as worker:
        first = asyncio.create_task(worker.verify(verify(judge(feed("a", tokens(5))))))
        await gate.until_entered()
        second = asyncio.create_task(worker.verify(verify(judge(feed("a", [4], keep=5)))))
        release = asyncio.create_task(worker.release([A]))
        third = asyncio.create_task(worker.verify(verify(judge(feed("a", [4], keep=6)))))
        await asyncio.sleep(0)
        gate.opened.set()
        assert len((await first).verdicts) == len((await second).verdicts) == 1
        await release
        assert "not cached here" in (await third).lost[0].reason


async def test_cancelled_call_does_not_stop_the_model_thread(gate):
    """The caller's deadline has passed: the worker finishes, and serves the next call."""
    async with target_worker(gated_runner(gate)) as worker:
        call = asyncio.create_task(worker.verify(verify(judge(feed("a", tokens(5))))))
        await gate.until_entered()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        gate.opened.set()
        assert len((await worker.verify(verify(judge(feed("a", [4], keep=5))))).verdicts) == 1


async def test_heartbeat_frees_orphans_behind_the_running_call(gate, monkeypatch):
    monkeypatch.setattr(sessions, "LIVE_GRACE_S", -1.0)
    async with target_worker(gated_runner(gate)) as worker:
        call = asyncio.create_task(worker.verify(verify(judge(feed("a", tokens(5))))))
        await gate.until_entered()
        await worker.heartbeat(beat())
        gate.opened.set()
        assert len((await call).verdicts) == 1
        await worker.release([])  # behind the heartbeat's work
        assert worker.status().num_sequences == 0


class _FailingRunner(SimulatedRunner):
    error: Exception | None = None

    def forward(self, items):
        if self.error is not None:
            raise self.error
        return super().forward(items)


@pytest.mark.parametrize("error", [KVCacheFull("no room"), RuntimeError("device lost")])
async def test_engine_errors_reach_the_caller_and_the_worker_lives_on(error):
    runner = _FailingRunner(ToyLaw.random(VOCAB_SIZE, 0))
    async with target_worker(runner) as worker:
        await worker.verify(verify(judge(feed("a", tokens(5)))))
        runner.error = error
        with pytest.raises(type(error), match=str(error)):
            await worker.verify(verify(judge(feed("a", [4, 5], keep=5))))
        runner.error = None
        reply = await worker.verify(verify(judge(feed("a", [4], keep=5))))
        assert (len(reply.verdicts), reply.lost) == (1, ())


async def test_failed_model_calls_are_counted_whatever_heartbeats_and_releases_come_between():
    runner = _FailingRunner(ToyLaw.random(VOCAB_SIZE, 0))
    async with target_worker(runner) as worker:
        runner.error = RuntimeError("device lost")
        for count in (1, 2, 3):
            with pytest.raises(RuntimeError, match="device lost"):
                await worker.verify(verify(judge(feed("a", tokens(5)))))
            await worker.heartbeat(beat(A))
            await worker.release([B])
            assert worker.num_failures_in_a_row == count
        runner.error = None
        await worker.verify(verify(judge(feed("a", tokens(5)))))
        assert worker.num_failures_in_a_row == 0


async def test_tokens_of_a_failed_forward_count_as_not_cached():
    runner = _FailingRunner(ToyLaw.random(VOCAB_SIZE, 0))
    async with target_worker(runner) as worker:
        await worker.verify(verify(judge(feed("a", tokens(5)))))
        runner.error = RuntimeError("device lost")
        with pytest.raises(RuntimeError):
            await worker.verify(verify(judge(feed("a", [4, 5], keep=5))))
        runner.error = None
        reply = await worker.verify(verify(judge(feed("a", [6], keep=7))))
        assert "keep 7, but 5 positions are cached" in reply.lost[0].reason


# Pickling -------------------------------------------------------------------------------------------------


def all_errors():
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    return [value for value in classes if issubclass(value, errors.SpecDecError)]


@pytest.mark.parametrize("error_class", all_errors(), ids=lambda cls: cls.__name__)
def test_errors_survive_pickling(error_class):
    error = pickle.loads(pickle.dumps(error_class("what happened", "temperature")))
    assert type(error) is error_class
    assert (error.message, error.param, str(error)) == ("what happened", "temperature", "what happened")
    bare = pickle.loads(pickle.dumps(error_class("what happened")))
    assert (bare.message, bare.param) == ("what happened", None)


def test_there_are_errors_to_test():
    assert len(all_errors()) >= 18


_DRAFT = messages.Draft(
    sequence_id=A,
    epoch=2,
    token_ids=(4, 5),
    support_ids=np.arange(6, dtype=np.int32).reshape(2, 3),
    support_probs=np.full((2, 3), 1 / 3, dtype=np.float32),
)
_LOST = messages.Lost(sequence_id=B, epoch=1, reason="full", out_of_memory=True)
_FEED = feed("a", [3, 4], epoch=2, sampling=REJECTION, stop_token_ids=[2])
_STATUS = messages.WorkerStatus(
    worker_id=types.WorkerId("w"),
    role="draft",
    pid=1,
    node_id="n",
    model="m",
    device="cpu",
    vocab_size=64,
    max_context=512,
    kv_capacity_tokens=1000,
    kv_tokens_in_use=10,
    num_sequences=1,
    num_calls=3,
)
_CHUNK = types.TokenChunk(sequence_id=A, token_ids=(4,), num_drafted=2, num_accepted=1, finish_reason="stop")
_LOGPROBS = messages.RowLogprobs(
    own=np.array([-0.5, -1.5], np.float32),
    draft=np.array([-0.25], np.float32),
    top_ids=np.array([[3, 1], [0, 2]], np.int32),
    top_logprobs=np.array([[-0.5, -2.0], [-0.125, -3.0]], np.float32),
)
MESSAGES = [
    _FEED.opening,
    _FEED,
    messages.ProposeItem(feed=_FEED, num_draft_tokens=3),
    propose((_FEED, 3), (feed("b", [9], keep=4), 0)),
    _DRAFT,
    _LOST,
    messages.ProposeReply(drafts=(_DRAFT,), lost=(_LOST,)),
    judge(_FEED, _DRAFT),
    verify(judge(_FEED, _DRAFT), judge(feed("b", [9], keep=4))),
    messages.Verdict(sequence_id=A, epoch=2, token_ids=(4, 5, 6), ratios=(0.5, 2.0)),
    _LOGPROBS,
    messages.Verdict(sequence_id=A, epoch=2, token_ids=(4, 5), logprobs=_LOGPROBS),
    messages.Scores(sequence_id=A, epoch=2, logprobs=_LOGPROBS),
    messages.VerifyReply(verdicts=(messages.Verdict(sequence_id=A, epoch=2, token_ids=(4,)),), lost=(_LOST,)),
    messages.VerifyReply(verdicts=(), scores=(messages.Scores(sequence_id=A, epoch=2, logprobs=_LOGPROBS),)),
    Heartbeat(owner="c", live=frozenset({A, B})),
    _STATUS,
    messages.Endpoint(host="127.0.0.1", port=1, token="secret"),
    messages.RoundUpdate(chunks=(_CHUNK,)),
    messages.CoordinatorStatus(
        coordinator_id="c",
        pid=1,
        is_ready=True,
        num_running=1,
        num_waiting=2,
        model="m",
        target_model="t",
        max_context=512,
        num_speculative_tokens=4,
        targets=(_STATUS,),
        drafts=(_STATUS, _STATUS),
        num_spec_steps=1,
        num_draft_tokens=10,
        num_accepted_draft_tokens=7,
        num_output_tokens=12,
        num_sequence_rounds=5,
        round_s=0.02,
        num_prepared_drafts=1,
    ),
]


def plain(value):
    """A value that compares: messages and arrays opened up."""
    if isinstance(value, types.Part):
        return type(value).__name__, {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if is_dataclass(value):
        return type(value).__name__, {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, np.ndarray):
        return value.dtype.name, value.shape, value.tolist()
    return [plain(entry) for entry in value] if isinstance(value, tuple) else value


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_survive_transport_and_pickling(message):
    assert plain(Decoder(type(message))(encode(message))) == plain(message)
    assert plain(pickle.loads(pickle.dumps(message))) == plain(message)


def test_every_message_is_tested():
    defined = {
        value
        for value in vars(messages).values()
        if is_dataclass(value) or (isinstance(value, type) and issubclass(value, types.Part))
    }
    own = {value for value in defined if value.__module__ == messages.__name__}
    assert own == {type(message) for message in MESSAGES if type(message).__module__ == messages.__name__}


def test_pinned_threads_have_a_core_each_and_no_one_else_has():
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        pytest.skip("one core")
    thread = ModelThread()
    thread.run(lambda: set_num_threads(None))
    assert thread.run(pin_threads)
    affinities = [os.sched_getaffinity(int(name)) for name in os.listdir("/proc/self/task")]
    pinned = [affinity for affinity in affinities if len(affinity) == 1]
    assert set().union(*pinned) == cores
    assert len(thread.run(lambda: os.sched_getaffinity(0))) == 1
    assert os.sched_getaffinity(0) == cores
    thread.shutdown()


def test_team_smaller_than_the_machine_is_not_pinned():
    thread = ModelThread()
    thread.run(lambda: set_num_threads(1))
    assert not thread.run(pin_threads)
    assert thread.run(lambda: os.sched_getaffinity(0)) == os.sched_getaffinity(0)
    thread.shutdown()
