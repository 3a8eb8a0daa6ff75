"""What uvicorn's HTTP protocol leaves open: headers without end in size or time, ambiguous framing, connections, and
clients that do not read, hang up while requests wait, or would rather speak HTTP/2.

Every refusal here has OpenAI's error shape and closes the connection.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import httptools
from starlette.types import Message, Send
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.errors import NOT_BEGUN, HttpError
from gateway.exchange import ABORT_EXTENSION, WRITE_EXTENSION
from gateway.flow import BoundedFlow, StallWatch
from gateway.http_refusals import MAX_HEADER_BYTES, fault_of_head, header_too_large, refusal
from gateway.lingering import LingeringTransport
from outrider.args.links import host_port
from outrider.strangers import tcp_peer
from outrider.telemetry import Throttle, get_logger

log = get_logger(__name__)

_PIECE_BYTES = 8 * 1024  # what the parser gets at once, and may turn into requests that wait
_lines = Throttle()


class _Refused(Exception):
    """Raised in a parser callback to stop parsing."""


class GuardedProtocol(HttpToolsProtocol):
    """One connection. `max_connections` and `header_timeout_s` are set on a subclass made by `guarded`."""

    max_connections = 2048
    header_timeout_s = 10.0
    on_connection: Callable[[str], None] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_bytes = 0
        self._in_headers = self._in_trailers = False
        self._header_timer: asyncio.TimerHandle | None = None
        self._refusal: HttpError | None = None
        self._spoke = False
        self._peer = ""  # over a Unix socket
        self._open: deque[RequestResponseCycle] = deque()  # requests whose answer is not complete, the oldest first
        self._late = bytearray()  # what came and is not in pieces yet
        self._unread: list[bytes | memoryview] = []  # pieces, the next one last
        self._piece: bytes | memoryview = b""  # which the parser has
        self._had_body = False  # the piece; how much of it is headers, nobody says
        self._asks_upgrade = False

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Refuses the connection past the limit; starts the clock for its first request."""
        super().connection_made(transport)
        self._lingering = LingeringTransport(transport, self._is_unread, self._begin_linger)
        self.transport = cast(asyncio.Transport, self._lingering)
        self.flow = self._flow = BoundedFlow(transport)
        self._stalls = StallWatch(self._waits_for_reader, transport.get_write_buffer_size, self._drop_unread)
        if self.client is not None:
            self._peer = host_port(*self.client)
            if self.on_connection is not None:
                self.on_connection(tcp_peer(*self.client))
        if len(self.connections) - LingeringTransport.num_lingering() > self.max_connections:
            message = f"The server is at its limit of {self.max_connections} connections."
            self._refuse(HttpError(503, message, headers=(NOT_BEGUN,)))
            return
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the clocks; ends what is being answered; tells of who asked for nothing, as scanners of ports do."""
        self._stop_timer()
        self._lingering.ended()
        self._stalls.stop()
        self._disconnect()
        if not self._spoke and self._refusal is None and _lines.allows():
            log.info("a connection ended without a request", peer=self._peer)
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """The server is going."""
        self._lingering.finish()
        super().shutdown()

    def data_received(self, data: bytes) -> None:
        """Reads on: also while requests wait for their turn, since a hang-up would not be noticed otherwise."""
        if self._lingering.is_lingering:
            self._lingering.dropped(len(data))
            return
        self._late += data
        self._read()

    def _read(self) -> None:
        """Gives what came to the parser until a request has to wait; counts bytes while headers are incomplete."""
        while (self._unread or self._late) and not self.pipeline and self._refusal is None:
            if not self._unread:
                self._unread.append(memoryview(self._late))
                self._late = bytearray()
            piece = self._unread.pop()
            if len(piece) > _PIECE_BYTES:
                self._unread.append(memoryview(piece)[_PIECE_BYTES:])
            self._piece, self._had_body = piece[:_PIECE_BYTES], False
            self._parse()
            if (self._in_headers or self._in_trailers) and self._refusal is None and not self._had_body:
                self._header_bytes += len(self._piece)
                if self._header_bytes > MAX_HEADER_BYTES:
                    self._refuse(header_too_large())
        self._piece = b""
        self._flow.has_enough = len(self._late) > HIGH_WATER_LIMIT
        if self._flow.has_enough:
            self._flow.pause_reading()

    def _parse(self) -> None:
        try:
            self.parser.feed_data(self._piece)
        except httptools.HttpParserUpgrade as stopped:
            self._read_again(stopped.args[0])
        except httptools.HttpParserError:  # also when one of our checks stopped it
            self._refuse(self._refusal or HttpError(400, "The HTTP request is malformed."))

    def on_message_begin(self) -> None:
        """Begins a request: its headers have a limited time.

        Nothing else ends the time that uvicorn gives a connection after an answer: not a stray line between requests,
        nor the rest of a body that was answered unread.
        """
        super().on_message_begin()
        self._unset_keepalive_if_required()
        self._spoke = self._in_headers = True
        self._in_trailers = False
        self._header_bytes = 0
        self.scope["extensions"] = {ABORT_EXTENSION: {"call": self.transport.abort}}
        if self._header_timer is None:
            self._start_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Takes a header; what comes after a body is passed over."""
        if self._in_headers:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Checks the headers before any of the application runs."""
        self._in_headers = False
        self._stop_timer()
        if self.parser.get_method() == b"CONNECT":  # after which the parser reads no requests
            self._stop_parsing(HttpError(405, "This server is no proxy.", headers=(("allow", "GET, HEAD, POST"),)))
        self._asks_upgrade = self.parser.should_upgrade()
        if self._asks_upgrade:
            return
        if (fault := fault_of_head(self.url, self.headers, self.parser.get_http_version())) is not None:
            self._stop_parsing(fault)
        if self.parser.get_http_version() == "1.0":
            self.expect_100_continue = False  # it knows no interim answers (RFC 9110, 10.1.1)
        extensions, before = self.scope.setdefault("extensions", {}), self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            self._open.append(self.cycle)
            if self.parser.get_http_version() == "1.0":
                self.cycle.send = cast(Any, partial(_send_until_close, self.cycle, cast(Send, self.cycle.send)))
            extensions[WRITE_EXTENSION] = {"call": partial(self._write_now, self.cycle)}
        if self.pipeline:
            self._flow.resume_reading()  # what uvicorn has paused

    def on_chunk_header(self) -> None:
        """Begins a chunk, or trailers: the last chunk is empty."""
        self._in_trailers = True
        self._header_bytes = 0

    def on_body(self, body: bytes) -> None:
        """Takes a part of a body."""
        self._had_body, self._in_trailers = True, False
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Ends a request, unless it is to be read again."""
        self._in_trailers = False
        if not self._asks_upgrade:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Ends an answer: the next request has its turn."""
        self._open.popleft()
        super().on_response_complete()
        if not self.transport.is_closing():
            self._read()
            if self._in_headers:  # of the next one, which have their own time
                self._unset_keepalive_if_required()
                self._stop_timer()
                self._start_timer()
            self._flow.resume_reading()

    def _read_again(self, stopped_at: int) -> None:
        """Goes on where the parser stopped before a body, for another protocol to do so.

        Clients offer HTTP/2 so (curl --http2, Java's) and take an answer in HTTP/1.1: the offer is left out, and the
        request read again.
        """
        head = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        head += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
        # A view of the rest: of many requests that came together, each may be such an offer.
        rest = memoryview(self._piece)[stopped_at:]
        self._unread += [rest] * bool(rest) + [b"\r\n".join([*head, b"", b""])]

    def _write_now(self, cycle: RequestResponseCycle, body: bytes) -> bool:
        """Sends a part of a body as uvicorn would, unless that takes waiting: a stream's every token goes this way."""
        if self.flow.write_paused or cycle.disconnected or cycle.response_complete or not cycle.chunked_encoding:
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    def _stop_parsing(self, error: HttpError) -> None:
        self._refusal = error
        raise _Refused

    def _refuse(self, error: HttpError) -> None:
        self._refusal = error
        self._stop_timer()
        request_id = uuid.uuid4().hex
        if _lines.allows():
            log.warning(
                "refused a connection", peer=self._peer, status=error.http_status, reason=error.message,
                request_id=request_id,
            )  # fmt: skip
        if not any(cycle.response_started for cycle in self._open):  # else it would stand within an answer
            self.transport.write(refusal(error, request_id))
        self.transport.close()

    def _disconnect(self) -> None:
        for cycle in self._open:  # uvicorn tells the newest alone, which may not have begun
            cycle.disconnected = True
            cycle.message_event.set()

    def _is_unread(self) -> bool:
        """Whether the peer was answered, and refused, before it had said all."""
        if self._refusal is not None:
            return not any(cycle.response_started for cycle in self._open)
        return any(cycle.response_complete and cycle.more_body for cycle in self._open)

    def _begin_linger(self) -> None:
        """Reads on, to drop what comes; what the connection asked for besides ends."""
        self._disconnect()
        self._late, self._unread = bytearray(), []
        self._flow.has_enough = False
        self._flow.resume_reading()

    # ---- The clocks

    def resume_writing(self) -> None:
        """Writes on: the peer has read."""
        self._stalls.has_read()
        super().resume_writing()

    def _waits_for_reader(self) -> bool:
        return self._flow.write_paused or self.transport.is_closing()

    def _drop_unread(self, num_unsent: int) -> None:
        if _lines.allows():
            log.info("dropped a connection whose client does not read", peer=self._peer, unsent_bytes=num_unsent)
        self.transport.abort()

    def _start_timer(self) -> None:
        self._header_timer = self.loop.call_later(self.header_timeout_s, self._timed_out)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _timed_out(self) -> None:
        self._header_timer = None
        if self.transport.is_closing():
            return
        if self._open or self.flow.read_paused:  # an earlier one is still answered, or we read no further ourselves
            self._start_timer()
        elif self._in_headers:
            self._refuse(HttpError(408, f"The headers did not arrive within {self.header_timeout_s:g} s."))
        else:
            self.transport.close()  # connected and said nothing


def guarded(
    *, max_connections: int, header_timeout_s: float, on_connection: Callable[[str], None] | None
) -> type[GuardedProtocol]:
    """The protocol class with these limits, for uvicorn's `http` setting.

    on_connection: is told the peer of each TCP connection, over TLS once that is agreed on.
    """
    told = None if on_connection is None else staticmethod(on_connection)
    limits = {"max_connections": max_connections, "header_timeout_s": header_timeout_s, "on_connection": told}
    return type("LimitedProtocol", (GuardedProtocol,), limits)


async def _send_until_close(cycle: RequestResponseCycle, send: Send, message: Message) -> None:
    """Sends to HTTP/1.0, which knows no chunks (RFC 9112, 6.1): a body of unknown length ends with its connection."""
    if message["type"] == "http.response.start":
        if all(name.lower() != b"content-length" for name, _ in message["headers"]):
            cycle.chunked_encoding = False
    elif cycle.chunked_encoding is False and cycle.expected_content_length == 0:
        cycle.expected_content_length = len(message.get("body", b""))
    await send(message)
