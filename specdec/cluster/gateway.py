"""Replica class of the gateway: HTTP through Serve, gRPC on a server of its own, one set of services behind.

Serve's gRPC proxy is not used: a call its client cancels runs to its end there, and its port is plaintext on
every interface (docs/decisions/0006-grpc-server.md).
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from ray.serve.handle import DeploymentHandle

from specdec.cluster.backend import ServeBackend
from specdec.cluster.deployments import set_up_process
from specdec.cluster.other_pairs import OtherApplication
from specdec.cluster.pair_follower import PairFollower
from specdec.cluster.served import target_info, target_tokenizer
from specdec.config import AppConfig
from specdec.gateway.grpc_server import GrpcServer, start_grpc_server
from specdec.gateway.models import ServedModels
from specdec.gateway.service import GenerationService

GRPC_DRAIN_S = 30.0
"""Calls still running this long after the replica was told to stop are cancelled."""

_models: ServedModels | None = None


def current_models() -> ServedModels | None:
    """What this process serves; the HTTP app is pickled before it serves anything, so it asks."""
    return _models


class GatewayReplica:
    """Stateless but for the streams it serves; any number of replicas."""

    def __init__(self, config: AppConfig, coordinators: DeploymentHandle[Any]) -> None:
        set_up_process()
        self._config = config
        self._backend = ServeBackend(coordinators, config)
        self._tokenizer = target_tokenizer(config)
        self._model_info = target_info(config)
        self._grpc: GrpcServer | None = None
        self._followers: list[asyncio.Task[None]] = []

    async def check_health(self) -> None:
        """Serve calls this once before the replica takes requests: the place to start what needs its loop."""
        global _models
        if self._grpc is not None:
            return
        config = self._config.gateway
        service = GenerationService(
            self._backend, self._tokenizer, self._config, self._model_info, created=int(time.time())
        )
        models = ServedModels(service, config.other_pairs)
        self._grpc = await start_grpc_server(models, config, models.is_ready)
        self._backend.start()
        for name in config.other_pairs:
            follower = PairFollower(OtherApplication(name), models, self._config)
            self._followers.append(asyncio.get_running_loop().create_task(follower.run()))
        _models = models

    async def __del__(self) -> None:
        """Let gRPC calls end. Serve awaits this at the end of a drain, but counts HTTP requests only."""
        if self._grpc is not None:
            await self._grpc.stop(GRPC_DRAIN_S)
