"""How many requests of one client a gateway serves at a time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from specdec.errors import ConfigError, TooManyRequests
from specdec.gateway.keys import ApiKeys

SMOOTHING = 0.2
MAX_RETRY_AFTER_S = 60.0


class ClientLimits:
    """Counts the requests of each client.

    Args:
        max_requests: of one client at a time; None: any number.
        keys: what tells clients apart.
        clock: monotonic seconds.

    Raises:
        ConfigError: there is a limit, but there are no keys.
    """

    def __init__(
        self, max_requests: int | None, keys: ApiKeys, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if max_requests is not None and keys.is_empty:
            raise ConfigError("gateway.max_requests_per_key needs API keys: nothing else tells clients apart")
        self._max_requests = max_requests
        self._clock = clock
        self._num_requests: Counter[str] = Counter()
        self._request_s = 0.0
        """Seconds of a request, smoothed; 0 before the first has ended."""

    @contextmanager
    def request(self, client: str) -> Iterator[None]:
        """Count one request.

        Raises:
            TooManyRequests: the client has as many as it may; with the time until one of them should end.
        """
        limit = self._max_requests
        if limit is None:
            yield
            return
        if self._num_requests[client] >= limit:
            raise TooManyRequests(
                f"{limit} requests with this API key are being served already; retry later",
                retry_after_s=min(self._request_s / limit, MAX_RETRY_AFTER_S),
            )
        self._num_requests[client] += 1
        started_s = self._clock()
        try:
            yield
        finally:
            self._num_requests[client] -= 1
            if not self._num_requests[client]:
                del self._num_requests[client]
            taken_s = self._clock() - started_s
            self._request_s += (taken_s - self._request_s) * (SMOOTHING if self._request_s else 1.0)
