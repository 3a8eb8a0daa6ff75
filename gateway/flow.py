"""How fast a connection is read, and how long its peer may leave what was sent unread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from uvicorn.protocols.http.flow_control import FlowControl

from gateway.exchange import STALL_LIMIT_S


class BoundedFlow(FlowControl):
    """Reads no further while enough waits to be read, whoever asks for more."""

    has_enough = False

    def resume_reading(self) -> None:
        """Reads on, unless there is enough."""
        if not self.has_enough:
            super().resume_reading()


class StallWatch:
    """Looks now and then whether a peer reads while it is waited for: to write on, or to be closed.

    waits: whether it is; num_unsent: the bytes that it has not taken yet; on_stall: is called, once, with them when it
    took none for STALL_LIMIT_S.
    """

    def __init__(
        self, waits: Callable[[], bool], num_unsent: Callable[[], int], on_stall: Callable[[int], object]
    ) -> None:
        self._waits = waits
        self._num_unsent = num_unsent
        self._on_stall = on_stall
        self._unsent = 0  # when that was looked at last
        self._look()

    def has_read(self) -> None:
        """Notes that the peer has read."""
        self._unsent = 0

    def stop(self) -> None:
        """Looks no more."""
        self._timer.cancel()

    def _look(self) -> None:
        unsent = self._num_unsent() if self._waits() else 0
        if 0 < self._unsent <= unsent:
            self._on_stall(unsent)
            return
        self._unsent = unsent
        self._timer = asyncio.get_running_loop().call_later(STALL_LIMIT_S, self._look)
