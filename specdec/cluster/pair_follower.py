"""Keeps a gateway's service of another application's pair up to date, while the gateway serves."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Protocol

from specdec.cluster.own_thread import OwnThread
from specdec.cluster.served import target_info, target_tokenizer
from specdec.config import PAIR_GATEWAY_KEYS, AppConfig
from specdec.errors import ServiceUnavailable, SpecDecError
from specdec.gateway.backend import Backend
from specdec.gateway.models import ServedModels
from specdec.gateway.service import GenerationService
from specdec.gateway.shared import Shared

logger = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 600.0
"""A tokenizer may have to be fetched first."""
MAX_PAUSE_S = 8.0
"""Between tries while a pair is not to be had."""


class PairBackend(Backend, Protocol):
    """Of one configuration of a pair."""

    def start(self) -> None:
        """Begin to look for coordinators."""
        ...

    async def retire(self, gone: str | None = None) -> None:
        """Return, closed, when the requests under way have ended; see `ServeBackend.retire`."""
        ...


class Pair(Protocol):
    """An application with coordinators."""

    @property
    def name(self) -> str: ...

    async def configs(self) -> tuple[AppConfig, ...]:
        """The configurations of the coordinators that run, the one found last at the end; () while none does.

        Raises:
            ServiceUnavailable: the application is not there; completes "the application ...".
        """
        ...

    def backend(self, config: AppConfig) -> PairBackend:
        """For a configuration that was found."""
        ...


class PairFollower:
    """Looks what the application serves, and has the gateway serve that; or says why it cannot.

    Args:
        pair: of the other application.
        models: where its service goes.
        own: the gateway's configuration.
    """

    def __init__(self, pair: Pair, models: ServedModels, own: AppConfig) -> None:
        self._pair = pair
        self._models = models
        self._own = own
        self._loader = OwnThread(f"load-{pair.name}")
        self._served: tuple[AppConfig, PairBackend] | None = None
        self._retiring: set[asyncio.Task[None]] = set()
        self._complaint = ""

    async def run(self) -> None:
        """Follow until cancelled."""
        poll_s = self._own.coordinator.poll_interval_s
        pause_s = poll_s
        while True:
            pause_s = poll_s if await self.step() else min(2 * pause_s, max(poll_s, MAX_PAUSE_S))
            await asyncio.sleep(pause_s)

    async def step(self) -> bool:
        """Look once; False if the pair cannot be served. What is wrong is logged once, until it changes."""
        configs: tuple[AppConfig, ...] = ()
        try:
            configs = await self._pair.configs()
            if configs and (self._served is None or self._served[0] != configs[-1]):
                await self._serve(configs[-1])
        except Exception as error:
            self._fail(error, configs)
            return False
        self._complaint = ""
        return True

    async def _serve(self, config: AppConfig) -> None:
        """Load what the gateway needs of the pair, and serve it in place of what was served."""
        name = self._pair.name
        self._models.check_name(name, config.model_name)
        backend, shared = self._pair.backend(config), self._models.first.shared
        service = await self._loader.run(
            lambda: load_service(config, self._own, shared, backend), LOAD_TIMEOUT_S
        )
        self._models.put(name, service)
        logger.info("the application %s serves %r", name, service.model_name)
        is_other = self._served is not None and self._served[0].target.model != config.target.model
        self._retire("the model was replaced by another one; please retry" if is_other else None)
        backend.start()
        self._served = config, backend

    def _fail(self, error: Exception, configs: tuple[AppConfig, ...]) -> None:
        reason = _reason(error)
        if self._served is None or self._served[0] not in configs:
            name = configs[-1].model_name if configs else None
            self._models.withdraw(self._pair.name, reason, name)
            self._retire(f"the application {self._pair.name!r} {reason}; please retry")
        if reason != self._complaint:
            logger.warning("the application %s %s; trying again", self._pair.name, reason)
        self._complaint = reason

    def _retire(self, gone: str | None) -> None:
        if self._served is None:
            return
        _, backend = self._served
        self._served = None
        task = asyncio.get_running_loop().create_task(backend.retire(gone))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)


def load_service(config: AppConfig, own: AppConfig, shared: Shared, backend: Backend) -> GenerationService:
    """Make a gateway's service for a pair of another application; loads a tokenizer.

    Args:
        config: the pair's.
        own: the gateway's, whose limits hold.
        shared: of the gateway's services.
        backend: of the pair.

    Raises:
        ConfigError: this machine lacks what it takes.
    """
    parsers = {key: getattr(config.gateway, key) for key in PAIR_GATEWAY_KEYS}
    config = config.model_copy(update={"gateway": own.gateway.model_copy(update=parsers)})
    return GenerationService(
        backend, target_tokenizer(config), config, target_info(config), int(time.time()), shared
    )


def _reason(error: Exception) -> str:
    """Completes "the application ..." in one line."""
    if isinstance(error, ServiceUnavailable):
        return error.message
    if isinstance(error, SpecDecError):
        return f"cannot be served: {error.message}"
    if isinstance(error, TimeoutError):
        return "cannot be served: its tokenizer was not loaded in time"
    return f"cannot be served: {type(error).__name__}: {' '.join(str(error).split())}"
