"""Replica class of the gateway: HTTP through Serve, gRPC on a server of its own, one service behind both.

Serve's gRPC proxy is not used: a call its client cancels runs to its end there, and its port is plaintext on
every interface (docs/decisions/0006-grpc-server.md).
"""

from __future__ import annotations

import time
from typing import Any

from ray.serve.handle import DeploymentHandle

from specdec.cluster.backend import ServeBackend
from specdec.cluster.deployments import set_up_process
from specdec.cluster.served import target_info, target_tokenizer
from specdec.config import AppConfig
from specdec.gateway.grpc_server import GrpcServer, start_grpc_server
from specdec.gateway.service import GenerationService

GRPC_DRAIN_S = 30.0
"""Calls still running this long after the replica was told to stop are cancelled."""

_service: GenerationService | None = None


def current_service() -> GenerationService | None:
    """This process's service; the HTTP app is pickled before there is one, so it asks."""
    return _service


class GatewayReplica:
    """Stateless but for the streams it serves; any number of replicas."""

    def __init__(self, config: AppConfig, coordinators: DeploymentHandle[Any]) -> None:
        set_up_process()
        self._config = config
        self._backend = ServeBackend(coordinators, config.coordinator)
        self._tokenizer = target_tokenizer(config)
        self._model_info = target_info(config)
        self._grpc: GrpcServer | None = None

    async def check_health(self) -> None:
        """Serve calls this once before the replica takes requests: the place to start what needs its loop."""
        global _service
        if self._grpc is not None:
            return
        service = GenerationService(
            self._backend, self._tokenizer, self._config, self._model_info, created=int(time.time())
        )
        self._grpc = await start_grpc_server(service, self._config.gateway, service.is_ready)
        self._backend.start()
        _service = service

    async def __del__(self) -> None:
        """Let gRPC calls end. Serve awaits this at the end of a drain, but counts HTTP requests only."""
        if self._grpc is not None:
            await self._grpc.stop(GRPC_DRAIN_S)
