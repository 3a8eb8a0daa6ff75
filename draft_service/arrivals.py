"""What has come on a stream and was not taken in yet: bounded, and taken all at once. Owned by the event loop."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

T = TypeVar("T")


class Arrivals(Generic[T]):
    """A queue like asyncio.Queue, with half the steps between who puts and who takes: a round waits for them."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._items: list[T] = []
        self._any = asyncio.Event()
        self._room = asyncio.Event()

    async def put(self, item: T) -> None:
        """Adds something; waits while there is no room."""
        while len(self._items) >= self._most:
            self._room.clear()
            await self._room.wait()
        self._items.append(item)
        self._any.set()

    async def take(self) -> list[T]:
        """All that is there, oldest first; waits for something."""
        await self._any.wait()
        self._any.clear()
        items, self._items = self._items, []
        self._room.set()
        return items
