"""Time that a network would take: slept to the point, or burnt."""

from __future__ import annotations

import ctypes
import threading
import time
import zlib

_PR_SET_TIMERSLACK = 29
_BLOCK = bytes(64 * 1024)
NAP_NS = 200_000  # a core that sleeps for long loses its caches, and one that waits for a device does not sleep
SPUN_NS = 80_000  # before the end; a device's results are waited for like this, and a sleeper wakes up late
_LAST_NS = 12_000  # of them without giving way to other threads, which takes about so long


class Clock:
    """Takes `ms` of a call. `burn`: of this thread's CPU time, without holding the interpreter; else of the wall's."""

    def __init__(self, ms: float, *, burn: bool) -> None:
        self._ns = int(ms * 1e6)
        self._burn = burn
        self._exact = threading.local()

    def spend(self, start_ns: int) -> None:
        """Returns when the time since `start_ns` (monotonic) has passed; burning begins now."""
        if self._burn:
            end_ns = time.thread_time_ns() + self._ns
            while time.thread_time_ns() < end_ns:
                zlib.crc32(_BLOCK)
            return
        if not hasattr(self._exact, "set"):  # a thread's timers are late by 50 us unless it asks for better
            self._exact.set = ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0) == 0
        end_ns = start_ns + self._ns
        while (left_ns := end_ns - SPUN_NS - time.monotonic_ns()) > 0:
            time.sleep(min(left_ns, NAP_NS) / 1e9)
        while time.monotonic_ns() < end_ns - _LAST_NS:
            time.sleep(0)
        while time.monotonic_ns() < end_ns:
            pass
