"""One HTTP exchange while its answer is made: server-sent events with a bounded buffer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.errors import SHUTTING_DOWN, failure
from outrider.errors import OutriderError, Unavailable
from outrider.stopping import cancelled
from outrider.telemetry import get_logger

log = get_logger(__name__)

SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
PING = b": ping\n\n"
PING_INTERVAL_S = 15.0
STALL_LIMIT_S = 60.0
LAST_WORDS_S = 0.5
GONE = "gone"  # in an exchange's state: its client hung up, which is why its task is cancelled
DROPPED = "dropped"  # in an exchange's state: it was we who hung up
_BURST = 4  # events that may come at once however large they are: the last ones of a Response hold all of it each
# Our HTTP server's ways to drop a connection that no longer reads, and to send a part of a body if that takes no
# waiting: (bytes) -> whether it was sent.
ABORT_EXTENSION = "outrider.abort"
WRITE_EXTENSION = "outrider.write"


def request_id(request: Request) -> str:
    """The exchange's name, as in its x-request-id header."""
    return request.scope["state"]["request_id"]


def json_response(value: object) -> Response:
    """`value` as a JSON body."""
    return Response(msgspec.json.encode(value), media_type="application/json")


def event_stream(request: Request, events: AsyncGenerator[bytes]) -> EventStream:
    """A stream of server-sent events with the buffer that the gateway allows."""
    return EventStream(events, buffer_bytes=request.app.state.gateway.args.stream_buffer_bytes)


class ClientGone(Exception):
    """The client hung up before its answer was complete; nobody is left to tell."""


class SlowReader(ClientGone):
    """The client reads so slowly that more waits for it than the server keeps."""


class EventStream:
    """A response of server-sent events: an ASGI application.

    The status waits for the first event or comment, so that a failure before it is a plain HTTP error; a later one is
    an error event, after which the stream ends without [DONE]. Events that the socket does not take at once wait in a
    buffer of at most `buffer_bytes`, or of four of the largest: whoever makes them never waits for it. A comment keeps
    a silent connection alive.
    """

    def __init__(self, events: AsyncGenerator[bytes], *, buffer_bytes: int) -> None:
        self._events = events
        self._buffer_bytes = buffer_bytes
        self._waiting: list[bytes] = []
        self._size = 0
        self._error: Exception | None = None
        self._ended = False
        self._largest = 0  # of the events that had to wait
        self._started = False
        self._sending = False
        self._write_now: Callable[[bytes], bool] = _never
        self._state: dict[str, Any] = {}
        self._num_sent = 0  # times that something went to the socket
        self._wake = asyncio.Event()
        self._overflow = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the stream. Raises an error that came before the first event, SlowReader when the client reads too
        slowly; whoever sees it leave cancels this."""
        extensions = scope.get("extensions", {})
        self._state = scope.setdefault("state", {})
        if WRITE_EXTENSION in extensions:
            self._write_now = extensions[WRITE_EXTENSION]["call"]
        pump = asyncio.create_task(self._pump())
        writer = asyncio.create_task(self._write(send))
        overflow = asyncio.create_task(self._overflow.wait())
        clock = asyncio.create_task(self._keep_time())
        try:
            await asyncio.wait((writer, overflow), return_when=asyncio.FIRST_COMPLETED)
            if not writer.done():
                raise SlowReader
            writer.result()
        except asyncio.CancelledError:  # the server's grace is over, or the client gone
            await cancelled(pump, writer)
            if self._started and GONE not in self._state:
                self._error = Unavailable(SHUTTING_DOWN)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LAST_WORDS_S):
                        await send({"type": "http.response.body", "body": self._last_words(), "more_body": False})
            raise
        except SlowReader:
            if ABORT_EXTENSION in extensions:
                self._state[DROPPED] = True
                extensions[ABORT_EXTENSION]["call"]()
            raise
        finally:
            try:
                await cancelled(pump, writer, overflow, clock)
            finally:
                await self._events.aclose()

    async def _pump(self) -> None:
        """Moves events to the socket, or to the buffer when it is not free."""
        try:
            async for event in self._events:
                if not event:
                    continue
                if self._started and not self._waiting and not self._sending and self._write_now(event):
                    self._num_sent += 1
                    continue
                self._waiting.append(event)
                self._size += len(event)
                self._largest = max(self._largest, len(event))
                if self._size > max(self._buffer_bytes, _BURST * self._largest):
                    self._overflow.set()
                    return
                self._wake.set()
        except Exception as error:
            self._error = error
        self._ended = True
        self._wake.set()

    async def _write(self, send: Send) -> None:
        """Moves events from the buffer to the socket, which may hold it up."""
        while True:
            chunk = await self._take()
            if not self._started:
                if self._error is not None and not chunk:
                    raise self._error
                await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
                self._started = True
            if not chunk:
                break
            await self._send_body(send, chunk, more=True)
        await self._send_body(send, self._last_words(), more=False)

    async def _take(self) -> bytes:
        """What waits to be sent; a comment when nothing has come for a while, nothing at the end."""
        if not self._waiting and not self._ended:
            await self._wake.wait()
        self._wake.clear()
        chunk = b"".join(self._waiting)
        self._waiting.clear()
        self._size = 0
        return chunk or (b"" if self._ended else PING)

    async def _send_body(self, send: Send, body: bytes, *, more: bool) -> None:
        self._sending = True
        await send({"type": "http.response.body", "body": body, "more_body": more})
        self._sending = False
        self._num_sent += 1

    async def _keep_time(self) -> None:
        """Has a comment sent when nothing has come for a while; ends the stream when the socket takes nothing.

        One clock beside the stream: a timeout for each event would cost more than the event.
        """
        while not self._overflow.is_set():
            num_sent, sending = self._num_sent, self._sending
            await asyncio.sleep(STALL_LIMIT_S if sending else PING_INTERVAL_S)
            if self._num_sent != num_sent:
                continue
            if sending:
                self._overflow.set()
            elif not self._sending:
                self._wake.set()

    def _last_words(self) -> bytes:
        if self._error is None:
            return b""
        self._state["finish_reason"] = "error"  # the status, which has been sent, says nothing of it
        log.warning("a stream ended in an error", error=type(self._error).__name__, exc_info=_unexpected(self._error))
        return b"data: " + failure(self._error).body + b"\n\n"


def _never(event: bytes) -> bool:
    return False


def _unexpected(error: Exception) -> Exception | None:
    """The exception for the log, when it is a fault of ours."""
    return None if isinstance(error, OutriderError) else error
