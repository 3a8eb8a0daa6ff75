"""Staying awake for a frame that answers one that was sent.

A core that sleeps needs tens of microseconds to wake up, more under a hypervisor, where one that slept for some
milliseconds has lost its caches too; and each round waits for one at either end. Where a network runs on a device, the
cores beside it have nothing else to do: the event loop looks for the frame without sleeping until it is there, and
gives way to all other threads meanwhile.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Literal, Protocol

from outrider.cores import num_cores
from outrider.placement import FEW_CORES, FEW_SESSIONS

Choice = Literal["auto", "on", "off"]

_MOST_LATE_MS = 2.0  # after a frame was due, by the mean of the last ones
_LONGEST_MS = 50.0  # of answers that are looked for: to longer ones a core that wakes up adds little
_ALPHA = 0.1
_MOST_MISSED = 4  # frames in a row that did not come while they were looked for; then none is, until one comes


class Loop(Protocol):
    """What busy polling needs of an event loop."""

    def call_soon(self, callback: Callable[[], object], /) -> object:
        """Calls once, after what else is due."""
        ...


def is_wanted(choice: Choice, *, on_device: bool) -> bool:
    """Whether to poll; auto: where the network does not need the cores itself."""
    return choice == "on" or (choice == "auto" and on_device)


class BusyPoll:
    """The busy polling of one stream, owned by its event loop. on: else it does nothing. clock: monotonic ns. cores: of
    this process."""

    def __init__(
        self, loop: Loop, *, on: bool, clock: Callable[[], int] = time.monotonic_ns,
        give_way: Callable[[], object] = os.sched_yield, cores: int | None = None,
    ) -> None:  # fmt: skip
        self._loop = loop
        self._on = on
        self._has_many_cores = (num_cores() if cores is None else cores) > FEW_CORES
        self._clock = clock
        self._give_way = give_way
        self._mean_ms = -1.0  # from asking to the answer; below 0: not known
        self._asked_ns = -1  # below 0: nothing is awaited
        self._until_ns = 0
        self._is_polling = False
        self._missed = 0

    def asked(self, sessions: int) -> None:
        """Notes that something was sent, about so many sessions, that a frame will answer."""
        if not self._on:
            return
        if sessions > FEW_SESSIONS and not self._has_many_cores:
            self._asked_ns = -1  # other threads want those cores
            return
        self._asked_ns = self._clock()
        if not 0 <= self._mean_ms <= _LONGEST_MS or self._missed >= _MOST_MISSED:
            return
        self._until_ns = self._asked_ns + int((self._mean_ms + _MOST_LATE_MS) * 1e6)
        if not self._is_polling:
            self._is_polling = True
            self._loop.call_soon(self._look)

    def came(self) -> None:
        """Notes that a frame has come."""
        if self._asked_ns < 0:
            return
        took_ms = (self._clock() - self._asked_ns) / 1e6
        self._asked_ns, self._missed = -1, 0
        known_ms = took_ms if self._mean_ms < 0 else self._mean_ms
        self._mean_ms = known_ms + _ALPHA * (min(took_ms, 2 * known_ms) - known_ms)

    def _look(self) -> None:
        """The loop looks for frames each time that it comes round to this."""
        if self._asked_ns < 0:
            self._is_polling = False
        elif self._clock() > self._until_ns:
            self._is_polling = False
            self._missed += 1
        else:
            self._give_way()  # to the threads that bring it: without this they wait out a time slice
            self._loop.call_soon(self._look)
