"""Calls to a drafter: on a thread of its own, or on the event loop where they are soon done. Knows no rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, TypeVar

from draft_service.session import Session
from outrider.thread_future import ThreadFuture

A = TypeVar("A")
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Call:
    """One of a drafter's calls, left out where its argument is empty. sessions: that it is about."""

    sessions: Sequence[Session]
    run: Callable[[Any], Any]
    argument: Sequence[Any]


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
        answer: ThreadFuture[T] = ThreadFuture(self._came_back)

        def work() -> None:
            try:
                result = call(argument)
            except BaseException as error:
                answer.fail(error)
            else:
                answer.set(result)

        self._executor.submit(work)
        self.num_away += 1
        return await answer

    async def attempt(self, calls: Sequence[Call], *, here: bool) -> list[Any]:
        """Makes calls in one visit; their results, or exceptions that came instead. here: on the loop in any case."""
        return _attempt(calls) if here else await self.call(_attempt, calls)

    def _came_back(self) -> None:
        self.num_away -= 1  # not when it is awaited no more: the thread goes on


def _attempt(calls: Sequence[Call]) -> list[Any]:
    outcomes: list[Any] = []
    for call in calls:
        try:
            outcomes.append(call.run(call.argument) if call.argument else None)
        except Exception as error:  # told, and its sessions released, by who asked
            outcomes.append(error)
    return outcomes
