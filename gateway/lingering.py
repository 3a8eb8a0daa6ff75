"""Connections that are closed before all was read that their peers send.

The kernel resets one whose socket holds unread bytes, and takes from the peer the answer that it has not yet read, or
whatever it was about to read after a write that failed. So the answer is followed by the end of our side alone, and
what still comes is dropped, for a while (RFC 9112, 9.6).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

LINGER_S = 5.0
LINGER_BYTES = 64 * 2**20
MOST_LINGERING = 32  # of a process; further ones are closed at once


class LingeringTransport:
    """A connection's transport, whose `close` lingers where `is_unread` says that its peer may be sending.

    on_linger: is called when that begins. Whoever has the connection tells of what comes (`dropped`) and of its end.
    """

    _num_lingering = 0

    def __init__(
        self, transport: asyncio.Transport, is_unread: Callable[[], bool], on_linger: Callable[[], object]
    ) -> None:  # fmt: skip
        self._transport = transport
        self._is_unread = is_unread
        self._on_linger = on_linger
        self._timer: asyncio.TimerHandle | None = None
        self._num_dropped = 0
        self._is_over = False
        self.write: Callable[[bytes], object] = transport.write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    @classmethod
    def num_lingering(cls) -> int:
        """How many of the process do."""
        return cls._num_lingering

    @property
    def is_lingering(self) -> bool:
        """Whether what comes is to be dropped."""
        return self._timer is not None

    def is_closing(self) -> bool:
        """Whether nothing is written any more."""
        return self._timer is not None or self._transport.is_closing()

    def close(self) -> None:
        """Closes the connection once all is written, and read where need be."""
        if self.is_closing():
            return
        if self._is_over or not self._is_unread() or LingeringTransport._num_lingering >= MOST_LINGERING:
            self._transport.close()
            return
        LingeringTransport._num_lingering += 1
        self._timer = asyncio.get_running_loop().call_later(LINGER_S, self._transport.close)
        self.write = _write_nothing
        if self._transport.can_write_eof():  # TLS cannot; its peer goes by the answer's length
            self._transport.write_eof()
        self._on_linger()

    def finish(self) -> None:
        """The server is going: nothing lingers any more."""
        self._is_over = True
        if self._timer is not None:
            self._transport.close()

    def dropped(self, num_bytes: int) -> None:
        """Counts what came while lingering."""
        self._num_dropped += num_bytes
        if self._num_dropped > LINGER_BYTES:
            self._transport.close()

    def ended(self) -> None:
        """The connection is gone."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            LingeringTransport._num_lingering -= 1


def _write_nothing(_: bytes) -> None:
    return None
