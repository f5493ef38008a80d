"""A gateway's follower of another application's pair: found, replaced, lost; a stand-in for Serve."""

from __future__ import annotations

import asyncio
import logging

import pytest

from specdec.cluster import pair_follower
from specdec.cluster.pair_follower import PairFollower
from specdec.config import AppConfig, parse_config
from specdec.errors import ModelUnavailable, ServiceUnavailable, UnknownModel
from specdec.gateway.models import ServedModels
from tests.fakes import ScriptedBackend, eventually, token_ids_of, toy_service

NAME = "large"


class Backend(ScriptedBackend):
    """Takes note of what becomes of it."""

    config: AppConfig
    is_started = False
    retired: tuple[str | None, ...] = ()

    def start(self) -> None:
        self.is_started = True

    async def retire(self, gone: str | None = None) -> None:
        self.retired = (*self.retired, gone)


class Pair:
    """An application whose coordinators are set by hand."""

    name = NAME

    def __init__(self) -> None:
        self.running: tuple[AppConfig, ...] = ()
        self.error: Exception | None = None
        self.backends: list[Backend] = []

    async def configs(self) -> tuple[AppConfig, ...]:
        if self.error is not None:
            raise self.error
        return self.running

    def backend(self, config: AppConfig) -> Backend:
        backend = Backend(token_ids_of("red"))
        backend.config = config
        self.backends.append(backend)
        return backend


def config_of(target: str = "t", **changes: object) -> AppConfig:
    """Of a pair with a simulated model: its tokenizer is made, not fetched."""
    simulation = {"vocab_size": 100, "max_context": 64}
    return parse_config({"target": {"model": target}, "simulation": simulation, **changes})


@pytest.fixture
def pair():
    return Pair()


@pytest.fixture
def models():
    return ServedModels(toy_service(ScriptedBackend(), max_choices=3), [NAME])


@pytest.fixture
def follower(pair, models):
    return PairFollower(pair, models, models.first.config)


async def test_a_pair_is_served_once_its_coordinator_says_what_it_is(pair, models, follower):
    assert await follower.step()
    with pytest.raises(ServiceUnavailable, match="has not answered yet"):
        models.service("t")
    pair.running = (config_of(gateway={"tool_parser": "hermes"}),)
    assert await follower.step()
    service = models.service("t")
    assert (service.model_info.vocab_size, service.model_info.max_context) == (100, 64)
    # Limits are the gateway's, parsers the pair's.
    assert service.config.gateway.max_choices == 3
    assert service.config.gateway.tool_parser == "hermes"
    assert service.shared is models.first.shared
    assert await follower.step()
    assert models.service("t") is service
    assert [backend.is_started for backend in pair.backends] == [True]


async def test_a_coordinator_that_restarts_changes_nothing(pair, models, follower):
    pair.running = (config_of(),)
    await follower.step()
    service = models.service("t")
    pair.running = ()
    assert await follower.step()
    assert models.service("t") is service
    assert pair.backends[0].retired == ()


@pytest.mark.parametrize(
    ("changed", "gone"),
    [
        (config_of(coordinator={"max_num_seqs": 2}), None),
        (config_of("u", served_model_name="t"), "the model was replaced by another one; please retry"),
    ],
)
async def test_another_configuration_replaces_the_service(pair, models, follower, changed, gone):
    pair.running = (config_of(),)
    await follower.step()
    before = models.service("t")
    pair.running = (config_of(), changed)  # a rolling update: the old coordinator is still there
    await follower.step()
    assert models.service("t") is not before
    await eventually(lambda: pair.backends[0].retired == (gone,))
    assert pair.backends[1].is_started
    assert pair.backends[1].config == changed


async def test_the_name_goes_with_the_configuration(pair, models, follower):
    pair.running = (config_of(),)
    await follower.step()
    pair.running = (config_of("u"),)
    await follower.step()
    assert models.service("u").model_name == "u"
    with pytest.raises(UnknownModel, match="'u' are"):
        models.service("t")


async def test_a_removed_application_is_said_and_one_that_comes_back_is_served(pair, models, follower):
    pair.running = (config_of(),)
    await follower.step()
    pair.error = ServiceUnavailable("is not deployed")
    assert not await follower.step()
    with pytest.raises(ServiceUnavailable, match="the application 'large' is not deployed"):
        models.service("t")
    reason = "the application 'large' is not deployed; please retry"
    await eventually(lambda: pair.backends[0].retired == (reason,))
    pair.error = None
    assert await follower.step()
    assert models.service("t").model_name == "t"


async def test_a_name_that_is_taken_is_not_served_and_nothing_is_loaded(pair, models, follower):
    pair.running = (config_of(served_model_name=models.first.model_name),)
    assert not await follower.step()
    assert models.service(models.first.model_name) is models.first
    assert models.services() == (models.first,)
    assert pair.backends == []
    with pytest.raises(UnknownModel):
        models.service("no-such")


async def test_what_cannot_be_loaded_is_logged_once_in_one_line_and_tried_again(
    pair, models, follower, monkeypatch, caplog
):
    def broken(config: AppConfig) -> None:
        raise ModelUnavailable("no tokenizer here")

    caplog.set_level(logging.WARNING)
    pair.running = (config_of(),)
    with monkeypatch.context() as patch:
        patch.setattr(pair_follower, "target_tokenizer", broken)
        for _ in range(3):
            assert not await follower.step()
    lines = [record.getMessage() for record in caplog.records if record.name == pair_follower.__name__]
    assert lines == ["the application large cannot be served: no tokenizer here; trying again"]
    with pytest.raises(ServiceUnavailable, match="cannot be served: no tokenizer here"):
        models.service("t")
    assert await follower.step()
    assert models.service("t").model_name == "t"


async def test_an_update_that_cannot_be_loaded_leaves_the_old_one_while_it_runs(
    pair, models, follower, monkeypatch
):
    pair.running = (config_of(),)
    await follower.step()
    monkeypatch.setattr(pair_follower, "LOAD_TIMEOUT_S", 0.0)
    pair.running = (config_of(), config_of("u", served_model_name="t"))
    assert not await follower.step()
    assert models.service("t").config.target.model == "t"
    pair.running = pair.running[1:]
    assert not await follower.step()
    with pytest.raises(ServiceUnavailable, match="its tokenizer was not loaded in time"):
        models.service("t")


async def test_pauses_grow_while_there_is_nothing_and_end_with_it(pair, follower, monkeypatch):
    pauses = []

    async def sleep(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) == 7:
            pair.error = None
        if len(pauses) == 8:
            raise asyncio.CancelledError

    monkeypatch.setattr(pair_follower.asyncio, "sleep", sleep)
    pair.error = ServiceUnavailable("is not deployed")
    with pytest.raises(asyncio.CancelledError):
        await follower.run()
    assert pauses == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0, 0.5]
