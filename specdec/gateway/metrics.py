"""Prometheus metrics of one gateway, with the counters of the coordinators it polls.

Names and labels are described in docs/metrics.md.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from specdec.errors import SpecDecError
from specdec.gateway.events import Finished, GenerationEvent, TextDelta
from specdec.messages import CoordinatorStatus

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
REQUEST_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

CANCELLED = "cancelled"
"""The outcome of a request whose client left, or did not read."""


class GatewayMetrics:
    """Counts what one gateway serves, and writes it down for Prometheus.

    Args:
        statuses: the coordinators known, as of the last poll.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        statuses: Callable[[], Sequence[CoordinatorStatus]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._gateway = uuid.uuid4().hex[:8]
        """Series of gateways behind one address must not be taken for one another's."""
        registry = self._registry = CollectorRegistry()
        own, by_request = ["gateway"], ["gateway", "protocol", "model"]
        self._http_answers = Counter(
            "specdec_http_responses", "HTTP answers by status.", [*own, "status"], registry=registry
        )
        self._requests = Counter(
            "specdec_requests",
            "Generations that ended, by protocol, model and outcome.",
            [*by_request, "outcome"],
            registry=registry,
        )
        self._running = Gauge(
            "specdec_requests_running", "Generations under way.", by_request, registry=registry
        )
        self._prompt_tokens = Counter(
            "specdec_prompt_tokens",
            "Prompt tokens of generations that were finished.",
            by_request,
            registry=registry,
        )
        self._output_tokens = Counter(
            "specdec_generation_tokens", "Tokens handed to clients.", by_request, registry=registry
        )
        self._first_token_s = Histogram(
            "specdec_time_to_first_token_seconds",
            "From the request to its first token.",
            by_request,
            buckets=REQUEST_S,
            registry=registry,
        )
        self._output_token_s = Histogram(
            "specdec_time_per_output_token_seconds",
            "Of a request's tokens behind its first piece, the mean.",
            by_request,
            buckets=TOKEN_S,
            registry=registry,
        )
        self._request_s = Histogram(
            "specdec_request_duration_seconds",
            "From the request to the end of its answer, streams included.",
            by_request,
            buckets=REQUEST_S,
            registry=registry,
        )
        registry.register(_CoordinatorCollector(statuses))

    def exposition(self) -> bytes:
        """All metrics, in the text format 0.0.4."""
        return generate_latest(self._registry)

    def count_http_answer(self, status: int) -> None:
        """Count one answer of the HTTP server."""
        self._http_answers.labels(self._gateway, status).inc()

    async def measured(
        self, protocol: str, model: str, events: AsyncGenerator[GenerationEvent, None]
    ) -> AsyncGenerator[GenerationEvent, None]:
        """Hand on the events of one request, measured until the caller has taken the last or closes this.

        ``events`` is closed with it.
        """
        labels = (self._gateway, protocol, model)
        watch = _Stopwatch(self._clock)
        outcome = CANCELLED
        self._running.labels(*labels).inc()
        try:
            async with aclosing(events):
                async for event in events:
                    if isinstance(event, Finished) and event.totals is not None:
                        outcome = event.finish_reason
                        self._prompt_tokens.labels(*labels).inc(event.totals.usage.prompt_tokens)
                    elif isinstance(event, TextDelta) and event.token_ids:
                        watch.note(len(event.token_ids))
                        self._output_tokens.labels(*labels).inc(len(event.token_ids))
                    yield event
        except SpecDecError as error:
            outcome = error.code or error.error_type
            raise
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException:
            outcome = "server_error"
            raise
        finally:
            self._running.labels(*labels).dec()
            self._requests.labels(*labels, outcome).inc()
            self._request_s.labels(*labels).observe(watch.elapsed_s())
            if watch.first_token_s is not None:
                self._first_token_s.labels(*labels).observe(watch.first_token_s)
            if watch.token_s is not None:
                self._output_token_s.labels(*labels).observe(watch.token_s)


class _Stopwatch:
    """Times of one request."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started_s = clock()
        self._last_s = 0.0
        self._num_later_tokens = 0
        self.first_token_s: float | None = None

    def note(self, num_tokens: int) -> None:
        """Take down that this many tokens came now."""
        self._last_s = self.elapsed_s()
        if self.first_token_s is None:
            self.first_token_s = self._last_s
        else:
            self._num_later_tokens += num_tokens

    def elapsed_s(self) -> float:
        return self._clock() - self._started_s

    @property
    def token_s(self) -> float | None:
        """Mean seconds of a token behind the first piece; None if there is none."""
        if self.first_token_s is None or not self._num_later_tokens:
            return None
        return (self._last_s - self.first_token_s) / self._num_later_tokens


class _CoordinatorCollector(Collector):
    """What coordinators count, read when somebody scrapes. A series lives as long as its coordinator."""

    def __init__(self, statuses: Callable[[], Sequence[CoordinatorStatus]]) -> None:
        self._statuses = statuses

    def collect(self) -> Iterable[Metric]:
        """Build the families."""
        statuses = self._statuses()
        by_coordinator, by_worker = ["model", "coordinator"], ["model", "role", "worker"]
        for name, field, what in _COORDINATOR_COUNTERS:
            counter = CounterMetricFamily(name, what, labels=by_coordinator)
            for status in statuses:
                counter.add_metric([status.model, status.coordinator_id], getattr(status, field))
            yield counter
        for name, field, what in _COORDINATOR_GAUGES:
            gauge = GaugeMetricFamily(name, what, labels=by_coordinator)
            for status in statuses:
                gauge.add_metric([status.model, status.coordinator_id], getattr(status, field))
            yield gauge
        in_use = GaugeMetricFamily(
            "specdec_kv_tokens_in_use", "Cached positions of a worker.", labels=by_worker
        )
        capacity = GaugeMetricFamily(
            "specdec_kv_capacity_tokens", "KV cache of a worker, in tokens.", labels=by_worker
        )
        # Every coordinator names all workers it knows.
        workers = {
            worker.worker_id: (status.model, worker)
            for status in statuses
            for worker in (*status.targets, *status.drafts)
        }
        for model, worker in workers.values():
            labels = [model, worker.role, worker.worker_id]
            in_use.add_metric(labels, worker.kv_tokens_in_use)
            capacity.add_metric(labels, worker.kv_capacity_tokens)
        yield in_use
        yield capacity


_COORDINATOR_COUNTERS = (
    ("specdec_spec_steps", "num_spec_steps", "Rounds of a sequence that verified draft tokens."),
    ("specdec_draft_tokens", "num_draft_tokens", "Draft tokens verified."),
    ("specdec_accepted_draft_tokens", "num_accepted_draft_tokens", "Draft tokens accepted."),
    ("specdec_committed_tokens", "num_output_tokens", "Tokens committed."),
    ("specdec_sequence_rounds", "num_sequence_rounds", "Rounds of a sequence that committed tokens."),
    ("specdec_prepared_drafts", "num_prepared_drafts", "Spec steps with a draft that was prepared ahead."),
)
_COORDINATOR_GAUGES = (
    ("specdec_sequences_running", "num_running", "Sequences in a lane."),
    ("specdec_sequences_waiting", "num_waiting", "Sequences in the queue."),
)
