"""Calls of the HTTP API of a server in this process."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import Any

import httpx

from specdec.gateway.http import build_http_app
from tests.fakes import only, serving, toy_service


@asynccontextmanager
async def client_of(backend, **options):
    """A client of a server of its own."""
    service = toy_service(backend, **options)
    app = build_http_app(only(service))
    async with serving(app) as url, httpx.AsyncClient(base_url=url, timeout=20.0) as client:
        yield client


async def answer(client, path, body) -> dict[str, Any]:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def refusal(client, path, body) -> str:
    """Name of the field for which a request gets 400."""
    response = await client.post(path, json=body)
    assert response.status_code == 400, response.text
    return response.json()["error"]["param"]


async def stream(client, path, body) -> list[dict[str, Any]]:
    """The chunks of a stream that ends well."""
    response = await client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    frames = response.content.decode().split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


def by_index(chunks) -> dict[int, list[dict[str, Any]]]:
    """A stream's choices, in order, by index."""
    found: dict[int, list[dict[str, Any]]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            found.setdefault(choice["index"], []).append(choice)
    return found
