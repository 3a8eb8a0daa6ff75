"""gRPC without sockets: calls to a servicer in the same process and event loop, over channels like any other.

Messages are handed over as they are, neither copied nor written as bytes: whoever has sent one must not change it. A
few of them wait on each side, then the sender does, as with a socket. Metadata is empty, and nobody is asked for a
token: who is in this process has everything already.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, NoReturn

import grpc
import grpc.aio

from outrider.rpc import kind_of
from outrider.statuses import DETAILS_KEY, details_of, told_error
from outrider.stopping import cancelled

_MAX_WAITING = 16  # messages of one direction
_EOF: Any = grpc.aio.EOF  # pyright: ignore[reportAttributeAccessIssue]
_NOTHING = grpc.aio.Metadata()


class InMemoryServer:
    """What generated code registers a servicer with, and where channels to it come from."""

    def __init__(self) -> None:
        self._handlers: dict[str, grpc.RpcMethodHandler] = {}

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler]) -> None:
        """Called by add_XServicer_to_server."""
        self._handlers.update({f"/{service}/{name}": handler for name, handler in handlers.items()})

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """Called by add_XServicer_to_server, with the same methods again."""

    def dial(self, address: str) -> InMemoryChannel:
        """A channel to the servicer, whatever its address; see outrider.dialing.Dial."""
        return InMemoryChannel(self._handlers)


class InMemoryChannel(grpc.aio.Channel):
    """Calls of one caller. Closing it ends them."""

    def __init__(self, handlers: Mapping[str, grpc.RpcMethodHandler]) -> None:
        self._handlers = handlers
        self._calls: set[_Call] = set()

    async def __aenter__(self) -> InMemoryChannel:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """Ends all calls, those that end by themselves within `grace` seconds in good order."""
        if self._calls and grace:
            await asyncio.wait([call.task for call in self._calls], timeout=grace)
        await cancelled(*[call.task for call in self._calls])

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Always ready."""
        return grpc.ChannelConnectivity.READY

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Never returns: it stays ready."""
        await asyncio.get_running_loop().create_future()

    async def channel_ready(self) -> None:
        """Returns at once: there is nothing to connect."""

    def unary_unary(self, method: str, *_: Any, **__: Any) -> Any:
        """A method with one answer: awaitable."""
        return lambda request, **call: self._open(method, request, **call)

    def unary_stream(self, method: str, *_: Any, **__: Any) -> Any:
        """A method with many answers."""
        return lambda request, **call: self._open(method, request, **call)

    def stream_unary(self, method: str, *_: Any, **__: Any) -> Any:
        """A method that is told many things and answers once: awaitable."""
        return lambda requests=None, **call: self._open(method, requests=requests, **call)

    def stream_stream(self, method: str, *_: Any, **__: Any) -> Any:
        """A method that is told many things and answers with many."""
        return lambda requests=None, **call: self._open(method, requests=requests, **call)

    def _open(
        self, method: str, request: Any = None, *, requests: AsyncIterator[Any] | None = None,
        timeout: float | None = None, metadata: Any = None, **_: Any,
    ) -> _Call:  # fmt: skip
        call = _Call(method, self._handlers.get(method), request, requests, timeout, tuple(metadata or ()))
        self._calls.add(call)
        call.task.add_done_callback(lambda _: self._calls.discard(call))
        return call


class _Pipe:
    """Messages of one direction, bounded. An asyncio.Queue that can end."""

    def __init__(self) -> None:
        self._waiting: deque[Any] = deque()
        self._ended = False
        self._news, self._room = asyncio.Event(), asyncio.Event()

    @property
    def ended(self) -> bool:
        return self._ended

    async def put(self, message: Any) -> None:
        """Waits for room. InvalidStateError once the pipe has ended, as gRPC's calls raise it."""
        while len(self._waiting) >= _MAX_WAITING and not self._ended:
            self._room.clear()
            await self._room.wait()
        if self._ended:
            raise asyncio.InvalidStateError("the stream has ended")
        self._waiting.append(message)
        self._news.set()

    async def get(self) -> Any:
        """The next message; grpc's EOF after the last."""
        while not self._waiting:
            if self._ended:
                return _EOF
            self._news.clear()
            await self._news.wait()
        self._room.set()
        return self._waiting.popleft()

    def end(self) -> None:
        """Ends the pipe: nothing is put any more."""
        self._ended = True
        self._news.set()
        self._room.set()

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (message := await self.get()) is not _EOF:
            yield message


