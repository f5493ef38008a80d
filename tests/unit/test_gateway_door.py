"""The door: which routes and calls are open, browsers, what an error tells and what the log keeps."""

from __future__ import annotations

import logging

import grpc
import httpx
import pytest
from fastapi.routing import APIRoute
from google.protobuf.descriptor_pool import Default as default_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from specdec.errors import ConfigError
from specdec.gateway.grpc_server import SERVICE_NAME, start_grpc_server
from specdec.gateway.http import build_http_app
from specdec.gateway.keys import ApiKeys
from specdec.gateway.models import ServedModels
from specdec.gateway.proto import generation_pb2 as pb
from specdec.gateway.proto import generation_pb2_grpc as pb_grpc
from tests.fakes import ScriptedBackend, only, serving, token_ids_of, toy_service

OPEN_ROUTES = {("GET", "/health"), ("GET", "/version"), ("GET", "/openapi.json")}
OPEN_SERVICES = {"grpc.health.v1.Health"}
KEY = "sk-very-secret-indeed"
BEARER = {"Authorization": f"Bearer {KEY}"}
PROMPT = "a prompt nobody else may read"


@pytest.fixture
def keys_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"{KEY}\n")
    return str(path)


class BrokenBackend(ScriptedBackend):
    """Fails as a bug would, with what it was given in the message."""

    async def generate(self, request, not_before):
        raise KeyError(f"/srv/secret/place {KEY} {PROMPT}")
        yield ()


def service(keys_file=None, backend=None, **gateway):
    keys = {"api_keys_file": keys_file} if keys_file else {}
    return toy_service(backend or ScriptedBackend(token_ids_of("red green blue")), **keys, **gateway)


def app_of(a_service, **options):
    return build_http_app(only(a_service), **options)


def routes_of(app):
    """Every route with each of its methods, and one that does not exist."""
    listed = [(method, route.path) for route in app.routes for method in route.methods - {"HEAD", "OPTIONS"}]
    assert {route.path for route in app.routes if isinstance(route, APIRoute)} > {"/tokenize", "/metrics"}
    return [*listed, ("POST", "/v1/no-such-path"), ("GET", "/")]


async def test_every_http_route_that_is_not_on_the_list_asks_for_a_key(keys_file):
    app = app_of(service(keys_file))
    refused, answered = set(), set()
    async with serving(app) as url, httpx.AsyncClient(base_url=url) as client:
        for method, path in routes_of(app):
            for content_type in ("application/json", "text/plain"):
                answer = await client.request(
                    method, path, content="{}", headers={"Content-Type": content_type}
                )
                (refused if answer.status_code == 401 else answered).add((method, path))
                if answer.status_code == 401:
                    assert answer.json()["error"]["code"] == "invalid_api_key"
                    assert answer.headers["www-authenticate"] == "Bearer"
            with_key = await client.request(method, path, json={}, headers=BEARER)
            assert with_key.status_code != 401, path
    assert answered == OPEN_ROUTES
    assert len(refused) >= 10


async def test_a_key_is_asked_for_before_the_body_is_looked_at(keys_file):
    app = app_of(service(keys_file, max_body_bytes=10))
    async with serving(app) as url, httpx.AsyncClient(base_url=url) as client:
        assert (await client.post("/v1/completions", content="x" * 1000)).status_code == 401
        assert (await client.post("/v1/completions", json="x" * 1000, headers=BEARER)).status_code == 413


@pytest.mark.parametrize(
    ("path", "status"), [("/llm/health", 200), ("/llm/status", 401), ("/llm//health", 401)]
)
async def test_the_list_holds_under_the_prefix_of_a_deployment(keys_file, path, status):
    transport = httpx.ASGITransport(app_of(service(keys_file)), root_path="/llm")
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        assert (await client.get(path)).status_code == status


