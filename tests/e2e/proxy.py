"""A bad network on demand: relays TCP connections to a target, and fails when and how it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from dataclasses import dataclass, field

_CHUNK = 65536
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends RST, and what was not sent is lost


@dataclass(eq=False)
class _Link:
    """One relayed connection."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    abandoned: bool = False
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def end(self, *, reset: bool) -> None:
        """Closes both ends, properly or not."""
        for task in self.tasks:
            task.cancel()
        for writer in (self.client, self.server):
            if reset:
                with contextlib.suppress(OSError):
                    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                writer.transport.abort()
            else:
                writer.close()


class Proxy:
    """Listens on a port of its own; all methods act at once, and new connections are relayed again after `heal`.

    target: host:port that new connections go to; may be changed.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self._server: asyncio.Server | None = None
        self._links: set[_Link] = set()
        self._asks, self._answers = asyncio.Event(), asyncio.Event()  # set: that direction flows
        self._refuses = False
        self.heal()

    @property
    def address(self) -> str:
        """Where it listens."""
        assert self._server is not None
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.reset()
        await self._server.wait_closed()

    # ---- Faults

    def hold(self) -> None:
        """Delays everything until `heal`: nothing is forwarded, nothing is lost, neither end is told."""
        self._asks.clear()
        self._answers.clear()

    def hold_answers(self) -> None:
        """Delays what comes from the target until `heal`."""
        self._answers.clear()

    def cut(self) -> None:
        """Closes all connections."""
        self._end_all(reset=False)

    def reset(self) -> None:
        """Resets all connections; what is on its way is lost."""
        self._end_all(reset=True)

    def abandon(self) -> None:
        """Leaves all connections half-open for ever: neither end hears of the other again. New ones work."""
        for link in self._links:
            link.abandoned = True
            for task in link.tasks:
                task.cancel()

    def refuse(self) -> None:
        """Resets all connections, and new ones too until `heal`."""
        self._refuses = True
        self.reset()

    def heal(self) -> None:
        """Forwards again what was held, and takes connections again. Abandoned ones are reset."""
        self._refuses = False
        for link in list(self._links):
            if link.abandoned:
                link.end(reset=True)
                self._links.discard(link)
        self._asks.set()
        self._answers.set()

    # ---- Relaying

    def _end_all(self, *, reset: bool) -> None:
        for link in self._links:
            link.end(reset=reset)
        self._links.clear()

    async def _accept(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        host, _, port = self.target.rpartition(":")
        try:
            if self._refuses:
                raise ConnectionRefusedError
            from_server, server = await asyncio.open_connection(host, int(port))
        except OSError:
            client.transport.abort()
            return
        link = _Link(client, server)
        link.tasks = [
            asyncio.create_task(self._pump(link, reader, server, self._asks)),
            asyncio.create_task(self._pump(link, from_server, client, self._answers)),
        ]
        self._links.add(link)
        if self._refuses:  # meanwhile
            self.reset()

    async def _pump(
        self, link: _Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flows: asyncio.Event
    ) -> None:
        """Forwards one direction until it ends; an end of one direction ends the other."""
        try:
            while data := await reader.read(_CHUNK):
                await flows.wait()
                writer.write(data)
                await writer.drain()
        except OSError:
            link.end(reset=True)
        else:
            link.end(reset=False)
        self._links.discard(link)
