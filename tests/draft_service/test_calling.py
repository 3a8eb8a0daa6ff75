"""Calls to a drafter on its thread."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from draft_service.calling import Caller


@pytest.mark.asyncio
@pytest.mark.parametrize("fails", [False, True])
async def test_a_call_that_nobody_awaits_any_more_is_away_until_the_thread_is_done_with_it(fails: bool) -> None:
    begun, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def work(argument: int) -> int:
        loop.call_soon_threadsafe(begun.set)
        go_on.wait()
        return 1 // argument

    with ThreadPoolExecutor(1) as executor:
        caller = Caller(executor)
        calling = asyncio.create_task(caller.call(work, 0 if fails else 1))
        await begun.wait()
        calling.cancel()
        await asyncio.gather(calling, return_exceptions=True)
        assert caller.num_away == 1
        go_on.set()
        assert await caller.call(abs, -3) == 3
        assert caller.num_away == 0
