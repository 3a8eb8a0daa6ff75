"""GET /metrics over a socket of its own, for processes that speak no HTTP otherwise.

It answers that one path, to a bounded number of connections, each within a bounded time; it knows no TLS and asks for
no token, since what it tells names nobody: keep it on loopback or a private network.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from prometheus_client import CollectorRegistry

from outrider.args.links import host_port
from outrider.errors import StartupError
from outrider.metrics import CONTENT_TYPE, text
from outrider.serving import tcp_listener
from outrider.telemetry import Throttle, get_logger

log = get_logger(__name__)

TIMEOUT_S = 5.0  # for a whole exchange
MAX_HEADER_BYTES = 8 * 1024
MAX_CONNECTIONS = 32


@contextlib.asynccontextmanager
async def serve_metrics(
    registry: CollectorRegistry, host: str, port: int | None, *, timeout_s: float = TIMEOUT_S
) -> AsyncGenerator[str | None]:
    """Serves while the context lasts; gives the address, or None where `port` is None. Port 0 takes a free one.

    Raises StartupError when it cannot listen.
    """
    if port is None:
        yield None
        return
    door = _Door(registry, timeout_s)
    try:
        server = await asyncio.start_server(door.answer, sock=tcp_listener(host, port), limit=MAX_HEADER_BYTES)
    except (OSError, UnicodeError) as error:  # UnicodeError: no name that a host can have
        raise StartupError(f"cannot listen on --metrics-host {host}, --metrics-port {port}: {error}") from error
    bound = server.sockets[0].getsockname()
    try:
        yield f"http://{host_port(host, bound[1])}/metrics"
    finally:
        server.close()
        door.close()


class _Door:
    """All connections of one listener."""

    def __init__(self, registry: CollectorRegistry, timeout_s: float) -> None:
        self._registry = registry
        self._timeout_s = timeout_s
        self._open: set[asyncio.StreamWriter] = set()
        self._throttle = Throttle()

    def close(self) -> None:
        """Ends the connections that are still open."""
        for writer in list(self._open):
            writer.transport.abort()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection: one request, one answer."""
        self._open.add(writer)
        host, port, *_ = writer.get_extra_info("peername") or ("", 0)  # it may be gone already
        peer = host_port(host, port)
        try:
            if len(self._open) > MAX_CONNECTIONS:
                self._tell("too many connections for metrics", peer, f"{MAX_CONNECTIONS} are open")
                return
            async with asyncio.timeout(self._timeout_s):
                head = await reader.readuntil(b"\r\n\r\n")
                status, kind, body = await self._response(head)
                writer.write(
                    f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
                    "Connection: close\r\n\r\n".encode()
                    + (b"" if head.startswith(b"HEAD ") else body)
                )
                await writer.drain()
        except TimeoutError:
            self._tell("metrics: no whole request in time", peer, f"{self._timeout_s} s are over")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            self._tell("metrics: no whole request", peer, str(error))
        except OSError as error:
            self._tell("metrics: the connection broke", peer, str(error))
        finally:
            self._open.discard(writer)
            writer.close()

    def _tell(self, event: str, peer: str, reason: str) -> None:
        if self._throttle.allows():
            log.warning(event, peer=peer, reason=reason, lines_left_out=self._throttle.suppressed)

    async def _response(self, head: bytes) -> tuple[str, str, bytes]:
        """Status, content type and body."""
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if path != b"/metrics":
            return "404 Not Found", "text/plain", b"There is /metrics.\n"
        if method not in (b"GET", b"HEAD"):
            return "405 Method Not Allowed", "text/plain", b"GET it.\n"
        return "200 OK", CONTENT_TYPE, await asyncio.to_thread(text, self._registry)
