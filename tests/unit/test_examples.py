"""The examples run as they are, against a gateway with a key."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path

import pytest

from specdec.gateway.grpc_server import start_grpc_server
from specdec.gateway.http import build_http_app
from specdec.gateway.models import ServedModels
from tests.fakes import ScriptedBackend, byte_ids_of, only, serving, toy_service

ROOT = Path(__file__).parents[2]
TEXT = "red green blue"
KEY = "sk-example"
TIMEOUT_S = 60.0
EXAMPLES = {
    "curl.sh": ["red", "data: [DONE]", "num_draft_tokens", '"usage"'],
    "openai_client.py": [TEXT, "num_draft_tokens"],
    "python_client.py": [TEXT, "Usage(prompt_tokens=", "Speculation(num_spec_steps="],
    "grpc_client.py": [TEXT, "num_draft_tokens", "INVALID_ARGUMENT", "prompt"],
    "grpcurl.sh": ["red", "numDraftTokens", "maxContext"],
}


def test_every_example_is_run():
    assert {path.name for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".sh")} == set(
        EXAMPLES
    )


@pytest.mark.parametrize("name", EXAMPLES)
async def test_an_example_does_what_it_shows(name, tmp_path):
    command = [sys.executable] if name.endswith(".py") else ["sh"]
    tool = name.removesuffix(".sh")
    if name.endswith(".sh") and shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    keys = tmp_path / "keys"
    keys.write_text(KEY)
    backend = ScriptedBackend(byte_ids_of(TEXT), chunk_sizes=(3,))
    service = toy_service(backend, api_keys_file=str(keys))
    server = await start_grpc_server(ServedModels(service), service.config.gateway, service.is_ready)
    try:
        async with serving(build_http_app(only(service))) as url:
            process = await asyncio.create_subprocess_exec(
                *command,
                str(ROOT / "examples" / name),
                cwd=ROOT,
                env={
                    **os.environ,
                    "SPECDEC_URL": url,
                    "SPECDEC_GRPC": f"127.0.0.1:{server.port}",
                    "SPECDEC_API_KEY": KEY,
                    "PYTHONUNBUFFERED": "1",
                },
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            output, errors = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    finally:
        await server.stop()
    assert process.returncode == 0, errors.decode()
    for expected in EXAMPLES[name]:
        assert expected in output.decode()
