"""Calls to a drafter: on a thread of its own, or on the event loop where they are soon done. Knows no rounds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, TypeVar

from draft_service.session import Session

A = TypeVar("A")
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Call:
    """One of a drafter's calls, and the sessions that it is about; for none it is left out."""

    sessions: Sequence[Session]
    run: Callable[[Any], Any]
    argument: Any


class Caller:
    """Owned by the event loop. executor: of a single thread; None: all is called on the loop. num_away: calls there."""

    def __init__(self, executor: Executor | None) -> None:
        self.num_away = 0
        self._executor = executor

    async def call(self, call: Callable[[A], T], argument: A) -> T:
        """The call's result."""
        if self._executor is None:
            return call(argument)
        # As loop.run_in_executor, but with one way back to the loop instead of two: a round waits for it.
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def work() -> None:
            try:
                result = call(argument)
            except BaseException as error:
                loop.call_soon_threadsafe(self._fail, answer, error)
            else:
                loop.call_soon_threadsafe(self._settle, answer, result)

        self._executor.submit(work)
        self.num_away += 1
        return await answer

    async def attempt(self, calls: Sequence[Call], *, here: bool = False) -> list[Any]:
        """In one visit: results, or the exceptions that came instead. here: on the loop, whatever there is."""
        return _attempt(calls) if here else await self.call(_attempt, calls)

    def _settle(self, answer: asyncio.Future[T], result: T) -> None:
        self.num_away -= 1  # not when it is awaited no more: the thread goes on
        if not answer.done():
            answer.set_result(result)

    def _fail(self, answer: asyncio.Future[Any], error: BaseException) -> None:
        self.num_away -= 1
        if not answer.done():
            answer.set_exception(error)


def _attempt(calls: Sequence[Call]) -> list[Any]:
    outcomes: list[Any] = []
    for call in calls:
        try:
            outcomes.append(call.run(call.argument) if call.sessions else None)
        except Exception as error:  # told, and its sessions released, by who asked
            outcomes.append(error)
    return outcomes