def grpc_methods():
    """Every method of every service this process knows, with the kind of its answer."""
    pool = default_pool()
    names = [SERVICE_NAME, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"]
    assert {service.full_name for service in pb.DESCRIPTOR.services_by_name.values()} == {SERVICE_NAME}
    return [(name, method.name) for name in names for method in pool.FindServiceByName(name).methods]


async def test_every_grpc_method_that_is_not_on_the_list_asks_for_a_key(keys_file):
    guarded = service(keys_file, grpc_reflection=True)
    server = await start_grpc_server(ServedModels(guarded), guarded.config.gateway, guarded.is_ready)
    codes = {}
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            for name, method in [*grpc_methods(), ("no.such.Service", "Method")]:
                call = channel.stream_stream(f"/{name}/{method}")(iter([b""]), timeout=20)
                try:
                    await call.read()  # no more: some go on for ever
                except grpc.aio.AioRpcError as error:
                    codes[name, method] = error.code()
                call.cancel()
    finally:
        await server.stop()
    refused = {method for method, code in codes.items() if code is grpc.StatusCode.UNAUTHENTICATED}
    guarded_methods = {(name, method) for name, method in grpc_methods() if name not in OPEN_SERVICES}
    assert refused == guarded_methods | {("no.such.Service", "Method")}
    assert len(guarded_methods) >= 4


async def test_health_and_reflection_over_grpc_with_and_without_a_key(keys_file):
    guarded = service(keys_file, grpc_reflection=True)
    server = await start_grpc_server(ServedModels(guarded), guarded.config.gateway, guarded.is_ready)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert health.status == health_pb2.HealthCheckResponse.SERVING
            reflect = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
            request = reflection_pb2.ServerReflectionRequest(list_services="")
            metadata = (("authorization", f"bearer {KEY}"),)
            answer = await reflect(iter([request]), metadata=metadata).read()
            assert SERVICE_NAME in {item.name for item in answer.list_services_response.service}
    finally:
        await server.stop()


async def test_reflection_is_off_unless_asked_for():
    open_service = service()
    server = await start_grpc_server(
        ServedModels(open_service), open_service.config.gateway, open_service.is_ready
    )
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            reflect = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await reflect(iter([reflection_pb2.ServerReflectionRequest(list_services="")])).read()
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    finally:
        await server.stop()


def test_keys_of_file_and_environment_all_count(keys_file):
    keys = ApiKeys.load(keys_file, {"SPECDEC_API_KEYS": "from-env, another\nthird"})
    for key in (KEY, "from-env", "another", "third"):
        assert keys.check(f"Bearer {key}")
    assert ApiKeys.load(None, {"SPECDEC_API_KEYS": "only"}).check("bearer only")


@pytest.mark.parametrize("value", ["", " ", ",", " , "])
def test_an_environment_without_a_key_does_not_leave_the_door_open(value):
    with pytest.raises(ConfigError, match="SPECDEC_API_KEYS"):
        ApiKeys.load(None, {"SPECDEC_API_KEYS": value})


def test_a_key_file_that_cannot_be_decoded_is_not_quoted(tmp_path):
    path = tmp_path / "keys"
    path.write_bytes(KEY.encode() + b"\xff")
    with pytest.raises(ConfigError) as caught:
        ApiKeys.load(str(path))
    assert KEY not in str(caught.value)
    assert caught.value.__cause__ is None


# Browsers


PREFLIGHT = {
    "Origin": "https://app.example.com",
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
}


async def test_a_preflight_needs_no_key_where_the_origin_is_allowed(keys_file):
    app = app_of(service(keys_file), cors_origins=("https://app.example.com",))
    async with serving(app) as url, httpx.AsyncClient(base_url=url) as client:
        answer = await client.options("/v1/chat/completions", headers=PREFLIGHT)
        assert answer.status_code in (200, 204)
        assert answer.headers["access-control-allow-origin"] == "https://app.example.com"
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert "authorization" in answer.headers["access-control-allow-headers"].lower()
        # A page reads errors too, that of a lacking key among them.
        refused = await client.post("/v1/completions", json={}, headers={"Origin": PREFLIGHT["Origin"]})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://app.example.com"
        foreign = await client.options(
            "/v1/completions", headers=PREFLIGHT | {"Origin": "https://evil.example"}
        )
        assert "access-control-allow-origin" not in foreign.headers


async def test_by_default_no_page_may_read_an_answer():
    async with serving(app_of(service())) as url, httpx.AsyncClient(base_url=url) as client:
        answer = await client.options("/v1/chat/completions", headers=PREFLIGHT)
        assert answer.status_code == 405
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        version = await client.get("/version", headers={"Origin": "https://app.example.com"})
        assert "access-control-allow-origin" not in version.headers


# Methods and paths


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("HEAD", "/health", 200),
        ("HEAD", "/v1/models", 200),
        ("HEAD", "/metrics", 200),
        ("HEAD", "/v1/chat/completions", 405),
        ("GET", "/v1/chat/completions", 405),
        ("PUT", "/health", 405),
        ("DELETE", "/v1/models/x", 405),
        ("PATCH", "/tokenize", 405),
        ("POST", "/v1/v1/chat/completions", 404),
        ("GET", "/v1/v1/models", 404),
        ("POST", "/v1/chat/completions/", 404),
        ("HEAD", "/no-such-path", 404),
    ],
)
async def test_methods_and_paths_that_are_not_served(method, path, status):
    async with serving(app_of(service())) as url, httpx.AsyncClient(base_url=url) as client:
        body = {"json": {}} if method in ("POST", "PUT", "PATCH") else {}
        answer = await client.request(method, path, **body)
    assert answer.status_code == status
    if method == "HEAD":
        assert answer.content == b""
    else:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    if status == 405:
        assert answer.headers["allow"] in ("GET", "POST")


