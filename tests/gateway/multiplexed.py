"""GenerateMany over a handler of Generate: each call in a task of its own, their responses on one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, NoReturn

import grpc

from outrider.statuses import details_of, told_error
from outrider.v1 import verify_pb2

Generate = Callable[[verify_pb2.GenerateRequest, Any], AsyncGenerator[verify_pb2.GenerateResponse]]


class Aborted(Exception):
    """A handler ended its call."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class CallContext:
    """What a handler asks of gRPC, for one call of many."""

    async def abort(self, code: grpc.StatusCode, message: str) -> NoReturn:
        """Ends the call."""
        raise Aborted(code, message)


async def multiplexed(
    generate: Generate, requests: AsyncIterator[verify_pb2.GenerateManyRequest]
) -> AsyncGenerator[verify_pb2.GenerateManyResponse]:
    """The stream's frames, one output in each."""
    outputs: asyncio.Queue[verify_pb2.CallOutput | None] = asyncio.Queue(64)
    calls: dict[int, asyncio.Task[None]] = {}

    async def serve(begin: verify_pb2.GenerateCall) -> None:
        end = verify_pb2.CallEnd()
        try:
            async for response in generate(begin.request, CallContext()):
                await outputs.put(verify_pb2.CallOutput(call=begin.call, response=response))
        except Aborted as aborted:
            end = verify_pb2.CallEnd(code=aborted.code.value[0], message=str(aborted))
        except Exception as error:
            told = told_error(error, "GenerateMany")
            end = verify_pb2.CallEnd(code=told.status.value[0], message=told.message, details=details_of(told))
        await outputs.put(verify_pb2.CallOutput(call=begin.call, end=end))

    async def read() -> None:
        async for request in requests:
            for begin in request.begin:
                calls[begin.call] = asyncio.create_task(serve(begin))
            for number in request.cancel:
                calls[number].cancel()
        await asyncio.gather(*calls.values(), return_exceptions=True)
        await outputs.put(None)

    reader = asyncio.create_task(read())
    try:
        while (output := await outputs.get()) is not None:
            yield verify_pb2.GenerateManyResponse(outputs=[output])
    finally:
        for task in (reader, *calls.values()):
            task.cancel()
        await asyncio.gather(reader, *calls.values(), return_exceptions=True)
