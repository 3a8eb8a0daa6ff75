"""Streams of events against sockets that stall, clients that leave, and answers that fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from gateway import exchange
from gateway.exchange import ABORT_EXTENSION, GONE, PING, EventStream, SlowReader
from outrider.errors import Unavailable


class Client:
    """An ASGI server's side: keeps what is sent, or stalls."""

    def __init__(self, *, stall_after: int | None = None) -> None:
        self.sent: list[dict[str, Any]] = []
        self.state: dict[str, Any] = {}
        self.aborted = False
        self._stall_after = stall_after

    async def receive(self) -> dict[str, Any]:
        """Nothing more."""
        await asyncio.Event().wait()
        raise AssertionError

    async def send(self, message: Any) -> None:
        """Takes a message, or never does."""
        if self._stall_after is not None and len(self.sent) >= self._stall_after:
            await asyncio.Event().wait()
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        """What came of the body."""
        return b"".join(message.get("body", b"") for message in self.sent)

    def abort(self) -> None:
        """The server drops the connection."""
        self.aborted = True

    async def get(self, events: AsyncGenerator[bytes], *, buffer_bytes: int = 1000) -> None:
        """Runs a stream to its end."""
        scope = {"type": "http", "state": self.state, "extensions": {ABORT_EXTENSION: {"call": self.abort}}}
        await EventStream(events, buffer_bytes=buffer_bytes)(scope, self.receive, self.send)


class Source:
    """Events, and whether whoever makes them was told to stop."""

    def __init__(self, *events: bytes, error: Exception | None = None, hang: bool = False) -> None:
        self._events, self._error, self._hang = events, error, hang
        self.closed = asyncio.Event()

    async def events(self) -> AsyncGenerator[bytes]:
        """The events, then an error, or nothing for ever."""
        try:
            for event in self._events:
                yield event
            if self._error is not None:
                raise self._error
            if self._hang:
                await asyncio.Event().wait()
        finally:
            self.closed.set()


@pytest.mark.asyncio
async def test_a_whole_stream() -> None:
    client = Client()
    await client.get(Source(b"one", b"", b"two").events())
    assert client.body == b"onetwo"
    assert client.sent[0]["status"] == 200
    assert [message.get("more_body") for message in client.sent[1:]][-1] is False


@pytest.mark.asyncio
async def test_an_error_before_the_first_event_is_not_begun() -> None:
    client = Client()
    with pytest.raises(Unavailable):
        await client.get(Source(error=Unavailable("no")).events())
    assert client.sent == []


@pytest.mark.asyncio
@pytest.mark.parametrize(("error", "code"), [(Unavailable("no"), b"service_unavailable"), (KeyError("x"), b"internal")])
async def test_an_error_later_is_the_last_event(error: Exception, code: bytes) -> None:
    client = Client()
    await client.get(Source(b"one", error=error).events())
    assert client.body.startswith(b'onedata: {"error":')
    assert code in client.body
    assert client.sent[-1]["more_body"] is False


@pytest.mark.asyncio
async def test_overflow_drops_the_connection() -> None:
    client, source = Client(stall_after=1), Source(*[b"x" * 100] * 20)
    with pytest.raises(SlowReader):
        await client.get(source.events())
    assert client.aborted
    assert source.closed.is_set()


@pytest.mark.asyncio
async def test_events_larger_than_the_buffer_reach_who_reads_them() -> None:
    events = [*[b"a" * 4000] * 3, b"b" * 5000, b"c"]
    client = Client()
    await client.get(Source(*events).events())
    assert client.body == b"".join(events)
    assert not client.aborted


@pytest.mark.asyncio
async def test_a_socket_that_takes_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "STALL_LIMIT_S", 0.01)
    client, source = Client(stall_after=1), Source(b"one", hang=True)
    with pytest.raises(SlowReader):
        await client.get(source.events())
    assert client.aborted
    assert source.closed.is_set()


@pytest.mark.asyncio
async def test_silence_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comments come while there is nothing to say, before the first event too; a later error is an event then."""
    monkeypatch.setattr(exchange, "PING_INTERVAL_S", 0.001)
    client, said = Client(), asyncio.Event()

    async def events() -> AsyncGenerator[bytes]:
        await said.wait()
        yield b"one"
        raise Unavailable("no")

    stream = asyncio.create_task(client.get(events()))
    while client.body.count(PING) < 3:  # noqa: ASYNC110
        await asyncio.sleep(0)
    said.set()
    await stream
    assert client.body.replace(PING, b"").startswith(b'onedata: {"error":')


@pytest.mark.asyncio
@pytest.mark.parametrize("gone", [True, False])
async def test_cancelled_by_the_server(gone: bool) -> None:
    """Since its grace is over, of which the client hears, or since the client is gone."""
    client, source = Client(), Source(b"one", hang=True)
    client.state = {GONE: True} if gone else {}
    stream = asyncio.create_task(client.get(source.events()))
    while client.body != b"one":  # noqa: ASYNC110
        await asyncio.sleep(0)
    stream.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stream
    assert (b"service_unavailable" in client.body) is not gone
    assert source.closed.is_set()
