"""Who waits, who is next, who is refused; a queue with a clock of its own, then the coordinator around it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.config import CoordinatorConfig
from specdec.coordinator.admission import (
    MAX_RETRY_AFTER_S,
    MIN_RETRY_AFTER_S,
    FairQueue,
)
from specdec.errors import TooManyRequests
from specdec.types import GenerationRequest
from tests.fakes import eventually
from tests.unit.test_coordinator import System, Target, ask, running


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def filled(max_waiting: int = 100, clock: Clock | None = None, **num_by_client: int) -> FairQueue:
    queue = FairQueue(max_waiting, clock or Clock())
    for client, num in num_by_client.items():
        for idx in range(num):
            queue.append(f"{client}{idx}", client)
    return queue


def drained(queue: FairQueue, running: Counter[str] | None = None) -> list[str]:
    """Everything in the order in which it gets places; nothing that runs ends."""
    running = running or Counter()
    order = []
    while (sequence_id := queue.head(running)) is not None:
        queue.start(sequence_id)
        running[sequence_id.rstrip("0123456789")] += 1
        order.append(sequence_id)
    return order


def is_refused(queue: FairQueue, client: str) -> bool:
    try:
        queue.check_room(client)
    except TooManyRequests:
        return True
    return False


def test_one_client_is_served_first_come_first_served():
    assert drained(filled(a=4)) == ["a0", "a1", "a2", "a3"]


def test_clients_take_turns_whoever_came_first():
    assert drained(filled(a=4, b=2, c=1)) == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]


def test_who_has_fewest_running_is_next():
    order = drained(filled(a=3, b=3), Counter(a=2))
    assert order == ["b0", "b1", "a0", "b2", "a1", "a2"]


def test_what_lost_its_place_goes_before_all_others_in_its_own_order():
    queue = filled(a=1)
    queue.put_first(["x", "y"])
    queue.put_first(["z"])
    assert drained(queue) == ["x", "y", "z", "a0"]


def test_a_lone_client_gets_half_and_leaves_room_for_the_next():
    queue = FairQueue(8, Clock())
    taken = Counter()
    for client in ("a", "b", "c"):
        for idx in range(9):
            if is_refused(queue, client):
                break
            queue.append(f"{client}{idx}", client)
            taken[client] += 1
    assert taken == {"a": 4, "b": 2, "c": 1}


@pytest.mark.parametrize("client", ["", "a"])
@pytest.mark.parametrize("max_waiting", [0, 1, 5, 8])
def test_what_a_client_gets_of_an_empty_queue_is_what_it_was_told(client, max_waiting):
    queue = FairQueue(max_waiting, Clock())
    for idx in range(CoordinatorConfig(max_waiting=max_waiting).max_waiting_of(client)):
        assert not is_refused(queue, client)
        queue.append(f"s{idx}", client)
    assert is_refused(queue, client)


def test_without_names_the_whole_queue_may_be_used():
    queue = FairQueue(3, Clock())
    for idx in range(3):
        queue.check_room("")
        queue.append(f"s{idx}", "")
    with pytest.raises(TooManyRequests, match="3 requests are waiting already"):
        queue.check_room("")


def test_what_waits_no_longer_leaves_its_place():
    queue = filled(2, a=1)
    with pytest.raises(TooManyRequests):
        queue.check_room("a")
    queue.remove("a0")
    queue.check_room("a")
    assert len(queue) == 0
    assert queue.head({}) is None


def test_nothing_may_wait_where_there_are_no_places():
    with pytest.raises(TooManyRequests):
        FairQueue(0, Clock()).check_room("a")


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("append"), st.sampled_from(["", "a", "b", "c"])),
            st.tuples(st.sampled_from(["return", "start", "remove"]), st.just("")),
        ),
        max_size=60,
    ),
    st.integers(0, 12),
)
def test_it_is_bounded_holds_each_once_and_serves_the_least_served(steps, max_waiting):
    queue = FairQueue(max_waiting, Clock())
    waiting: dict[str, str] = {}
    returned: list[str] = []
    running: Counter[str] = Counter()
    for idx, (action, client) in enumerate(steps):
        if action == "append":
            if is_refused(queue, client):
                assert len(queue) >= max_waiting or (client and 2 * len(queue) >= max_waiting)
                continue
            queue.append(f"s{idx}", client)
            waiting[f"s{idx}"] = client
        elif action == "return":
            queue.put_first([f"r{idx}"])
            returned.append(f"r{idx}")
        elif action == "start":
            head = queue.head(running)
            if returned:
                assert head == returned.pop(0)
            elif waiting:
                client = waiting.pop(head)
                assert running[client] == min(running[name] for name in {client, *waiting.values()})
                running[client] += 1
            else:
                assert head is None
                continue
            queue.start(head)
        elif waiting:
            sequence_id = sorted(waiting)[0]
            queue.remove(sequence_id)
            del waiting[sequence_id]
        assert len(queue) == len(waiting) + len(returned)
        assert len(waiting) <= max_waiting


def refused(queue: FairQueue) -> float:
    with pytest.raises(TooManyRequests) as caught:
        queue.check_room("")
    assert caught.value.retry_after_s is not None
    return caught.value.retry_after_s


def start_one_every(queue: FairQueue, clock: Clock, interval_s: float, num: int) -> None:
    for _ in range(num):
        clock.now_s += interval_s
        queue.start(queue.head({}))


def test_retry_advice_is_what_the_queue_takes_to_empty():
    clock = Clock()
    queue = filled(20, clock, a=40)
    start_one_every(queue, clock, interval_s=0.5, num=20)
    assert refused(queue) == pytest.approx(20 * 0.5, rel=0.1)
    fast = filled(20, clock, a=60)
    start_one_every(fast, clock, interval_s=0.05, num=40)
    assert refused(fast) == pytest.approx(1.0, rel=0.1)


def test_retry_advice_is_bounded_also_where_nothing_moves_or_nothing_is_known():
    clock = Clock()
    queue = filled(20, clock, a=20)
    assert refused(queue) == MIN_RETRY_AFTER_S  # nothing measured yet
    clock.now_s += 3600
    assert refused(queue) == MAX_RETRY_AFTER_S


def test_a_new_burst_is_judged_by_the_one_before():
    clock = Clock()
    queue = filled(20, clock, a=20)
    start_one_every(queue, clock, interval_s=0.5, num=20)
    assert len(queue) == 0
    clock.now_s += 3600  # idle time is not slowness
    for idx in range(20):
        queue.append(f"n{idx}", "")
    assert refused(queue) == pytest.approx(10.0, rel=0.1)
    clock.now_s += 31
    assert refused(queue) == MAX_RETRY_AFTER_S  # by now it stands still


# Around it, a coordinator

NUM_TOKENS = 20


def ask_as(client: str, name: str, **changes: object) -> GenerationRequest:
    return replace(ask(name, max_tokens=NUM_TOKENS), client=client, **changes)


@asynccontextmanager
async def busy(**coordinator: object) -> AsyncIterator[tuple[System, Target, list[str]]]:
    """A target with room for two sequences that stands still until its gate opens; what ended, in order."""
    target = Target()
    target.handle.gate = asyncio.Event()
    async with running([target], [], max_num_seqs=2, **coordinator) as system:
        yield system, target, []


async def send(system: System, request: GenerationRequest, ended: list[str]) -> asyncio.Task[None]:
    """Submit it, and take note when it ends."""

    async def run() -> None:
        assert len(await system.text(request)) == NUM_TOKENS
        ended.append(request.sequence_id)

    before = len(system.coordinator._tickets)
    task = asyncio.create_task(run())
    await eventually(lambda: task.done() or len(system.coordinator._tickets) > before)
    return task


async def test_a_second_client_waits_for_one_place_not_for_the_first_ones_queue():
    async with busy() as (system, target, ended):
        tasks = [await send(system, ask_as("a", f"a{idx}"), ended) for idx in range(8)]
        tasks.append(await send(system, ask_as("b", "b0"), ended))
        target.handle.gate.set()
        await asyncio.gather(*tasks)
        assert set(ended[:2]) == {"a0", "a1"}  # had their places before
        assert "b0" in ended[2:4]
        await system.is_idle()


async def test_a_client_at_its_share_is_refused_and_another_is_not():
    async with busy(max_waiting=4) as (system, target, ended):
        tasks = [await send(system, ask_as("a", f"a{idx}"), ended) for idx in range(4)]
        with pytest.raises(TooManyRequests, match="2 requests of this client"):
            await system.text(ask_as("a", "a4"))
        tasks.append(await send(system, ask_as("b", "b0"), ended))
        target.handle.gate.set()
        await asyncio.gather(*tasks)
        await system.is_idle()


async def test_what_another_coordinator_had_is_taken_and_comes_first_even_if_nobody_may_wait():
    async with busy(max_waiting=0) as (system, target, ended):
        tasks = [await send(system, ask_as("a", f"a{idx}"), ended) for idx in range(2)]
        with pytest.raises(TooManyRequests):
            await system.text(ask_as("a", "a2"))
        tasks.append(await send(system, ask_as("a", "moved", is_moved=True), ended))
        assert system.coordinator.status().num_waiting == 1
        target.handle.gate.set()
        await asyncio.gather(*tasks)
        await system.is_idle()


async def test_sequences_of_a_lost_target_are_never_refused():
    async with busy(max_waiting=1) as (system, target, ended):
        tasks = [await send(system, ask_as("", f"s{idx}"), ended) for idx in range(3)]
        system.directory.targets = [Target("target-1")]
        target.handle.fail_after = 0
        target.handle.gate.set()
        await asyncio.gather(*tasks)
        assert ended[-1] == "s2"
        await system.is_idle()
