"""Work that grows with what a client sends, kept off the event loop when there is much of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

ParamsT = ParamSpec("ParamsT")
ResultT = TypeVar("ResultT")

INLINE_BYTES = 64 * 1024  # a millisecond's work, about; a thread costs a tenth of that
# What these cost, in bytes of JSON that are read:
ID_COST = 16  # a token id that becomes text
SCHEMA_COST = 16  # a byte of a schema that is put in other words
LOGPROB_COST = 64  # a log-probability that is written as JSON

_PIECES_PER_TURN = 16


async def breathe(place: int) -> None:
    """Gives others their turn now and then in work that comes in many small pieces, of which this is the next."""
    if place % _PIECES_PER_TURN == 0:
        await asyncio.sleep(0)


async def offload(
    size: int, work: Callable[ParamsT, ResultT], *args: ParamsT.args, **kwargs: ParamsT.kwargs
) -> ResultT:
    """`work(...)`, in a thread when `size` bytes of a request are to be gone through."""
    if size <= INLINE_BYTES:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)
