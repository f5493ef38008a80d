"""What is known about a server before and beside the load: whether it is there, its model, its counters."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass

from specdec.lab.bench.acceptance import Acceptance
from specdec.lab.bench.http import Endpoint, connect, error_message
from specdec.lab.errors import BenchError, RequestFailed

PROBE_TIMEOUT_S = 30.0
"""A server that does not answer a plain GET in this time is reported as such, and nothing is measured."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    owner: str
    """``owned_by``: ``specdec`` and ``vllm`` name themselves there."""

    @property
    def extra_body(self) -> dict[str, object]:
        """What makes this server report acceptance in its answers."""
        return {"speculative": {"metrics": True}} if self.owner == "specdec" else {}


async def find_model(endpoint: Endpoint, name: str | None, headers: Mapping[str, str]) -> ServedModel:
    """The model to ask for: the one named, else the first one served.

    Raises:
        BenchError: the server is not reachable, refuses the key, serves no such model or does not say.
    """
    status, body = await _get(endpoint, "/v1/models", headers)
    if status == 401:
        raise BenchError(f"{endpoint} wants an API key: --api-key or SPECDEC_API_KEY ({error_message(body)})")
    if status == 404 and name is not None:
        return ServedModel(name, "")  # not every server lists its models
    if status != 200:
        raise BenchError(f"{endpoint}/v1/models answered HTTP {status}: {error_message(body)}")
    served = _served(endpoint, body)
    if name is None:
        return served[0]
    for model in served:
        if model.name == name:
            return model
    raise BenchError(f"{endpoint} serves no model {name!r}; it serves {', '.join(m.name for m in served)}")


async def read_counters(
    endpoint: Endpoint, model: ServedModel, headers: Mapping[str, str]
) -> Acceptance | None:
    """Counters of speculation since the server's start, from Prometheus metrics; None without them."""
    if model.owner == "specdec":
        return None  # each answer has its own
    try:
        status, body = await _get(endpoint, "/metrics", headers)
    except BenchError:
        return None
    return Acceptance.from_prometheus(body) if status == 200 else None


def _served(endpoint: Endpoint, body: str) -> list[ServedModel]:
    try:
        served = [
            ServedModel(str(item["id"]), str(item.get("owned_by", ""))) for item in json.loads(body)["data"]
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BenchError(f"{endpoint}/v1/models is no list of models: is it OpenAI-compatible?") from error
    if not served:
        raise BenchError(f"{endpoint} serves no model")
    return served


async def _get(endpoint: Endpoint, path: str, headers: Mapping[str, str]) -> tuple[int, str]:
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S), connect(endpoint) as connection:
            head = await connection.send("GET", path, headers)
            return head.status, await connection.text(head)
    except TimeoutError as error:
        raise BenchError(f"{endpoint}{path} gave no answer in {PROBE_TIMEOUT_S:.0f} s") from error
    except RequestFailed as error:
        raise BenchError(f"{endpoint} is not reachable: {error.message}") from error
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
        raise BenchError(f"{endpoint}{path} broke the connection off: {error}") from error
