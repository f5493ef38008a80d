"""Prometheus metrics: what is counted, and that a stream is measured to its end."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from specdec.errors import TooManyRequests
from specdec.gateway.events import Finished, TextDelta, Totals, Usage
from specdec.gateway.grpc_server import start_grpc_server
from specdec.gateway.http import build_http_app
from specdec.gateway.metrics import GatewayMetrics
from specdec.gateway.models import ServedModels
from specdec.gateway.proto import generation_pb2 as pb
from specdec.gateway.proto import generation_pb2_grpc as pb_grpc
from tests.fakes import ScriptedBackend, eventually, scripted_stats, serving, token_ids_of, toy_service

STATUS = ScriptedBackend().statuses()[0]
BODY = {"prompt": "one", "max_tokens": 4}


def samples(metrics: GatewayMetrics | str) -> dict[tuple[str, ...], float]:
    """Every sample by its name and labels, those of gateway and model left out."""
    text = metrics if isinstance(metrics, str) else metrics.exposition().decode()
    return {
        (
            sample.name,
            *(value for name, value in sorted(sample.labels.items()) if name not in ("gateway", "model")),
        ): (sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def delta(*token_ids):
    return TextDelta(text="x", token_ids=token_ids)


FINISHED = Finished(
    finish_reason="length",
    totals=Totals(usage=Usage(prompt_tokens=7, completion_tokens=5), stats=scripted_stats(2)),
)


async def test_times_of_a_request_are_to_first_token_per_token_and_to_the_end():
    clock = Clock()
    metrics = GatewayMetrics(lambda: (), clock)

    async def events():
        clock.now_s += 2.0
        yield delta(1)
        clock.now_s += 1.0
        yield delta(2, 3)
        clock.now_s += 1.0
        yield delta(4, 5)
        yield FINISHED

    async for _ in metrics.measured("http", "m", events()):
        clock.now_s += 0.25  # a client that reads slowly is part of the answer's time
    found = samples(metrics)
    assert found["specdec_time_to_first_token_seconds_sum", "http"] == 2.0
    assert found["specdec_time_per_output_token_seconds_sum", "http"] == pytest.approx(2.5 / 4)
    assert found["specdec_request_duration_seconds_sum", "http"] == pytest.approx(5.0)
    assert found["specdec_generation_tokens_total", "http"] == 5
    assert found["specdec_prompt_tokens_total", "http"] == 7
    assert found["specdec_requests_total", "length", "http"] == 1
    assert found["specdec_requests_running", "http"] == 0


async def test_outcomes():
    metrics = GatewayMetrics(lambda: ())

    async def failing(error):
        yield delta(1)
        raise error

    for error in (TooManyRequests("full"), RuntimeError("a bug")):
        with pytest.raises(type(error)):
            async for _ in metrics.measured("grpc", "m", failing(error)):
                pass
    left = metrics.measured("grpc", "m", failing(RuntimeError()))
    await anext(left)
    assert samples(metrics)["specdec_requests_running", "grpc"] == 1
    await left.aclose()
    found = samples(metrics)
    assert found["specdec_requests_running", "grpc"] == 0
    for outcome in ("rate_limit_exceeded", "server_error", "cancelled"):
        assert found["specdec_requests_total", outcome, "grpc"] == 1


def test_acceptance_is_what_coordinators_count_and_a_gone_one_takes_its_series_along():
    first = replace(STATUS, coordinator_id="a", num_draft_tokens=10, num_accepted_draft_tokens=7)
    second = replace(STATUS, coordinator_id="b", num_draft_tokens=4, num_waiting=3)
    statuses = [first, second]
    metrics = GatewayMetrics(lambda: tuple(statuses))
    found = samples(metrics)
    assert found["specdec_draft_tokens_total", "a"] == 10
    assert found["specdec_accepted_draft_tokens_total", "a"] == 7
    assert found["specdec_draft_tokens_total", "b"] == 4
    assert found["specdec_sequences_waiting", "b"] == 3
    statuses.pop()
    assert ("specdec_draft_tokens_total", "b") not in samples(metrics)


def test_series_of_two_gateways_are_not_taken_for_one_anothers():
    labels = set()
    for _ in range(2):
        metrics = GatewayMetrics(lambda: ())
        metrics.count_http_answer(200)
        (line,) = [
            line
            for line in metrics.exposition().decode().splitlines()
            if line.startswith("specdec_http_responses_total{")
        ]
        labels.add(line)
    assert len(labels) == 2


async def test_a_slow_stream_takes_as_long_as_it_takes_over_http_and_grpc():
    delayed = ScriptedBackend(token_ids_of("red green blue"), delay_s=0.1)
    models = ServedModels(toy_service(delayed))
    server = await start_grpc_server(models, models.config, models.is_ready)
    try:
        async with (
            serving(build_http_app(lambda: models)) as url,
            httpx.AsyncClient(base_url=url) as client,
            grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
        ):
            await client.post("/v1/completions", json={**BODY, "stream": True})
            await client.post("/v1/completions", json={**BODY, "temperature": -1})
            await client.post("/v1/completions", json={**BODY, "surprise": 1})
            stub = pb_grpc.GenerationServiceStub(channel)
            request = pb.GenerateRequest(text="one", sampling=pb.SamplingOptions(max_tokens=4))
            async for _ in stub.GenerateStream(request):
                pass
            answer = await client.get("/metrics")
    finally:
        await server.stop()
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = samples(answer.text)
    for protocol in ("http", "grpc"):
        assert found["specdec_requests_total", "length", protocol] == 1
        assert found["specdec_request_duration_seconds_sum", protocol] >= 0.4
        assert 0.1 <= found["specdec_time_to_first_token_seconds_sum", protocol] < 0.4
        assert found["specdec_generation_tokens_total", protocol] == 4
    assert found["specdec_requests_total", "invalid_request_error", "http"] == 1
    assert found["specdec_http_responses_total", "200"] == 1
    assert found["specdec_http_responses_total", "400"] == 2


async def test_a_client_that_leaves_is_counted_as_cancelled():
    models = ServedModels(toy_service(ScriptedBackend(token_ids_of("red green blue"), block_after=1)))
    async with serving(build_http_app(lambda: models)) as url, httpx.AsyncClient(base_url=url) as client:
        async with client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer:
            await anext(answer.aiter_lines())
        await eventually(lambda: samples(models.metrics).get(("specdec_requests_running", "http")) == 0)
        await asyncio.sleep(0)
        assert samples(models.metrics)["specdec_requests_total", "cancelled", "http"] == 1
