"""How handlers find what this process serves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import Depends, Request

from specdec.errors import ServiceUnavailable
from specdec.gateway.models import ServedModels

ModelsProvider = Callable[[], ServedModels | None]
"""Returns what the process serves, or None while it serves nothing yet."""


async def _current_models(request: Request) -> ServedModels:
    models: ServedModels | None = request.app.state.get_models()
    if models is None:
        raise ServiceUnavailable("the gateway is starting")
    return models


Models = Annotated[ServedModels, Depends(_current_models)]
