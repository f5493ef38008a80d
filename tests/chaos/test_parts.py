"""The parts of a chaos run that need no server."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time

import pytest

from specdec.cluster.deploy_config import parse_deploy_config
from specdec.lab.bench.http import Endpoint
from specdec.lab.chaos import faults
from specdec.lab.chaos.client import Answer
from specdec.lab.chaos.command import parse_faults, parse_pair
from specdec.lab.chaos.errors import ChaosError
from specdec.lab.chaos.faults import Fault, make_schedule
from specdec.lab.chaos.injector import Hit, Injector
from specdec.lab.chaos.plan import ROLES, Action, FleetSize, Pair, Plan, Role
from specdec.lab.chaos.requests import Request, draw_request, grpc_request, http_call, make_questions
from specdec.lab.chaos.server import deployment
from specdec.lab.chaos.status import Replica, parse_snapshot
from specdec.lab.chaos.texts import Reference

FLEET = FleetSize(num_coordinators=1, num_drafts=1, num_targets=2)


def worker(name, pid, num_sequences=0, kv_tokens=0):
    return {"worker_id": name, "pid": pid, "num_sequences": num_sequences, "kv_tokens_in_use": kv_tokens}


def snapshot(targets, drafts, num_running=0):
    coordinator = {
        "coordinator_id": "c",
        "pid": 1,
        "is_ready": True,
        "num_running": num_running,
        "num_waiting": 0,
        "targets": targets,
        "drafts": drafts,
    }
    return parse_snapshot({"coordinators": [coordinator]})


def test_a_seed_fixes_questions_and_faults() -> None:
    plan = Plan(duration_s=60, seed=3)
    assert make_schedule(plan) == make_schedule(plan)
    assert make_schedule(plan) != make_schedule(Plan(duration_s=60, seed=4))
    assert make_questions(24, 3) == make_questions(24, 3)
    assert make_questions(24, 3) != make_questions(24, 4)


def test_every_kind_of_fault_comes_before_one_comes_again() -> None:
    schedule = make_schedule(Plan(duration_s=1000))
    kinds = {f"{action} {role}" for action in ("kill", "hang", "freeze") for role in ROLES}
    assert {fault.kind for fault in schedule[:9]} == kinds
    assert {fault.kind for fault in schedule[9:18]} == kinds
    assert all((fault.hang_s is not None) == (fault.action == "hang") for fault in schedule)
    assert [fault.at_s for fault in schedule] == sorted(fault.at_s for fault in schedule)


def test_drafts_and_targets_are_scaled_and_coordinators_are_not() -> None:
    schedule = make_schedule(Plan(duration_s=1000, actions=("scale-up", "scale-down")))
    kinds = {"scale-up draft", "scale-down draft", "scale-up target", "scale-down target"}
    assert {fault.kind for fault in schedule[:4]} == kinds == {fault.kind for fault in schedule}
    assert all(fault.is_scaling for fault in schedule)


async def test_scalings_of_a_role_wait_for_each_other_and_stay_next_to_the_plan() -> None:
    asked: list[int] = []

    async def resize(role: Role, number: int) -> None:
        assert role == "target"
        assert all(hit.recovered_at_s is not None for hit in injector.hits[:-1])
        asked.append(number)
        seen = snapshot([worker(f"t{idx}", 2 + idx) for idx in range(number)], [worker("d0", 9)])
        asyncio.get_running_loop().call_later(0.05, injector.observe, seen)

    injector = Injector(Endpoint.parse("http://127.0.0.1:1"), FLEET, resize, lambda: 0)
    actions: tuple[Action, ...] = ("scale-up", "scale-up", "scale-down", "scale-down", "scale-down")
    schedule = [Fault(at_s=0, role="target", action=action, pick=0) for action in actions]
    await injector.inflict_all(schedule, time.monotonic())
    assert asked == [3, 2, 1]
    assert injector.num_left_out == 2
    assert injector.fleet == FLEET.with_number("target", 1)
    await injector.restore()
    assert asked == [3, 2, 1, 2]
    assert injector.fleet == FLEET


def test_options_name_faults() -> None:
    assert parse_faults("kill,hang") == ("kill", "hang", "freeze")
    assert parse_faults("scale") == ("scale-up", "scale-down")
    assert parse_faults("hang") == ("hang", "freeze")
    with pytest.raises(ChaosError, match="--faults"):
        parse_faults("kill,burn")
    with pytest.raises(ChaosError):
        parse_faults("")


def test_options_name_a_pair() -> None:
    assert parse_pair("smollm2") == "smollm2"
    with pytest.raises(ChaosError, match="simulated or smollm2"):
        parse_pair("smollm3")


@pytest.mark.parametrize("pair", ["simulated", "smollm2"])
def test_either_pair_is_a_deployment(pair: Pair) -> None:
    deploy = parse_deploy_config(deployment(FLEET, 8000, 9000, pair))
    assert (deploy.app.simulation is None) == (pair == "smollm2")
    assert deploy.app.gateway.grpc_port == 9000
    counts = {item.name: item.num_replicas for item in deploy.schema.applications[0].deployments}
    assert counts == {"Coordinator": 1, "DraftWorker": 1, "TargetWorker": 2}


def test_both_protocols_ask_the_same() -> None:
    questions = make_questions(40, 0)
    rng = random.Random(0)
    for _ in range(200):
        request = draw_request(questions, rng)
        _, body = http_call(request)
        message = grpc_request(request)
        assert message.sampling.max_tokens == body["max_tokens"]
        assert (message.sampling.seed if message.sampling.HasField("seed") else None) == body["seed"]
        assert list(message.sampling.stop) == ([body["stop"]] if body["stop"] else [])
        cap = message.speculative
        assert (cap.num_speculative_tokens if cap.HasField("num_speculative_tokens") else None) == (
            body["speculative"]["num_speculative_tokens"]
        )
        form = message.WhichOneof("prompt")
        if form == "messages":
            assert message.messages.messages[0].content == body["messages"][0]["content"]
        else:
            assert body["prompt"] == (message.text if form == "text" else list(message.token_ids.ids))


def answer(text, token_ids=None, *, has_left=False):
    return Answer(0.0, 0.0, texts=[text], token_ids=token_ids, has_left=has_left)


def test_a_text_that_differs_is_found() -> None:
    reference = Reference("w1 w2 w3", (1, 2, 3))
    assert reference.difference(answer("w1 w2 w3")) is None
    assert reference.difference(answer("w1 w2 w3", [1, 2, 3])) is None
    assert reference.difference(answer("w1 w2", [1, 2], has_left=True)) is None
    assert reference.difference(answer("", [], has_left=True)) is None
    assert reference.difference(answer("w1 w2", [1, 2])) == "token 2 of 3: [] instead of [3]"
    assert reference.difference(answer("w1 w2 w3 w3", [1, 2, 3, 3])) == "token 3 of 3: [3] instead of []"
    assert reference.difference(answer("w1 w3")) == "word 1 of 3: ['w3'] instead of ['w2', 'w3']"
    assert reference.difference(answer("w2", has_left=True)) is not None


def test_what_is_missing_and_what_is_held_is_said() -> None:
    healthy = snapshot([worker("t0", 2), worker("t1", 3)], [worker("d0", 4)])
    assert healthy.missing(FLEET) == []
    assert healthy.held() == []
    busy = snapshot([worker("t0", 2, 1, 70)], [worker("d0", 4)], num_running=1)
    assert busy.missing(FLEET) == ["1 of 2 targets"]
    assert busy.held() == [
        "target t0: 1 sequences, 70 KV tokens",
        "coordinator c: 1 sequences, 0 KV tokens",
    ]


def test_a_fault_is_made_good_when_its_role_is_complete_without_the_victim() -> None:
    victim = Replica(role="target", replica_id="t0", pid=2, num_sequences=1)
    killed = Hit(Fault(at_s=0, role="target", action="kill", pick=0), victim, 0.0, 1)
    hung = Hit(Fault(at_s=0, role="target", action="hang", pick=0, hang_s=1), victim, 0.0, 1)
    before = snapshot([worker("t0", 2), worker("t1", 3)], [worker("d0", 4)])
    during = snapshot([worker("t1", 3)], [worker("d0", 4)])
    after = snapshot([worker("t1", 3), worker("t2", 5)], [worker("d0", 4)])
    assert [killed.has_recovered(seen, FLEET) for seen in (before, during, after)] == [False, False, True]
    assert not hung.has_recovered(before, FLEET)
    hung.resumed_at_s = 1.0
    assert [hung.has_recovered(seen, FLEET) for seen in (before, during, after)] == [True, False, True]


def test_only_replicas_get_signals() -> None:
    assert not faults.send(os.getpid(), "target", signal.SIGKILL)
    assert not faults.inflict(Fault(at_s=0, role="draft", action="kill", pick=0), os.getpid())


def test_a_request_says_nothing_that_changes_its_text() -> None:
    question = make_questions(1, 0)[0]
    plain = http_call(Request(question=question, protocol="http", is_streamed=False))[1]
    other = http_call(Request(question=question, protocol="http", is_streamed=True, max_gamma=2))[1]
    changed = {key for key in plain if plain[key] != other[key]}
    assert changed == {"stream", "speculative"}
