"""Blocking calls beside an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


class OwnThread:
    """Runs blocking calls one at a time: one that hangs takes no thread away from anybody else."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def run(self, call: Callable[[], Result], timeout_s: float) -> Result:
        """Wait for a call's result.

        Raises:
            TimeoutError: it takes longer; it goes on, and what is asked for next waits for it.
        """
        async with asyncio.timeout(timeout_s):
            return await asyncio.get_running_loop().run_in_executor(self._executor, call)
