"""A peer with just enough HTTP/2 (RFC 9113) to tell every call that it leaves without having looked at it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEADERS, _SETTINGS, _PING, _GOAWAY = 0x1, 0x4, 0x6, 0x7
_ACK = 0x1
_NOTHING_TAKEN = bytes(8)  # the last stream that was looked at, and no error


class LeavingPeer:
    """The leaving peer. `calls`: how many streams each connection opened."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self._serving: list[asyncio.Task[None]] = []

    def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves a new connection."""
        self.calls.append(0)
        self._serving.append(asyncio.create_task(self._serve(len(self.calls) - 1, reader, writer)))

    async def end(self) -> None:
        """Ends all connections."""
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readexactly(len(_PREFACE))
            writer.write(_frame(_SETTINGS))
            while True:
                head = await reader.readexactly(9)
                kind, flags = head[3], head[4]
                payload = await reader.readexactly(int.from_bytes(head[:3]))
                if kind in (_SETTINGS, _PING) and not flags & _ACK:
                    writer.write(_frame(kind, _ACK, payload if kind == _PING else b""))
                if kind == _HEADERS:
                    self.calls[number] += 1
                    writer.write(_frame(_GOAWAY, payload=_NOTHING_TAKEN))


def _frame(kind: int, flags: int = 0, payload: bytes = b"") -> bytes:
    """A frame about the connection as a whole."""
    return len(payload).to_bytes(3) + bytes([kind, flags]) + bytes(4) + payload


@asynccontextmanager
async def leaving_peer(path: str) -> AsyncIterator[LeavingPeer]:
    """A leaving peer that listens on a Unix socket."""
    peer = LeavingPeer()
    server = await asyncio.start_unix_server(peer.take, path)
    try:
        yield peer
    finally:
        server.close()
        await peer.end()
