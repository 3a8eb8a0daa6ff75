"""Generate calls to one verify service: many on one stream, so that what a step says to all is read as one message.

A service of a release that has no such stream gets each call by itself, and so do requests that are very large. Reading
never waits for a call's reader: what has come for a call waits with it, at most what the call may generate.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

import grpc
import grpc.aio

from gateway.call_failures import Broken, NotOffered, broken, failure_of_end, failure_of_rpc, is_cancelled
from outrider.dialing import terms_of
from outrider.errors import DeadlineExceeded
from outrider.rpc import error_from_rpc, is_lost
from outrider.tracing import TRACEPARENT, call_metadata, metadata_value
from outrider.v1 import verify_pb2, verify_pb2_grpc
from outrider.wire import MAX_ENTRIES

_LARGE_BYTES = 1 << 20  # of a request, which then has a message, and a call, of its own
_FRAME_BYTES = 4 << 20


class Call(Protocol):
    """A Generate call that has begun."""

    async def take(self) -> list[verify_pb2.GenerateResponse]:
        """What has come, after waiting for some; empty once all has. Broken, NotOffered or what verify answers."""
        ...

    def close(self, error: Exception | None = None) -> None:
        """Ends the call: nobody waits for the rest, or whoever does gets `error`."""
        ...


class ReplicaCalls:
    """Begins calls over one channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._stub: verify_pb2_grpc.VerifyServiceAsyncStub = verify_pb2_grpc.VerifyServiceStub(channel)
        self._stream: _Stream | None = None
        self._context = contextvars.copy_context()  # no request's: a stream serves many
        self.each_alone = False

    def begin(self, request: verify_pb2.GenerateRequest, timeout_s: float, *, alone: bool = False) -> Call:
        """A call with the current task's request id and trace; whoever gets it must close it. `alone`: on no stream of
        many, whose end may be told as NotOffered."""
        if alone or self.each_alone or request.prompt_logprobs or request.ByteSize() > _LARGE_BYTES:
            return _CallAlone(self._stub, request, timeout_s)
        terms = terms_of(self._channel)
        if self._stream is None or self._stream.ended or self._stream.terms != terms:
            self.retire()
            self._stream = self._context.run(_Stream, self._stub, terms, self._not_offered)
        return self._stream.begin(request, timeout_s)

    def retire(self) -> None:
        """Takes no more calls on the stream that is open, which ends once those it has have ended."""
        if self._stream is not None:
            self._stream.retire()
            self._stream = None

    def ask_again(self) -> None:
        """Tries a stream of many calls again: another process answers at the address, which may know it."""
        self.each_alone = False

    def _not_offered(self) -> None:
        self.each_alone = True


class _CallAlone:
    """A call by itself."""

    def __init__(
        self, stub: verify_pb2_grpc.VerifyServiceAsyncStub, request: verify_pb2.GenerateRequest, timeout_s: float
    ) -> None:
        self._rpc = stub.Generate(request, timeout=timeout_s, metadata=call_metadata())
        self._error: Exception | None = None

    async def take(self) -> list[verify_pb2.GenerateResponse]:
        """See Call."""
        try:
            response = await self._rpc.read()
        except grpc.aio.AioRpcError as error:
            raise failure_of_rpc(error) from error
        except asyncio.CancelledError:  # what grpc.aio says of a call that we ended, too
            if is_cancelled():
                raise
            raise self._error or Broken("the connection was closed") from None
        return [response] if isinstance(response, verify_pb2.GenerateResponse) else []

    def close(self, error: Exception | None = None) -> None:
        """See Call."""
        self._error = error
        self._rpc.cancel()


