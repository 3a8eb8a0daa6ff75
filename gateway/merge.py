"""Several streams as one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

from outrider.stopping import cancelled

ItemT = TypeVar("ItemT")

_MAX_WAITING = 64


async def merge(streams: Sequence[AsyncGenerator[ItemT]]) -> AsyncGenerator[ItemT]:
    """Items of all streams in the order in which they come. The first failure, or closing this one, closes all."""
    queue: asyncio.Queue[tuple[ItemT] | Exception | None] = asyncio.Queue(_MAX_WAITING)

    async def pump(stream: AsyncGenerator[ItemT]) -> None:
        try:
            async with contextlib.aclosing(stream):
                async for item in stream:
                    await queue.put((item,))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    running = len(tasks)
    try:
        while running:
            entry = await queue.get()
            if isinstance(entry, Exception):
                raise entry
            if entry is None:
                running -= 1
            else:
                yield entry[0]
    finally:
        await cancelled(*tasks)
