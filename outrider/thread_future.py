"""A future of an event loop that another thread settles, with one hop back to the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

ValueT = TypeVar("ValueT")


class ThreadFuture(Generic[ValueT]):
    """What the event loop awaits, and another thread gives once.

    when_given: runs on the event loop once it is given, whether or not somebody still waits.
    """

    def __init__(self, when_given: Callable[[], object] = lambda: None) -> None:
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[ValueT] = self._loop.create_future()
        self._when_given = when_given

    def __await__(self) -> Generator[Any, None, ValueT]:
        return self._future.__await__()

    def set(self, value: ValueT) -> None:
        """Gives the value. Any thread may."""
        self._loop.call_soon_threadsafe(self._settle, self._future.set_result, value)

    def fail(self, error: BaseException) -> None:
        """Raises the error where it is awaited. Any thread may."""
        self._loop.call_soon_threadsafe(self._settle, self._future.set_exception, error)

    def _settle(self, settle: Callable[[Any], None], outcome: Any) -> None:
        self._when_given()
        if not self._future.done():  # else the caller has gone
            settle(outcome)
