"""How calls end before their answer does: what another replica may mend, and what the client is told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

import grpc
import grpc.aio

from outrider.errors import ENGINE_FAILED, Internal, OutriderError
from outrider.rpc import error_from_rpc
from outrider.statuses import code_of, error_of
from outrider.v1 import verify_pb2

AnswerT = TypeVar("AnswerT")

# The last two are of the gateway's own token, which is not the client's: its probes will find out, another may take it.
# UNKNOWN is of what lies between; verify has a status for everything.
_BREAKS = frozenset({
    grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED,
})  # fmt: skip


class Broken(Exception):
    """A call ended before its output did; another replica may go on. `engine`: since the engine failed."""

    def __init__(self, reason: str, *, engine: bool = False) -> None:
        super().__init__(reason)
        self.engine = engine


class Differs(Broken):
    """The replica computes otherwise than that which began to answer the request, and is not to blame."""


class NotOffered(Exception):
    """The stream ended before a word came: the service knows no streams of many calls, or gRPC lost why it ended. Made
    alone, the call gets its answer."""


def failure_of_rpc(error: grpc.aio.AioRpcError) -> Exception:
    """Why a call that was made by itself failed."""
    return _failure(error.code(), error_from_rpc(error))


def failure_of_end(end: verify_pb2.CallEnd) -> Exception | None:
    """Why one of a stream's calls ended too early, if it did."""
    code = code_of(end.code)
    return None if code is grpc.StatusCode.OK else _failure(code, error_of(code, end.message, end.details))


def _failure(code: grpc.StatusCode, error: OutriderError) -> Exception:
    """Broken where the replica went away, what verify answered otherwise."""
    reset = isinstance(error, Internal) and error.code is None  # verify's own has one, a stream that was reset none
    return broken(code, error) if reset or code in _BREAKS else error


def broken(code: grpc.StatusCode, error: OutriderError) -> Broken:
    """A call that ended with this, through no fault of its own."""
    return Broken(error.message or code.name, engine=error.code == ENGINE_FAILED)


class ChannelClosed(Exception):
    """The channel was closed while an answer was waited for."""


async def answer_of(call: Awaitable[AnswerT]) -> AnswerT:
    """A call's answer. ChannelClosed where grpc.aio says CancelledError, and it is not this task that is cancelled."""
    try:
        return await call
    except asyncio.CancelledError:
        if is_cancelled():
            raise
        raise ChannelClosed from None


def is_cancelled() -> bool:
    """Whether the current task was told to end."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
