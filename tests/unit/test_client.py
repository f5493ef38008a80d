"""`specdec.client`: both protocols, what it retries and what it never does."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import httpx
import pytest

from specdec.client import Answer, AsyncClient, Client, Piece, Speculation, Usage
from specdec.client.http_transport import AsyncHttpTransport, HttpTransport
from specdec.errors import (
    ConfigError,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    InvariantViolation,
    RequestError,
    ServiceUnavailable,
    TooManyRequests,
    Unauthenticated,
    UnknownModel,
)
from specdec.gateway.grpc_server import start_grpc_server
from specdec.gateway.http import build_http_app
from specdec.gateway.models import ServedModels
from specdec.gateway.proto import generation_pb2 as pb
from specdec.gateway.proto import generation_pb2_grpc as pb_grpc
from tests.chat_templates import CLOCK, THINKING, WEATHER, call_text, service_with
from tests.fakes import (
    EOS_ID,
    MODEL_NAME,
    ScriptedBackend,
    byte_ids_of,
    eventually,
    in_thread,
    only,
    serving,
    toy_service,
)

CHAT = [{"role": "user", "content": "one"}]
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
COUNTERS = {
    "num_spec_steps": 1,
    "num_draft_tokens": 2,
    "num_accepted_draft_tokens": 1,
    "mean_acceptance_length": 2.0,
    "draft_acceptance_rate": 0.5,
    "acceptance_histogram": [0, 1],
}
WHOLE = {
    "id": "cmpl-1",
    "model": "m",
    "choices": [{"index": 0, "text": "red", "finish_reason": "stop"}],
    "usage": USAGE,
    "metrics": {"speculative_decoding": COUNTERS},
}


def client_of(transport, max_retries=2):
    """A client over a given transport, and the pauses it would make."""
    client, pauses_s = Client("http://unused", max_retries=max_retries), []
    client._transport = transport
    client._sleep = pauses_s.append
    return client, pauses_s


def scripted(*answers: httpx.Response | Exception, max_retries=2):
    """An HTTP client whose server gives these answers, one a request; also gives the requests."""
    requests: list[httpx.Request] = []
    left = iter(answers)

    def handle(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        answer = next(left)
        if isinstance(answer, Exception):
            raise answer
        return answer

    transport = HttpTransport("http://unused", "sk-1", transport=httpx.MockTransport(handle))
    return *client_of(transport, max_retries), requests


def refused(status, code=None, kind="invalid_request_error", param=None, **headers):
    envelope = {"error": {"message": "no", "type": kind, "param": param, "code": code}}
    return httpx.Response(status, json=envelope, headers=headers)


def streamed(*events, is_done=True):
    frames = [f"data: {json.dumps(event)}\n\n" for event in events]
    return httpx.Response(200, text="".join([*frames, "data: [DONE]\n\n" if is_done else ""]))


def chunk(text="", finish_reason=None, **more):
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}
    return {"choices": [choice], "usage": None, **more}


BUSY = ("rate_limit_exceeded", "rate_limit_error")


def test_it_needs_neither_ray_nor_torch():
    loaded = subprocess.run(
        [sys.executable, "-c", "import specdec.client, sys; print(*sys.modules)"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    assert "specdec.client.grpc_transport" in loaded
    assert {"ray", "torch", "transformers", "numpy", "fastapi", "pydantic"} & set(loaded) == set()


# HTTP


def test_a_whole_answer_over_http():
    client, _, (requests) = scripted(httpx.Response(200, json=WHOLE))
    answer = client.complete(
        "one", max_tokens=5, stop=["x"], logit_bias={7: -1.0}, speculative={"metrics": True}
    )
    assert answer == Answer(
        id="cmpl-1",
        model="m",
        text="red",
        finish_reason="stop",
        usage=Usage(prompt_tokens=3, completion_tokens=2),
        speculation=Speculation(**{**COUNTERS, "acceptance_histogram": (0, 1)}),
    )
    (request,) = requests
    assert request.headers["authorization"] == "Bearer sk-1"
    assert request.url.path == "/v1/completions"
    assert json.loads(request.content) == {
        "prompt": "one",
        "max_tokens": 5,
        "stop": ["x"],
        "logit_bias": {"7": -1.0},
        "speculative": {"metrics": True},
    }


def test_a_stream_over_http_has_texts_and_one_end():
    client, _, requests = scripted(
        streamed(
            {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]},
            chunk("re"),
            chunk("d"),
            chunk(finish_reason="length"),
            {"choices": [], "usage": USAGE},
        )
    )
    assert list(client.stream(CHAT, seed=1)) == [
        Piece(text="re"),
        Piece(text="d"),
        Piece(finish_reason="length", usage=Usage(prompt_tokens=3, completion_tokens=2)),
    ]
    assert json.loads(requests[0].content)["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (refused(400, param="temperature"), InvalidRequest),
        (refused(400, "context_length_exceeded"), ContextLengthExceeded),
        (refused(401, "invalid_api_key"), Unauthenticated),
        (refused(404, "model_not_found"), UnknownModel),
        (refused(404), RequestError),
        (refused(413, "request_too_large"), RequestError),
        (refused(500, kind="server_error"), InvariantViolation),
        (refused(504, "deadline_exceeded", "timeout"), DeadlineExceeded),
        (httpx.Response(200, json=WHOLE, headers={}), None),
        (httpx.Response(418, text="<html>a proxy</html>"), RequestError),
        (httpx.ReadTimeout("slow"), DeadlineExceeded),
    ],
)
def test_errors_have_types_and_are_not_tried_again(answer, error):
    client, pauses_s, requests = scripted(answer, answer)
    if error is None:
        assert client.complete("one").text == "red"
        return
    for call in (lambda: client.complete("one"), lambda: next(client.stream("one"))):
        with pytest.raises(error) as caught:
            call()
        assert type(caught.value) is error
    assert len(requests) == 2
    assert pauses_s == []


@pytest.mark.parametrize("is_streamed", [False, True])
def test_what_was_refused_for_now_is_tried_again_after_the_pause_asked_for(is_streamed):
    ok = (
        streamed(chunk("red"), chunk(finish_reason="stop"))
        if is_streamed
        else httpx.Response(200, json=WHOLE)
    )
    client, pauses_s, requests = scripted(
        refused(429, *BUSY, **{"retry-after": "3"}), httpx.Response(503, text="a proxy's own page"), ok
    )
    text = next(client.stream("one")).text if is_streamed else client.complete("one").text
    assert text == "red"
    assert len(requests) == 3
    asked_for, own = pauses_s
    assert 3.0 <= asked_for <= 3.75
    assert 1.0 <= own <= 1.25  # the second pause, twice the first


def test_a_server_that_does_not_listen_is_tried_again():
    client, _, requests = scripted(httpx.ConnectError("refused"), httpx.Response(200, json=WHOLE))
    assert client.complete("one").text == "red"
    assert len(requests) == 2


def test_tries_are_bounded_in_number_and_time():
    client, _, requests = scripted(*[refused(429, *BUSY) for _ in range(5)], max_retries=1)
    with pytest.raises(TooManyRequests):
        client.complete("one")
    assert len(requests) == 2
    client, pauses_s, requests = scripted(refused(503, **{"retry-after": "1000"}))
    with pytest.raises(ServiceUnavailable):
        client.complete("one")
    assert len(requests) == 1
    assert pauses_s == []


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (streamed(chunk("re"), is_done=False), ServiceUnavailable),
        (
            streamed(
                chunk("re"),
                {
                    "error": {
                        "message": "lost",
                        "type": "service_unavailable",
                        "param": None,
                        "code": "service_unavailable",
                    }
                },
            ),
            ServiceUnavailable,
        ),
    ],
)
def test_a_stream_that_has_begun_is_never_tried_again(answer, error):
    client, _, requests = scripted(answer)
    pieces = client.stream(CHAT)
    assert next(pieces).text == "re"
    with pytest.raises(error):
        next(pieces)
    assert len(requests) == 1


async def test_the_client_for_event_loops_tries_again_as_the_other_does():
    answers = iter([refused(429, *BUSY, **{"retry-after": "3"}), streamed(chunk("re"), is_done=False)])
    transport = httpx.MockTransport(lambda request: next(answers))
    pauses_s = []

    async def sleep(seconds):
        pauses_s.append(seconds)

    async with AsyncClient("http://unused") as client:
        client._transport = AsyncHttpTransport("http://unused", None, transport=transport)
        client._sleep = sleep
        pieces = client.stream(CHAT)
        assert (await anext(pieces)).text == "re"
        with pytest.raises(ServiceUnavailable):
            await anext(pieces)
    assert len(pauses_s) == 1
    assert 3.0 <= pauses_s[0] <= 3.75


# gRPC: a server that answers from a script


class ScriptedServicer(pb_grpc.GenerationServiceServicer):
    """Aborts with these, one a call, then answers."""

    def __init__(self, *aborts):
        self.aborts = list(aborts)
        self.requests = []
        self.metadata = []

    def _begin(self, request, context):
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        if self.aborts:
            code, trailing = self.aborts.pop(0)
            context.set_trailing_metadata(tuple(trailing.items()))
            context.abort(code, "no")

    def Generate(self, request, context):
        self._begin(request, context)
        return pb.GenerateResponse(
            id="gen-1",
            model="m",
            choices=[pb.Choice(text="red", finish_reason=pb.FINISH_REASON_STOP)],
            usage=pb.Usage(**USAGE),
            speculative_metrics=pb.SpeculativeMetrics(**COUNTERS),
        )

    def GenerateStream(self, request, context):
        self._begin(request, context)
        yield pb.GenerateStreamResponse(text="re")
        yield pb.GenerateStreamResponse(token_ids=[1])
        if request.text == "break":
            context.abort(grpc.StatusCode.UNAVAILABLE, "lost")
        yield pb.GenerateStreamResponse(text="d")
        yield pb.GenerateStreamResponse(finish_reason=pb.FINISH_REASON_LENGTH, usage=pb.Usage(**USAGE))


@contextmanager
def grpc_client(*aborts) -> Iterator[tuple[Client, list[float], ScriptedServicer]]:
    servicer = ScriptedServicer(*aborts)
    server = grpc.server(ThreadPoolExecutor(2))
    pb_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with Client(f"grpc://127.0.0.1:{port}", api_key="sk-1", timeout_s=20) as real:
            client, pauses_s = client_of(real._transport)
            yield client, pauses_s, servicer
    finally:
        server.stop(None)


def test_a_whole_answer_over_grpc_is_the_same_as_over_http():
    with grpc_client() as (client, _, servicer):
        answer = client.chat(
            CHAT,
            model="m",
            temperature=0.0,
            logit_bias={7: -1.0},
            speculative={"mode": "coupled", "pipeline": "serial", "metrics": True},
        )
    over_http, _, _ = scripted(httpx.Response(200, json={**WHOLE, "id": "gen-1"}))
    assert answer == over_http.complete("one")
    (request,) = servicer.requests
    assert servicer.metadata[0]["authorization"] == "Bearer sk-1"
    assert request == pb.GenerateRequest(
        model="m",
        messages=pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="one")]),
        sampling=pb.SamplingOptions(temperature=0.0, logit_bias={7: -1.0}),
        speculative=pb.SpeculativeOptions(
            mode=pb.VERIFICATION_MODE_COUPLED, pipeline=pb.PIPELINE_SERIAL, metrics=True
        ),
    )


def test_a_stream_over_grpc_has_texts_and_one_end():
    with grpc_client() as (client, _, servicer):
        assert list(client.stream([1, 2, 3])) == [
            Piece(text="re"),
            Piece(text="d"),
            Piece(finish_reason="length", usage=Usage(prompt_tokens=3, completion_tokens=2)),
        ]
    assert list(servicer.requests[0].token_ids.ids) == [1, 2, 3]


@pytest.mark.parametrize(
    ("code", "trailing", "error"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, {"specdec-error-param": "seed"}, InvalidRequest),
        (
            grpc.StatusCode.INVALID_ARGUMENT,
            {"specdec-error-code": "context_length_exceeded"},
            ContextLengthExceeded,
        ),
        (grpc.StatusCode.UNAUTHENTICATED, {}, Unauthenticated),
        (grpc.StatusCode.NOT_FOUND, {}, UnknownModel),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, {}, RequestError),  # too large: the library itself
        (grpc.StatusCode.INTERNAL, {}, InvariantViolation),
        (grpc.StatusCode.DEADLINE_EXCEEDED, {}, DeadlineExceeded),
    ],
)
def test_grpc_errors_have_types_and_are_not_tried_again(code, trailing, error):
    with grpc_client((code, trailing)) as (client, pauses_s, servicer):
        with pytest.raises(error) as caught:
            client.complete("one")
        assert type(caught.value) is error
        assert caught.value.param == trailing.get("specdec-error-param")
        assert len(servicer.requests) == 1
        assert pauses_s == []


def test_grpc_calls_refused_for_now_are_tried_again_and_begun_streams_are_not():
    busy = {"specdec-error-code": "rate_limit_exceeded", "grpc-retry-pushback-ms": "3000"}
    aborts = [(grpc.StatusCode.RESOURCE_EXHAUSTED, busy), (grpc.StatusCode.UNAVAILABLE, {})]
    with grpc_client(*aborts) as (client, pauses_s, servicer):
        pieces = client.stream("break")
        assert next(pieces).text == "re"
        assert len(servicer.requests) == 3
        assert 3.0 <= pauses_s[0] <= 3.75
        with pytest.raises(ServiceUnavailable):
            list(pieces)
        assert len(servicer.requests) == 3


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://x", "grpc://", "grpc://host:1/path", "http://"])
def test_an_address_without_a_known_protocol_is_refused(url):
    with pytest.raises(ConfigError, match="base_url"):
        Client(url)


# Against the gateway itself


async def test_both_protocols_carry_tools_calls_and_reasoning():
    text = (
        f"<think>hm</think>Let me see.\n{call_text('get_weather', {'city': 'Oslo'})}{call_text('clock', {})}"
    )
    backend = ScriptedBackend([*byte_ids_of(text), EOS_ID], chunk_sizes=(4,))
    service = service_with(backend, THINKING)
    server = await start_grpc_server(ServedModels(service), service.config.gateway, service.is_ready)
    options = {"tools": [WEATHER, CLOCK], "tool_choice": "auto", "parallel_tool_calls": True}
    chosen = {"type": "function", "function": {"name": "clock"}}

    def ask(url):
        with Client(url, timeout_s=20, max_retries=0) as client:
            first = client.chat(CHAT, **options)
            turn = {
                "role": "assistant",
                "content": None,
                "reasoning_content": first.reasoning,
                "tool_calls": [
                    {
                        "id": call.id,
                        "type": "function",
                        "function": {"name": call.name, "arguments": call.arguments},
                    }
                    for call in first.tool_calls
                ],
            }
            results = [
                {"role": "tool", "tool_call_id": call.id, "content": "noon"} for call in first.tool_calls
            ]
            pieces = list(client.stream([*CHAT, turn, *results], **options))
            client.chat(CHAT, **{**options, "tool_choice": chosen})
            for wrong in ({"tool_choice": "sometimes"}, {"tools": [], "tool_choice": chosen}):
                with pytest.raises(InvalidRequest) as caught:
                    client.chat(CHAT, **{**options, **wrong})
                assert caught.value.param == "tool_choice"
        assert all(call.id.startswith("call_") for call in (*first.tool_calls, *pieces[-1].tool_calls))
        assert first.finish_reason == pieces[-1].finish_reason == "tool_calls"
        assert "".join(piece.text for piece in pieces) == first.text
        assert "".join(piece.reasoning for piece in pieces) == first.reasoning
        calls = [(call.name, call.arguments) for call in first.tool_calls]
        assert [(call.name, call.arguments) for call in pieces[-1].tool_calls] == calls
        return first.text, first.reasoning, calls

    try:
        async with serving(build_http_app(only(service))) as url:
            over_http = await in_thread(lambda: ask(url))
            over_grpc = await in_thread(lambda: ask(f"grpc://127.0.0.1:{server.port}"))
    finally:
        await server.stop()
    assert over_http == over_grpc
    assert over_http == ("Let me see.", "hm", [("get_weather", '{"city": "Oslo"}'), ("clock", "{}")])
    half = len(backend.requests) // 2
    asked = [(request.prompt_ids, request.sampling.grammar) for request in backend.requests]
    assert asked[:half] == asked[half:]


async def test_both_protocols_give_the_same_answer_from_one_gateway(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("sk-1\n")
    backend = ScriptedBackend(byte_ids_of("red green blue"))
    service = toy_service(backend, api_keys_file=str(keys))
    server = await start_grpc_server(ServedModels(service), service.config.gateway, service.is_ready)

    async def ask_async(url):
        async with AsyncClient(url, api_key="sk-1", timeout_s=20, max_retries=0) as client:
            assert await client.models() == (MODEL_NAME,)
            whole = await client.complete("one", max_tokens=3)
            texts = [piece.text async for piece in client.stream("one", max_tokens=3)]
            with pytest.raises(InvalidRequest):
                await client.complete("one", temperature=-1.0)
            async for piece in client.stream("one"):
                assert piece.text
                break  # which cancels
        assert "".join(texts) == whole.text == "red"

    def ask(url):
        options = {"max_tokens": 9, "temperature": 0.0, "speculative": {"metrics": True}}
        with Client(url, api_key="sk-1", timeout_s=20, max_retries=0) as client:
            assert client.models() == (MODEL_NAME,)
            whole = client.chat(CHAT, model=MODEL_NAME, **options)
            pieces = list(client.stream(CHAT, **options))
            with pytest.raises(InvalidRequest) as caught:
                client.complete("one", temperature=-1.0)
            with pytest.raises(UnknownModel):
                client.complete("one", model="no-such")
        with Client(url, timeout_s=20) as client, pytest.raises(Unauthenticated):
            client.complete("one")
        assert "".join(piece.text for piece in pieces) == whole.text
        end = pieces[-1]
        assert (end.finish_reason, end.usage, end.speculation) == (
            whole.finish_reason,
            whole.usage,
            whole.speculation,
        )
        return whole.text, whole.finish_reason, whole.usage, whole.speculation, caught.value.param

    try:
        async with serving(build_http_app(only(service))) as url:
            over_http = await in_thread(lambda: ask(url))
            over_grpc = await in_thread(lambda: ask(f"grpc://127.0.0.1:{server.port}"))
            for each in (url, f"grpc://127.0.0.1:{server.port}"):
                await ask_async(each)
            await eventually(lambda: backend.num_running == 0)
    finally:
        await server.stop()
    assert over_http == over_grpc
    assert over_http[:2] == ("red green", "length")
