"""The pair of another application, as this process sees it through Serve."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ray import serve
from ray.exceptions import RayError
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus

from specdec.cluster.backend import ServeBackend
from specdec.cluster.handles import CONTROL_TIMEOUT_S, ReplicaSet
from specdec.cluster.own_thread import OwnThread
from specdec.config import AppConfig
from specdec.errors import ServiceUnavailable, WorkerError

Result = TypeVar("Result")


class OtherApplication:
    """See `specdec.cluster.pair_follower.Pair`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._serve = OwnThread(f"serve-{name}")
        self._replicas: ReplicaSet | None = None
        self._handle: DeploymentHandle[Any] | None = None
        self._configs: dict[str, AppConfig] = {}
        """By running replica, the one that was found last at the end."""

    async def configs(self) -> tuple[AppConfig, ...]:
        """Ask the coordinators that run; the one that was found last is at the end.

        Raises:
            ServiceUnavailable: the application is not deployed, or Serve does not say.
        """
        if self._replicas is None:
            await self._check_deployed()
            self._handle = await self._found()
            if self._handle is None:
                return ()
            self._replicas = ReplicaSet(self._handle)
        found = {replica.replica_id: replica for replica in await self._replicas.discover("app_config")}
        if not found:
            self._configs = {}
            await self._check_deployed()
            return ()
        self._configs = {key: config for key, config in self._configs.items() if key in found}
        for replica_id in found.keys() - self._configs.keys():
            try:
                self._configs[replica_id] = await found[replica_id].call("app_config")
            except WorkerError:
                continue  # It has just gone, or hangs: the next poll asks again, or finds another.
        return tuple(self._configs.values())

    def backend(self, config: AppConfig) -> ServeBackend:
        """For a configuration that was found; to be started."""
        assert self._handle is not None
        return ServeBackend(self._handle, config)

    async def _found(self) -> DeploymentHandle[Any] | None:
        """None while Serve is still building the application."""

        def find() -> DeploymentHandle[Any] | None:
            try:
                return serve.get_deployment_handle("Coordinator", self.name)
            except KeyError:
                return None

        return await self._ask_serve(find)

    async def _check_deployed(self) -> None:
        def look() -> ApplicationStatus:
            # `serve.status` would have the controller pickle every deployment's router anew.
            status: ApplicationStatus = _get_global_client().get_serve_status(self.name).app_status.status
            return status

        if await self._ask_serve(look) in (ApplicationStatus.NOT_STARTED, ApplicationStatus.DELETING):
            raise ServiceUnavailable("is not deployed")

    async def _ask_serve(self, call: Callable[[], Result]) -> Result:
        try:
            return await self._serve.run(call, CONTROL_TIMEOUT_S)
        except (TimeoutError, RayError, RayServeException) as error:
            raise ServiceUnavailable("cannot be looked up in Serve") from error