class _Aborted(Exception):
    """A handler has ended its call with a status."""


class _Context:
    """What a handler is given beside the request."""

    def __init__(self, method: str, metadata: tuple[Any, ...], answers: _Pipe) -> None:
        self.method = method
        self.write = answers.put
        self._metadata = metadata
        self.code = grpc.StatusCode.OK
        self.message = ""
        self.details = b""

    def invocation_metadata(self) -> tuple[Any, ...]:
        return self._metadata

    def peer(self) -> str:
        return "in-memory"

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> NoReturn:
        self.code, self.message = code, details
        raise _Aborted(details)

    def fail(self, error: Exception) -> None:
        """Ends the call with an error's status."""
        told = told_error(error, self.method)
        self.code, self.message, self.details = told.status, told.message, details_of(told)


class _Call:
    """Both ends of one call: the handler runs in `task`, the caller has the methods of gRPC's call objects."""

    def __init__(
        self, method: str, handler: grpc.RpcMethodHandler | None, request: Any, requests: AsyncIterator[Any] | None,
        timeout_s: float | None, metadata: tuple[Any, ...],
    ) -> None:  # fmt: skip
        self._asked, self._answers = _Pipe(), _Pipe()
        self._context = _Context(method, metadata, self._answers)
        self._sender = asyncio.create_task(self._send(requests)) if requests is not None else None
        self.task = asyncio.create_task(self._run(handler, request, timeout_s))
        self.task.add_done_callback(self._ended)

    # ---- The handler's end

    async def _run(self, handler: grpc.RpcMethodHandler | None, request: Any, timeout_s: float | None) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._serve(handler, request)
        except _Aborted:
            return
        except Exception as error:
            self._context.fail(error)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():  # perhaps before its first step
            self._context.code, self._context.message = grpc.StatusCode.CANCELLED, "the call was cancelled"
        if self._sender is not None:
            self._sender.cancel()
        self._asked.end()
        self._answers.end()

    async def _serve(self, handler: grpc.RpcMethodHandler | None, request: Any) -> None:
        if handler is None:
            await self._context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        told = self._asked if handler.request_streaming else request
        behaviour = getattr(handler, kind_of(handler))
        if not handler.response_streaming:
            await self._answers.put(await behaviour(told, self._context))
            return
        if inspect.iscoroutinefunction(behaviour):
            await behaviour(told, self._context)
            return
        async with contextlib.aclosing(behaviour(told, self._context)) as answers:
            async for answer in answers:
                await self._answers.put(answer)

    async def _send(self, requests: AsyncIterator[Any]) -> None:
        with contextlib.suppress(asyncio.InvalidStateError):
            async for request in requests:
                await self._asked.put(request)
            self._asked.end()

    # ---- The caller's end

    async def write(self, request: Any) -> None:
        """Tells the handler one thing more. InvalidStateError once the call has ended."""
        await self._asked.put(request)

    async def done_writing(self) -> None:
        """Tells the handler nothing more."""
        self._asked.end()

    async def read(self) -> Any:
        """The next answer; grpc's EOF after the last. AioRpcError when the call ended with a status."""
        answer = await self._answers.get()
        if answer is _EOF:
            self._check()
        return answer

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (answer := await self.read()) is not _EOF:
            yield answer

    def __await__(self) -> Any:
        """The one answer of a method that has one."""
        return self.read().__await__()

    def cancel(self) -> bool:
        """Ends the call; False when it has ended."""
        return self.task.cancel()

    async def code(self) -> grpc.StatusCode:
        """The status, once the call has ended."""
        await asyncio.wait([self.task])
        return self._context.code

    async def details(self) -> str:
        """The status in words, once the call has ended."""
        await asyncio.wait([self.task])
        return self._context.message

    def _check(self) -> None:
        context = self._context
        if context.code is not grpc.StatusCode.OK:
            trailing = ((DETAILS_KEY, context.details),) if context.details else ()
            raise grpc.aio.AioRpcError(context.code, _NOTHING, grpc.aio.Metadata(*trailing), context.message, None)
