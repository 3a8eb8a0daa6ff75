"""Asking again until something holds that nothing tells of: what another thread or process does."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any


def until(holds: Callable[[], object], complaint: str, *, patience_s: float = 60.0) -> None:
    """Returns once it holds; AssertionError with the complaint when it does not in time."""
    end = time.monotonic() + patience_s
    while not holds():
        assert time.monotonic() < end, complaint
        time.sleep(0.01)


async def until_async(
    ask: Callable[[], Any], complaint: str, *, done: Callable[[Any], object] = bool, patience_s: float = 120.0,
    pause_s: float = 0.01,
) -> None:  # fmt: skip
    """Returns once the answer, awaited where it can be, is `done`; AssertionError with the last one when not in time.

    pause_s: 0 for what runs on this loop, which then gets its turns without a wait.
    """
    answer: Any = None
    try:
        async with asyncio.timeout(patience_s):
            while True:
                answer = ask()
                if inspect.isawaitable(answer):
                    answer = await answer
                if done(answer):
                    return
                await asyncio.sleep(pause_s)
    except TimeoutError as error:
        raise AssertionError(f"{complaint}; last: {answer}") from error
