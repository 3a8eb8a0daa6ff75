"""What comes on a stream waits in order, and no more of it than may."""

from __future__ import annotations

import asyncio

import pytest

from draft_service.arrivals import Arrivals

pytestmark = pytest.mark.asyncio


async def test_all_that_came_is_taken_at_once_in_its_order() -> None:
    arrivals: Arrivals[int] = Arrivals(8)
    for number in range(3):
        await arrivals.put(number)
    assert await arrivals.take() == [0, 1, 2]
    taker = asyncio.create_task(arrivals.take())
    await asyncio.sleep(0)
    assert not taker.done()
    await arrivals.put(3)
    assert await taker == [3]


async def test_who_brings_more_than_there_is_room_for_waits() -> None:
    arrivals: Arrivals[int] = Arrivals(2)

    async def bring() -> None:
        for number in range(7):
            await arrivals.put(number)

    bringer = asyncio.create_task(bring())
    taken: list[int] = []
    while len(taken) < 7:
        some = await arrivals.take()
        assert 0 < len(some) <= 2
        taken += some
    assert taken == list(range(7))
    await bringer


async def test_several_who_bring_are_bounded_together() -> None:
    arrivals: Arrivals[int] = Arrivals(2)
    bringers = [asyncio.create_task(arrivals.put(number)) for number in range(9)]
    taken: list[int] = []
    while len(taken) < 9:
        some = await arrivals.take()
        assert 0 < len(some) <= 2
        taken += some
    assert sorted(taken) == list(range(9))
    assert all(bringer.done() for bringer in bringers)