# What an internal error tells


def leaks(text):
    return [word for word in (KEY, PROMPT, "Traceback", "/srv/", ".py", "site-packages") if word in text]


def logged(caplog):
    """All that servers logged, traces included; the client of this test logs too."""
    records = [record for record in caplog.records if not record.name.startswith(("httpcore", "httpx"))]
    return "\n".join(logging.Formatter().format(record) for record in records)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_internal_error_tells_neither_client_nor_log_a_trace_a_path_or_a_secret(
    keys_file, stream, caplog
):
    caplog.set_level(logging.INFO)
    app = app_of(service(keys_file, BrokenBackend()))
    body = {"prompt": PROMPT, "stream": stream}
    async with serving(app) as url, httpx.AsyncClient(base_url=url) as client:
        answer = await client.post("/v1/completions", json=body, headers=BEARER)
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "internal error"
    assert leaks(answer.text) == []
    assert "KeyError at " in logged(caplog)
    assert "specdec.gateway.service:" in logged(caplog)  # module and line: enough to find it
    assert leaks(logged(caplog)) == []


async def test_an_internal_error_over_grpc_tells_as_little(keys_file, caplog):
    caplog.set_level(logging.INFO)
    broken = service(keys_file, BrokenBackend())
    server = await start_grpc_server(ServedModels(broken), broken.config.gateway, broken.is_ready)
    metadata = (("authorization", f"Bearer {KEY}"),)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            stub = pb_grpc.GenerationServiceStub(channel)
            request = pb.GenerateRequest(text=PROMPT)
            for call in (
                stub.Generate(request, metadata=metadata),
                stub.GenerateStream(request, metadata=metadata).read(),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                assert caught.value.code() is grpc.StatusCode.INTERNAL
                assert caught.value.details() == "internal error"
                assert leaks(str(tuple(caught.value.trailing_metadata()))) == []
    finally:
        await server.stop()
    assert logged(caplog).count("KeyError at ") == 2
    assert leaks(logged(caplog)) == []


async def test_keys_and_prompts_of_refused_requests_are_not_logged(keys_file, caplog):
    caplog.set_level(logging.DEBUG)
    wrong = "sk-wrong-but-still-private"
    async with serving(app_of(service(keys_file))) as url, httpx.AsyncClient(base_url=url) as client:
        caplog.clear()
        for headers in (BEARER, {"Authorization": f"Bearer {wrong}"}):
            await client.post("/v1/completions", json={"prompt": PROMPT, "temperature": -1}, headers=headers)
            await client.post("/v1/completions", json={"prompt": PROMPT}, headers=headers)
    assert leaks(logged(caplog)) == []
    assert wrong not in logged(caplog)
