"""How handlers find the process's service."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import Depends, Request

from specdec.errors import ServiceUnavailable
from specdec.gateway.service import GenerationService

ServiceProvider = Callable[[], GenerationService | None]
"""Returns the process's service, or None while there is none yet."""


async def _current_service(request: Request) -> GenerationService:
    service: GenerationService | None = request.app.state.get_service()
    if service is None:
        raise ServiceUnavailable("the gateway is starting")
    return service


async def _ready_service(request: Request) -> GenerationService:
    service = await _current_service(request)
    if not service.is_ready():
        raise ServiceUnavailable("no worker is ready to serve the model")
    return service


Service = Annotated[GenerationService, Depends(_current_service)]
ReadyService = Annotated[GenerationService, Depends(_ready_service)]
