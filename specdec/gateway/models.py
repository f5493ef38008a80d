"""The models one gateway serves, by the names that clients use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.errors import ConfigError, ServiceUnavailable, UnknownModel
from specdec.gateway.metrics import GatewayMetrics
from specdec.gateway.service import GenerationService
from specdec.messages import CoordinatorStatus

MAX_NAME_CHARS = 200
"""Of a client's text in an error message."""


@dataclass(frozen=True, slots=True)
class Absent:
    """A pair that is to be served but is not."""

    reason: str
    """Completes "the application ..."."""
    name: str | None = None
    """The model's, when it was there last; None: it has never been."""


class ServedModels:
    """A `GenerationService` for each pair; what they share is asked for here.

    Args:
        first: of the gateway's own pair; a request that names no model gets it.
        others: names of the applications whose pairs are served too, once `put` brings a service.
    """

    def __init__(self, first: GenerationService, others: Sequence[str] = ()) -> None:
        self.first = first
        self.config = first.config.gateway
        self.keys = first.shared.keys
        self.metrics = GatewayMetrics(self.coordinators)
        self._others: dict[str, GenerationService | Absent] = {
            application: Absent("has not answered yet") for application in others
        }

    def check_name(self, application: str, name: str) -> None:
        """Accept the name of an application's model.

        Raises:
            ConfigError: another pair has it already; completes "the application ...".
        """
        if any(key != application and service.model_name == name for key, service in self._by_application()):
            raise ConfigError(f"another pair is served as {name!r} already", "served_model_name")

    def put(self, application: str, service: GenerationService) -> None:
        """Serve an application's pair from now on, in place of what it was; raises as `check_name` does."""
        self.check_name(application, service.model_name)
        self._others[application] = service

    def withdraw(self, application: str, reason: str, name: str | None = None) -> None:
        """Serve an application's pair no longer: requests for it get 503.

        Args:
            application: whose pair.
            reason: completes "the application ...".
            name: of the model that it would serve, as far as that is known; None: the one it had.
        """
        known = self._others[application]
        had = known.model_name if isinstance(known, GenerationService) else known.name
        self._others[application] = Absent(reason, name or had)

    def service(self, name: str | None) -> GenerationService:
        """The service of a model; of the first, where none is named.

        Raises:
            UnknownModel: no pair has the name.
            ServiceUnavailable: a pair that has or may have it is not there now.
        """
        if not name:
            return self.first
        services = self.services()
        for service in services:
            if service.model_name == name:
                return service
        shown = repr(name[:MAX_NAME_CHARS])
        absent = self.absent()
        for application, pair in absent.items():
            if pair.name == name:
                raise ServiceUnavailable(
                    f"the model {shown} is not available now: the application {application!r} {pair.reason}",
                    "model",
                )
        names = ", ".join(repr(service.model_name) for service in services)
        served = f"{names} {'is' if len(services) == 1 else 'are'}"
        for application, pair in absent.items():
            if pair.name is None:
                raise ServiceUnavailable(
                    f"the model {shown} is not served here, or not yet: the application {application!r} "
                    f"{pair.reason}; {served}",
                    "model",
                )
        raise UnknownModel(f"the model {shown} is not served here; {served}", "model")

    def ready_service(self, name: str | None) -> GenerationService:
        """As `service`, and a request sent now would be served; raises ServiceUnavailable if not."""
        service = self.service(name)
        if not service.is_ready():
            raise ServiceUnavailable(f"no worker is ready to serve the model {service.model_name!r}")
        return service

    def services(self) -> tuple[GenerationService, ...]:
        """Those there are, ready or not; the first pair's first."""
        return tuple(service for _, service in self._by_application())

    def ready_services(self) -> tuple[GenerationService, ...]:
        """Those to which a request sent now would be served."""
        return tuple(service for service in self.services() if service.is_ready())

    def absent(self) -> dict[str, Absent]:
        """Pairs that are to be served but are not, by application."""
        return {key: pair for key, pair in self._others.items() if isinstance(pair, Absent)}

    def is_ready(self) -> bool:
        """Whether the first pair is: the others come and go by themselves."""
        return self.first.is_ready()

    def coordinators(self) -> tuple[CoordinatorStatus, ...]:
        """Of all pairs, as of the last poll of each."""
        return tuple(status for service in self.services() for status in service.coordinators())

    def _by_application(self) -> tuple[tuple[str | None, GenerationService], ...]:
        others = [(key, pair) for key, pair in self._others.items() if isinstance(pair, GenerationService)]
        return ((None, self.first), *others)
