"""Hosts whose drafters were thrown out: the next one waits, twice as long each time. Owned by the event loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from outrider.errors import ResourceExhausted

_FIRST_S, _LONGEST_S = 1.0, 60.0
_FORGOTTEN_S = 60.0  # after the wait
_MAX_HOSTS = 1024  # the one that was thrown out first is forgotten


@dataclass(slots=True)
class _Wait:
    length_s: float
    until_s: float


class Expelled:
    """peer arguments: as gRPC writes them. All drafters behind one proxy are one host's, and those on Unix sockets."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waits: dict[str, _Wait] = {}

    def note(self, peer: str) -> None:
        """One of its drafters was thrown out."""
        host, now_s = _host(peer), self._clock()
        last = self._waits.pop(host, None)
        repeats = last is not None and now_s < last.until_s + _FORGOTTEN_S
        length_s = min(2 * last.length_s, _LONGEST_S) if last is not None and repeats else _FIRST_S
        self._waits[host] = _Wait(length_s, now_s + length_s)
        if len(self._waits) > _MAX_HOSTS:
            del self._waits[next(iter(self._waits))]

    def check(self, peer: str) -> None:
        """ResourceExhausted while its next drafter has to wait."""
        host = _host(peer)
        wait = self._waits.get(host)
        left_s = 0.0 if wait is None else wait.until_s - self._clock()
        if left_s > 0.0:
            raise ResourceExhausted(
                f"a drafter of {host} was thrown out; its next one may enlist in {left_s:.1f} s", retry_after_s=left_s
            )


def _host(peer: str) -> str:
    """What comes before the port; of Unix sockets, that it is one."""
    return "unix" if peer.startswith("unix") else peer.rpartition(":")[0]