class _StreamedCall:
    """One of a stream's calls."""

    def __init__(self, stream: _Stream, number: int, *, keeps: bool) -> None:
        self._stream = stream
        self.number = number
        self.keeps = keeps  # whether parts of responses may be kept for long
        self.timer: asyncio.TimerHandle | None = None
        self.context = contextvars.copy_context()  # of the request, for lines about it
        self._arrived: list[verify_pb2.GenerateResponse] = []
        self._error: Exception | None = None
        self._ended = False
        self._waiter: asyncio.Future[None] | None = None

    def put(self, response: verify_pb2.GenerateResponse) -> None:
        """Takes a response that came."""
        self._arrived.append(response)
        self._wake()

    def end(self, error: Exception | None) -> None:
        """Ends the call: nothing follows."""
        self._ended, self._error = True, error
        if self.timer is not None:
            self.timer.cancel()
        self._wake()

    async def take(self) -> list[verify_pb2.GenerateResponse]:
        """See Call."""
        while not self._arrived:
            if self._error is not None:
                raise self._error
            if self._ended:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        arrived, self._arrived = self._arrived, []
        return arrived

    def close(self, error: Exception | None = None) -> None:
        """See Call."""
        if not self._ended:
            self.end(error)
            self._stream.give_up(self)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Stream:
    """One GenerateMany rpc. `terms` are what it was opened with; `ended`: it takes no more calls."""

    def __init__(
        self, stub: verify_pb2_grpc.VerifyServiceAsyncStub, terms: object, not_offered: Callable[[], None]
    ) -> None:
        self.terms = terms
        self.ended = False
        self._rpc = stub.GenerateMany()  # pyright: ignore[reportCallIssue]
        self._not_offered = not_offered
        self._calls: dict[int, _StreamedCall] = {}
        self._number = 0
        self._begin: list[verify_pb2.GenerateCall] = []
        self._cancel: list[int] = []
        self._news = asyncio.Event()
        self._writer = asyncio.create_task(self._write())
        self._reader = asyncio.create_task(self._read())

    def begin(self, request: verify_pb2.GenerateRequest, timeout_s: float) -> _StreamedCall:
        """A call, which is sent off in a moment."""
        self._number += 1
        call = _StreamedCall(self, self._number, keeps=request.logprobs or request.include_trees)
        begin = verify_pb2.GenerateCall(
            call=call.number, request=request, timeout_ms=round(timeout_s * 1000),
            traceparent=metadata_value(call_metadata(), TRACEPARENT),
        )  # fmt: skip
        late = DeadlineExceeded("the call's time is over")
        call.timer = asyncio.get_running_loop().call_later(timeout_s, call.close, late)
        self._calls[call.number] = call
        self._begin.append(begin)
        self._news.set()
        return call

    def give_up(self, call: _StreamedCall) -> None:
        """Ends a call that nobody waits for."""
        if self._calls.pop(call.number, None) is None:
            return
        unsent = [begin for begin in self._begin if begin.call != call.number]
        if len(unsent) == len(self._begin):
            self._cancel.append(call.number)
        self._begin = unsent
        self._news.set()

    def retire(self) -> None:
        """Takes no more calls, and ends after those it has."""
        self.ended = True
        self._news.set()

    async def _write(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the reader tells why it ended
            while True:
                await self._news.wait()
                self._news.clear()
                while self._begin or self._cancel:
                    await self._rpc.write(self._frame())
                if self.ended and not self._calls:
                    await self._rpc.done_writing()
                    return

    def _frame(self) -> verify_pb2.GenerateManyRequest:
        """What waits to be sent, or as much of it as one message should hold."""
        frame = verify_pb2.GenerateManyRequest(cancel=self._cancel[:MAX_ENTRIES])
        del self._cancel[:MAX_ENTRIES]
        size = 0
        while self._begin and size < _FRAME_BYTES and len(frame.begin) + len(frame.cancel) < MAX_ENTRIES:
            begin = self._begin.pop(0)
            size += begin.ByteSize()
            frame.begin.append(begin)
        return frame

    async def _read(self) -> None:
        """Hands out what comes, until the stream ends; then its calls end."""
        end: Callable[[], Exception] = partial(Broken, "the connection was closed")
        heard = False
        try:
            while isinstance(frame := await self._rpc.read(), verify_pb2.GenerateManyResponse):
                heard = True
                self._hand_out(frame.outputs)
            end = partial(Broken, "the stream ended before the output")
        except grpc.aio.AioRpcError as failed:
            if failed.code() is grpc.StatusCode.UNIMPLEMENTED:
                self._not_offered()
                end = NotOffered
            elif is_lost(failed) and not heard:
                end = NotOffered
            else:  # whatever befell the stream says nothing of one call: what verify answers that comes as its end
                end = partial(broken, failed.code(), error_from_rpc(failed))
        finally:
            self.ended = True
            calls, self._calls = self._calls, {}
            for call in calls.values():
                call.end(end())
            self._writer.cancel()
            self._rpc.cancel()

    def _hand_out(self, outputs: Iterable[verify_pb2.CallOutput]) -> None:
        for output in outputs:
            call = self._calls.get(output.call)
            if call is None:
                continue  # given up
            if output.HasField("response"):
                response = output.response
                if call.keeps:  # a part of a message keeps all of it in memory, other calls' outputs too
                    response = verify_pb2.GenerateResponse.FromString(response.SerializeToString())
                call.put(response)
            if output.HasField("end"):
                failure = call.context.run(failure_of_end, output.end)
                del self._calls[output.call]  # not before: a call that is not among them is ended by nobody
                call.end(failure)
                if self.ended and not self._calls:
                    self._news.set()
