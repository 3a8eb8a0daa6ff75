"""Many calls' responses leave the event loop time for what comes meanwhile, in order, and none is lost at the end."""

from __future__ import annotations

import asyncio

import pytest

from outrider.v1 import verify_pb2
from verify_service.pacing import CallResponses, Pacer


def said(number: int) -> verify_pb2.GenerateResponse:
    return verify_pb2.GenerateResponse(tokens=[number])


@pytest.mark.asyncio
async def test_between_a_few_responses_the_loop_does_what_else_is_due() -> None:
    pacer = Pacer()
    calls = [CallResponses(pacer) for _ in range(32)]
    for number, call in enumerate(calls):
        call.put(said(number))
    there: list[int] = []
    while not there or there[-1] < 32:
        await asyncio.sleep(0)
        there.append(sum(not call.queue.empty() for call in calls))
    steps = [after - before for before, after in zip([0, *there], there, strict=False)]
    assert max(steps) <= 4
    assert [(await call.get()) for call in calls] == [said(number) for number in range(32)]


@pytest.mark.asyncio
async def test_a_call_knows_of_what_is_on_its_way() -> None:
    pacer = Pacer()
    first, second = CallResponses(pacer), CallResponses(pacer)
    for number in range(20):
        first.put(said(number))
    second.put(ValueError("why"))
    assert first
    assert second
    assert [(await first.get()).tokens[0] for _ in range(20)] == list(range(20))  # type: ignore[union-attr]
    assert not first
    assert isinstance(await second.get(), ValueError)
    assert not second
