"""Several sources of events as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class _Next(Generic[Item]):
    item: Item
    room: asyncio.Semaphore
    """Of the source; to be released when the item is taken."""


@dataclass(frozen=True, slots=True)
class _End:
    error: BaseException | None


def interleaved(sources: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[Item, None]:
    """Yield what the sources yield, as it comes; those of one source in its order.

    The first error ends all of them and is raised. Closing this closes every source before ``aclose()``
    returns. A source is at most two items ahead of the reader.
    """
    # The usual case costs no task and no queue.
    return sources[0] if len(sources) == 1 else _interleaved(sources)


async def _interleaved(sources: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[Item, None]:
    queue: asyncio.Queue[_Next[Item] | _End] = asyncio.Queue()
    tasks = [asyncio.create_task(_drain(source, queue)) for source in sources]
    try:
        num_running = len(tasks)
        while num_running:
            taken = await queue.get()
            if isinstance(taken, _Next):
                taken.room.release()
                yield taken.item
            elif taken.error is not None:
                raise taken.error
            else:
                num_running -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _drain(source: AsyncGenerator[Item, None], queue: asyncio.Queue[_Next[Item] | _End]) -> None:
    room = asyncio.Semaphore()
    error: BaseException | None = None
    try:
        async with aclosing(source):
            async for item in source:
                await room.acquire()
                queue.put_nowait(_Next(item, room))
    except BaseException as caught:
        error = caught
        raise
    finally:
        # However a source ends, its reader must hear of it.
        queue.put_nowait(_End(error))
