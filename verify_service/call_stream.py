"""GenerateMany: the calls of one caller on one stream. What a step says to all of them is one message."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from outrider.auth import TokenFile
from outrider.errors import DeadlineExceeded, InvalidArgument, OutriderError, ResourceExhausted, Unauthenticated
from outrider.statuses import details_of, told_error
from outrider.tracing import TRACEPARENT
from outrider.v1 import verify_pb2
from outrider.wire import MAX_ENTRIES
from verify_service.calls import Call, Calls, how_ended

MAX_WAITING = 4096  # outputs; while more wait to be written, nothing is read
CALLS_PER_TURN = 64  # of one message; then other streams have theirs
_CANCELS_PER_TURN = 1024
_FRAME_BYTES = 1 << 20
_METHOD = "GenerateMany"


@dataclass(slots=True, eq=False)
class _Running:
    """A call of the stream. `call` is None while its grammar is compiled."""

    call: Call | None = None
    task: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None


class CallStream:
    """One stream. What waits to be written is bounded by what its calls may generate, as for a call by itself.

    tokens: what a call may be begun with, looked at for each: a stream outlives a token that is taken back.
    """

    def __init__(self, calls: Calls, tokens: TokenFile | None, metadata: Any) -> None:
        self._calls = calls
        self._tokens = tokens
        self._metadata = metadata
        self._last = 0
        self._running: dict[int, _Running] = {}
        self._outputs: deque[verify_pb2.CallOutput] = deque()
        self._ended: list[Call] = []  # their last outputs wait to be written
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._closing = False

    def close(self) -> None:
        """Ends the stream once what waits is written; for a server that has nothing more to say."""
        self._closing = True
        self._news.set()

    async def frames(
        self, requests: AsyncIterator[verify_pb2.GenerateManyRequest]
    ) -> AsyncGenerator[verify_pb2.GenerateManyResponse]:
        """What the caller gets. Ends when the caller has ended its side and no call runs."""
        reader = asyncio.create_task(self._read(requests))
        reader.add_done_callback(lambda _: self._news.set())
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                while self._outputs:
                    num_ended = len(self._ended)
                    yield self._frame()
                    ended, self._ended = self._ended[:num_ended], self._ended[num_ended:]
                    for call in ended:
                        self._calls.leave(call)
                    self._room.set()
                if reader.done():
                    reader.result()
                if self._closing or (reader.done() and not self._running):
                    return
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            for number in list(self._running):
                self._forget(number)
            for call in self._ended:
                self._calls.leave(call)

    def _frame(self) -> verify_pb2.GenerateManyResponse:
        """What waits, or as much of it as one message should hold."""
        frame = verify_pb2.GenerateManyResponse()
        size = 0
        while self._outputs and size < _FRAME_BYTES:
            output = self._outputs.popleft()
            size += output.ByteSize()
            frame.outputs.append(output)
        return frame

    # ---- What the caller says

    async def _read(self, requests: AsyncIterator[verify_pb2.GenerateManyRequest]) -> None:
        async for request in requests:
            num_entries = len(request.begin) + len(request.cancel)
            if num_entries > MAX_ENTRIES:
                raise ResourceExhausted(
                    f"a message begins and cancels {num_entries} calls; at most {MAX_ENTRIES} are taken"
                )
            for place, begin in enumerate(request.begin, start=1):
                if begin.call <= self._last:
                    raise InvalidArgument(f"call is {begin.call} after {self._last}; numbers grow", field="begin.call")
                self._last = begin.call
                self._begin(begin)
                if place % CALLS_PER_TURN == 0:
                    await asyncio.sleep(0)
                    await self._writable()
            for place, number in enumerate(request.cancel, start=1):
                self._forget(number)
                if place % _CANCELS_PER_TURN == 0:
                    await asyncio.sleep(0)
            await self._writable()

    async def _writable(self) -> None:
        while len(self._outputs) > MAX_WAITING:
            self._room.clear()
            await self._room.wait()

    def _begin(self, begin: verify_pb2.GenerateCall) -> None:
        number = begin.call
        self._running[number] = entry = _Running()
        if begin.HasField("timeout_ms"):
            late = DeadlineExceeded("the deadline passed")
            entry.timer = asyncio.get_running_loop().call_later(begin.timeout_ms / 1000, self._fail, number, late)
        entry.task = asyncio.create_task(self._start(number, entry, begin))

    async def _start(self, number: int, entry: _Running, begin: verify_pb2.GenerateCall) -> None:
        metadata = ((TRACEPARENT, begin.traceparent),) if begin.traceparent else ()
        try:
            if self._tokens is not None and not self._tokens.accepts(self._metadata):
                raise Unauthenticated("the stream's token is not valid any more")
            entry.call = await self._calls.begin(begin.request, metadata, partial(self._tell, number))
        except Exception as error:
            self._fail(number, error)
        finally:
            entry.task = None

    def _forget(self, number: int) -> None:
        """Drops a call that the caller has given up."""
        entry = self._running.pop(number, None)
        if entry is None:
            return
        if entry.timer is not None:
            entry.timer.cancel()
        if entry.task is not None:
            entry.task.cancel()
        if entry.call is not None:
            self._calls.leave(entry.call)
        self._news.set()

    # ---- What its calls say

    def _tell(self, number: int, response: verify_pb2.GenerateResponse | Exception) -> None:
        if isinstance(response, Exception):
            self._fail(number, response)
            return
        output = verify_pb2.CallOutput(call=number, response=response)
        call = self._running[number].call
        if call is not None and not call.running:
            output.end.SetInParent()
            self._end(number)
        self._outputs.append(output)
        self._news.set()

    def _fail(self, number: int, error: Exception) -> None:
        """Ends a call with a status."""
        told: OutriderError = told_error(error, _METHOD)
        end = verify_pb2.CallEnd(code=told.status.value[0], message=told.message, details=details_of(told))
        self._end(number, how_ended(told))
        self._outputs.append(verify_pb2.CallOutput(call=number, end=end))
        self._news.set()

    def _end(self, number: int, how: str = "finished") -> None:
        """Ends a call, which is left once its end is written."""
        entry = self._running.pop(number)
        if entry.timer is not None:
            entry.timer.cancel()
        if entry.task is not None and entry.task is not asyncio.current_task():
            entry.task.cancel()
        if entry.call is not None:
            self._calls.give_up(entry.call, how)
            self._ended.append(entry.call)
