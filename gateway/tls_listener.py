"""Listens for HTTPS, and counts connections from their beginning, not from where TLS is agreed on.

asyncio tells a protocol of a connection once TLS is agreed on. Silent ones, of which nobody hears, could take all
descriptors for the minute that they have: where there are too many, the oldest makes room for the new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Sized
from functools import partial
from typing import Any, cast

import uvicorn

from gateway.http_guard import GuardedProtocol
from outrider.telemetry import Throttle, get_logger

log = get_logger(__name__)

_MORE = 16  # connections past the limit that may agree on TLS, to be told of the limit
_RETRY_S = 1.0


class TlsListener:
    """Makes a protocol for each connection to a socket. connections: those whose TLS is agreed on."""

    def __init__(
        self, listener: socket.socket, context: ssl.SSLContext, make: Callable[[], asyncio.Protocol],
        connections: Sized, max_connections: int,
    ) -> None:  # fmt: skip
        self._listener, self._context, self._make = listener, context, make
        self._connections, self._max_connections = connections, max_connections
        self._agreeing: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._loop = asyncio.get_running_loop()
        self._retry: asyncio.TimerHandle | None = None
        self._throttle = Throttle()
        listener.setblocking(False)
        self._listen()

    def close(self) -> None:
        """Takes no more connections; those whose TLS is agreed on go on."""
        for task in self._agreeing:
            task.cancel()
        self._loop.remove_reader(self._listener)
        if self._retry is not None:
            self._retry.cancel()

    async def wait_closed(self) -> None:
        """Returns when nobody agrees on TLS any more; uvicorn waits for what is asked over connections."""
        await asyncio.gather(*self._agreeing, return_exceptions=True)

    def _listen(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:  # no descriptor for it, or no memory: it stays in the queue
            if self._throttle.allows():
                log.warning("connections cannot be taken", reason=str(error))
            self._loop.remove_reader(self._listener)
            self._retry = self._loop.call_later(_RETRY_S, self._listen)
            return
        connection.setblocking(False)
        task = self._loop.create_task(self._agree(connection))
        self._agreeing[task] = None
        task.add_done_callback(lambda _: self._agreeing.pop(task, None))
        if len(self._agreeing) > max(self._max_connections - len(self._connections), _MORE):
            oldest = next(iter(self._agreeing))
            del self._agreeing[oldest]
            oldest.cancel()

    async def _agree(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # of peers that speak no TLS, are refused, or leave
            await self._loop.connect_accepted_socket(self._make, connection, ssl=self._context)


class Server(uvicorn.Server):
    """uvicorn's server, which listens for HTTPS in our way."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to serve on `sockets`."""
        if self.config.ssl is None or sockets is None:
            await super().startup(sockets)
            return
        await super().startup([])
        kind = cast(type[GuardedProtocol], self.config.http_protocol_class)
        state = self.server_state
        make = partial(kind, config=self.config, server_state=state, app_state=self.lifespan.state)
        for listener in sockets:
            ours = TlsListener(listener, self.config.ssl, make, state.connections, kind.max_connections)
            self.servers.append(cast(Any, ours))
