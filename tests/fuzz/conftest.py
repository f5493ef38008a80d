"""The server that is fuzzed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fuzz.server import Gateway, gateway_in_thread


@pytest.fixture(scope="session")
def gateway() -> Iterator[Gateway]:
    with gateway_in_thread() as running:
        yield running
