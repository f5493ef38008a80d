"""API keys and TLS at both doors."""

from __future__ import annotations

import subprocess

import grpc
import pytest

from specdec.config import parse_config
from specdec.errors import ConfigError, Unauthenticated
from specdec.gateway.grpc_server import start_grpc_server
from specdec.gateway.keys import ApiKeys
from specdec.gateway.models import ServedModels
from specdec.gateway.proto import generation_pb2 as pb
from specdec.gateway.proto import generation_pb2_grpc as pb_grpc
from tests.fakes import ScriptedBackend, token_ids_of, toy_service


@pytest.fixture
def keys_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# operators\nfirst-key\n\nsecond-key\n")
    return str(path)


def service(keys_file=None, **gateway):
    backend = ScriptedBackend(token_ids_of("red green blue"))
    return toy_service(backend, **({"api_keys_file": keys_file} if keys_file else {}), **gateway)


@pytest.mark.parametrize("header", ["Bearer first-key", "bearer second-key", "BEARER  first-key "])
def test_any_of_the_keys_is_accepted(keys_file, header):
    ApiKeys.load(keys_file).check(header)


@pytest.mark.parametrize(
    "header",
    [None, "", "first-key", "Basic first-key", "Bearer", "Bearer first", "Bearer # operators", "Bearer é"],
)
def test_anything_else_is_refused(keys_file, header):
    with pytest.raises(Unauthenticated):
        ApiKeys.load(keys_file).check(header)


def test_without_keys_every_header_is_accepted():
    ApiKeys().check("Bearer whatever")
    ApiKeys().check(None)


@pytest.mark.parametrize("content", [None, "", "# nothing\n"])
def test_a_key_file_without_keys_does_not_leave_the_door_open(tmp_path, content):
    path = tmp_path / "keys"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match="api_keys_file"):
        ApiKeys.load(str(path))


@pytest.fixture
def certificate(tmp_path):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=localhost"
    names = f"-addext subjectAltName=DNS:localhost -keyout {key} -out {cert}"
    subprocess.run([*make.split(), *names.split()], check=True, capture_output=True)
    return cert, key


async def test_grpc_over_tls(certificate):
    cert, key = certificate
    secured = service(grpc_tls_cert=str(cert), grpc_tls_key=str(key))
    server = await start_grpc_server(ServedModels(secured), secured.config.gateway, secured.is_ready)
    try:
        credentials = grpc.ssl_channel_credentials(cert.read_bytes())
        async with grpc.aio.secure_channel(f"localhost:{server.port}", credentials) as channel:
            answer = await pb_grpc.GenerationServiceStub(channel).Generate(pb.GenerateRequest(text="one"))
            assert answer.choices[0].text
        async with grpc.aio.insecure_channel(f"localhost:{server.port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await pb_grpc.GenerationServiceStub(channel).Generate(
                    pb.GenerateRequest(text="one"), timeout=2
                )
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        await server.stop()


def test_a_certificate_without_its_key_is_refused():
    with pytest.raises(ConfigError, match="go together"):
        parse_config({"target": {"model": "m"}, "gateway": {"grpc_tls_cert": "cert.pem"}})
