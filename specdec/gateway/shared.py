"""What the models of one gateway have in common, however many it serves."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.config import GatewayConfig
from specdec.gateway.keys import ApiKeys
from specdec.gateway.limits import ClientLimits
from specdec.gateway.pace import Pace


@dataclass(frozen=True, slots=True)
class Shared:
    """Who may ask, for how much at a time, and how often streams send."""

    keys: ApiKeys
    limits: ClientLimits
    pace: Pace

    @classmethod
    def of(cls, config: GatewayConfig) -> Shared:
        """Read a gateway's configuration.

        Raises:
            ConfigError: the file of API keys cannot be used, or there is a limit by key but no key.
        """
        keys = ApiKeys.load(config.api_keys_file)
        return cls(
            keys=keys,
            limits=ClientLimits(config.max_requests_per_key, keys),
            pace=Pace(config.max_stream_messages_per_s),
        )
