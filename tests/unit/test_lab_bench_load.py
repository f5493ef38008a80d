"""The load generator against real servers: scripted ones, ones that misbehave, and specdec's own HTTP app."""

from __future__ import annotations

import asyncio
import itertools
import json
from contextlib import asynccontextmanager

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from specdec.errors import GenerationFailed
from specdec.gateway.http import build_http_app
from specdec.lab.bench.acceptance import Acceptance
from specdec.lab.bench.answer import Record
from specdec.lab.bench.bench import Plan, measure_levels, prepare
from specdec.lab.bench.http import Endpoint, data_lines, error_message
from specdec.lab.bench.load import Load, run_load, send
from specdec.lab.bench.prompts import chat, from_file, made_up
from specdec.lab.bench.server import find_model
from specdec.lab.errors import BenchError, RequestFailed
from tests.fakes import MODEL_NAME, ScriptedBackend, byte_ids_of, only, serving, toy_service

PROMPT = chat("one")


def frames_of(texts, num_tokens):
    """An answer with one event for each text, and ``num_tokens`` in its usage."""
    for text in texts:
        yield {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}
    yield {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
    yield {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": num_tokens}}


def fake_app(*, texts=("a", "bc"), num_tokens=4, delay_s=0.0, owner="somebody", counters=None):
    """A server of fixed answers; ``app.bodies`` keeps what it was asked."""
    app = FastAPI()
    app.bodies = []
    app.num_running = app.most_running = 0

    async def stream():
        app.num_running += 1
        app.most_running = max(app.most_running, app.num_running)
        for frame in frames_of(texts, num_tokens):
            await asyncio.sleep(delay_s)
            yield f"data: {json.dumps(frame)}\n\n"
        app.num_running -= 1
        yield "data: [DONE]\n\n"

    @app.get("/v1/models")
    async def models():
        return {"data": [{"id": "toy", "owned_by": owner}]}

    @app.post("/v1/chat/completions")
    async def complete(request: Request):
        app.bodies.append(await request.json())
        return StreamingResponse(stream(), media_type="text/event-stream")

    @app.get("/metrics")
    async def metrics():
        return StreamingResponse(iter([next(counters)])) if counters else JSONResponse({}, 404)

    return app


def status_app(status, body):
    app = FastAPI()

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def refuse(path: str):
        return JSONResponse(body, status)

    return app


def serving_specdec(backend):
    service = toy_service(backend)
    return serving(build_http_app(only(service)))


@asynccontextmanager
async def raw_server(answer):
    """A server that sends these bytes to everybody and hangs up; with None it never answers."""

    async def handle(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        if answer is None:
            await asyncio.Event().wait()
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def load_of(url, **options):
    return Load(endpoint=Endpoint.parse(url), model="toy", **options)


async def failure_of(url, **options):
    outcome = await send(load_of(url, **options), PROMPT)
    assert isinstance(outcome, RequestFailed), outcome
    return outcome


async def test_several_tokens_in_one_event_are_counted_by_usage():
    async with serving(fake_app(texts=("a", "bcd", "ef"), num_tokens=6)) as url:
        record = await send(load_of(url), PROMPT)
    assert isinstance(record, Record)
    assert (record.num_tokens, record.num_text_events, record.num_prompt_tokens) == (6, 3, 3)
    assert record.is_counted


async def test_the_first_text_splits_the_time():
    async with serving(fake_app(texts="abcd", num_tokens=4, delay_s=0.02)) as url:
        record = await send(load_of(url), PROMPT)
    # Each of the four texts and the finish come 0.02 s after the one before; a busy machine only adds to it.
    assert record.ttft_s >= 0.02
    assert record.tpot_s >= 4 * 0.02 / 3
    assert record.latency_s >= record.ttft_s + 3 * record.tpot_s


async def test_the_body_says_what_was_asked_for():
    app = fake_app()
    extra = {"speculative": {"metrics": True}}
    async with serving(app) as url:
        await send(load_of(url, max_tokens=9, temperature=0.5, ignore_eos=True, extra_body=extra), PROMPT)
    assert app.bodies == [
        {
            "model": "toy",
            "messages": [{"role": "user", "content": "one"}],
            "max_tokens": 9,
            "temperature": 0.5,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "speculative": {"metrics": True},
        }
    ]


async def test_a_field_only_some_servers_know_is_not_sent_unasked():
    assert "ignore_eos" not in load_of("http://h").request(PROMPT)[1]


async def test_so_many_streams_at_a_time_and_each_prompt_once():
    app = fake_app(delay_s=0.01)
    finished = []
    async with serving(app) as url:
        outcomes, elapsed_s = await run_load(
            load_of(url), [chat(str(number)) for number in range(7)], 3, lambda: finished.append(1)
        )
    assert len(outcomes) == len(finished) == 7
    assert app.most_running == 3
    assert sorted(body["messages"][0]["content"] for body in app.bodies) == [
        str(number) for number in range(7)
    ]
    assert elapsed_s > 0


async def test_specdec_answers_with_tokens_and_acceptance():
    backend = ScriptedBackend(byte_ids_of("red green blue "), chunk_sizes=(3,))
    async with serving_specdec(backend) as url:
        load, served = await prepare(load_of(url, max_tokens=12, ignore_eos=True), None)
        (figures,) = await measure_levels(load, served, Plan([2], 3, 1), made_up(4))
    assert (served.name, served.owner) == (MODEL_NAME, "specdec")
    assert (figures.num_succeeded, figures.errors, figures.num_tokens) == (3, {}, 36)
    assert figures.tokens_per_event == 3.0
    assert figures.acceptance == Acceptance(3 * 4, 3 * 8, 3 * 4)


async def test_specdec_text_and_token_prompts_work_too():
    backend = ScriptedBackend(byte_ids_of("red"))
    async with serving_specdec(backend) as url:
        load, _ = await prepare(load_of(url, max_tokens=5), MODEL_NAME)
        for prompt in ({"prompt": "one"}, {"prompt": byte_ids_of("one")}):
            outcome = await send(load, prompt)
            assert isinstance(outcome, Record), outcome
            assert outcome.num_tokens == 5


async def test_an_error_in_mid_stream_is_counted_as_one():
    backend = ScriptedBackend(byte_ids_of("red"), error=GenerationFailed("no target is left"), error_after=2)
    async with serving_specdec(backend) as url:
        load, _ = await prepare(load_of(url, max_tokens=5), None)
        outcome = await send(load, PROMPT)
    assert isinstance(outcome, RequestFailed)
    assert outcome.kind == "error_event"
    assert "no target is left" in outcome.message


async def test_vllm_counters_are_read_before_and_after():
    def readings():
        for accepted in itertools.count(10, 5):
            yield (
                f"vllm:spec_decode_num_drafts_total{{}} {2 * accepted}\n"
                f"vllm:spec_decode_num_draft_tokens_total{{}} {4 * accepted}\n"
                f"vllm:spec_decode_num_accepted_tokens_total{{}} {accepted}\n"
            )

    async with serving(fake_app(owner="vllm", counters=readings())) as url:
        load, served = await prepare(load_of(url), None)
        (figures,) = await measure_levels(load, served, Plan([1], 1, 0), made_up(4))
    assert figures.acceptance == Acceptance(10, 20, 5)


async def test_a_refused_request_is_counted_by_status():
    body = {"error": {"message": "the queue is full"}}
    async with serving(status_app(429, body)) as url:
        failure = await failure_of(url)
    assert failure.kind == "http_429"
    assert "the queue is full" in failure.message


async def test_nobody_listening_is_a_connection_error():
    async with raw_server(b"") as url:
        pass
    assert (await failure_of(url)).kind == "connection"


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
EVENT = b'data: {"choices": [{"text": "a"}]}\n\n'
CHUNK = b"%x\r\n%s\r\n" % (len(EVENT), EVENT)


@pytest.mark.parametrize(
    "answer",
    [
        HEAD + b"\r\n" + EVENT,
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNK,
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNK + b"40\r\nhalf",
        HEAD + b"Content-Length: 999\r\n\r\n" + EVENT,
        HEAD,
        b"",
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        HEAD + b"\r\ndata: {not json\n\n",
        HEAD + b"\r\ndata: 5\n\n",
        HEAD + b'\r\ndata: {"choices": ["a"]}\n\n',
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
async def test_a_stream_that_breaks_off_is_an_error_and_not_a_short_answer(answer):
    async with raw_server(answer) as url:
        assert (await failure_of(url)).kind == "broken_stream"


async def test_a_whole_answer_without_chunks_is_read_to_its_end():
    done = b'data: {"choices": [], "usage": {"completion_tokens": 4}}\r\n\r\ndata: [DONE]'
    async with raw_server(HEAD + b"\r\n" + EVENT + done) as url:
        outcome = await send(load_of(url), PROMPT)
    assert isinstance(outcome, Record), outcome
    assert outcome.num_tokens == 4


async def test_silence_is_given_up_and_the_message_names_the_limit():
    async with raw_server(None) as url:
        failure = await failure_of(url, idle_timeout_s=0.05)
    assert failure.kind == "timeout"
    assert "nothing arrived for 0.05 s (--idle-timeout)" in failure.message


async def test_an_endless_answer_is_given_up():
    async with serving(fake_app(texts="a" * 1000, delay_s=0.01)) as url:
        failure = await failure_of(url, request_timeout_s=0.2)
    assert failure.kind == "timeout"
    assert "--request-timeout" in failure.message


async def test_one_failure_does_not_end_the_others():
    app = fake_app()

    @app.middleware("http")
    async def fail_once(request, call_next):
        if len(app.bodies) == 1 and not hasattr(app, "has_failed"):
            app.has_failed = True
            return JSONResponse({"error": {"message": "once"}}, 500)
        return await call_next(request)

    async with serving(app) as url:
        outcomes, _ = await run_load(load_of(url), [PROMPT] * 4, 1)
    assert sum(isinstance(outcome, Record) for outcome in outcomes) == 3


async def test_a_failing_warm_up_ends_the_measurement():
    app = fake_app()

    @app.post("/v1/completions")
    async def refuse():
        return JSONResponse({"error": {"message": "unknown field"}}, 400)

    async with serving(app) as url:
        load, served = await prepare(load_of(url), None)
        with pytest.raises(BenchError, match="warm-up failed: HTTP 400: unknown field"):
            await measure_levels(load, served, Plan([1]), itertools.repeat({"prompt": "one"}))


async def test_finding_the_model():
    async with serving(fake_app()) as url:
        endpoint = Endpoint.parse(url)
        assert (await find_model(endpoint, None, {})).name == "toy"
        assert (await find_model(endpoint, "toy", {})).name == "toy"
        with pytest.raises(BenchError, match="serves no model 'other'; it serves toy"):
            await find_model(endpoint, "other", {})


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (401, {"error": {"message": "no key"}}, "--api-key"),
        (503, {"error": {"message": "nothing is ready"}}, "HTTP 503: nothing is ready"),
        (404, {"detail": "Not Found"}, "HTTP 404"),
        (200, {"hello": "world"}, "OpenAI-compatible"),
        (200, {"data": []}, "serves no model"),
    ],
)
async def test_a_server_that_cannot_be_measured_is_named_with_the_reason(status, body, message):
    async with serving(status_app(status, body)) as url:
        with pytest.raises(BenchError, match=message):
            await find_model(Endpoint.parse(url), None, {})


async def test_a_server_without_a_list_is_asked_for_the_model_named():
    async with serving(status_app(404, {})) as url:
        assert (await find_model(Endpoint.parse(url), "mine", {})).name == "mine"


async def test_the_api_key_is_sent():
    app = fake_app()
    seen = []

    @app.middleware("http")
    async def keep(request, call_next):
        seen.append(request.headers.get("authorization"))
        return await call_next(request)

    async with serving(app) as url:
        load, _ = await prepare(load_of(url, api_key="secret"), None)
        await send(load, PROMPT)
    assert seen == ["Bearer secret"] * 2


async def test_extra_fields_of_the_user_win_and_are_merged():
    async with serving(fake_app(owner="specdec")) as url:
        extra = {"speculative": {"num_speculative_tokens": 0}}
        load, _ = await prepare(load_of(url, extra_body=extra), None)
    assert load.extra_body == {"speculative": {"metrics": True, "num_speculative_tokens": 0}}


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000"),
        ("https://example.org/api/v1", "https://example.org:443/api"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_addresses(url, text):
    assert str(Endpoint.parse(url)) == text


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://h", "http://", "http://h:port", "http://h:99999"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(BenchError, match="--url"):
        Endpoint.parse(url)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
async def test_events_come_out_whole_however_they_arrive(size):
    stream = b': hello\n\ndata: {"a": 1}\r\n\r\nevent: x\ndata:{"b": "\xc3\xa9"}\n\ndata: [DONE]\n\n'

    async def pieces():
        for start in range(0, len(stream), size):
            yield stream[start : start + size]

    lines = [line async for line in data_lines(pieces())]
    assert lines == [b'{"a": 1}', b'{"b": "\xc3\xa9"}', b"[DONE]"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"error": {"message": "bad\\nfield"}}', "bad field"),
        ('{"error": "bad"}', "bad"),
        ('{"detail": "Not Found"}', "{'detail': 'Not Found'}"),
        ("<html>\n502</html>", "<html> 502</html>"),
        ("", ""),
    ],
)
def test_error_answers_in_one_line(body, message):
    assert error_message(body) == message


def test_made_up_prompts_differ_from_their_first_words_on():
    texts = [body["messages"][0]["content"] for body in itertools.islice(made_up(20), 50)]
    assert all(len(text.split()) == 20 for text in texts)
    assert len({tuple(text.split()[:4]) for text in texts}) == 50
    assert texts == [body["messages"][0]["content"] for body in itertools.islice(made_up(20), 50)]


def test_prompts_from_a_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('hello there\n\n{"prompt": [1, 2]}\n{"messages": [], "id": 7}\n')
    assert list(itertools.islice(from_file(path), 4)) == [
        chat("hello there"),
        {"prompt": [1, 2]},
        {"messages": []},
        chat("hello there"),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [("\n", "holds no prompt"), ("{broken", "line 1: not JSON"), ('ok\n{"text": 1}', "line 2: one of")],
)
def test_a_file_without_prompts_is_refused(tmp_path, content, message):
    path = tmp_path / "prompts.txt"
    path.write_text(content)
    with pytest.raises(BenchError, match=message):
        from_file(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(BenchError, match="cannot read"):
        from_file(tmp_path / "none")
