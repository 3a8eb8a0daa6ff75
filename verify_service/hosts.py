"""How often drafters of one host may enlist: each costs a connection, and sessions that are opened to it.

A host whose drafter was expelled waits before the next one, twice as long each time. Owned by the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from outrider.errors import ResourceExhausted

_BURST, _INTERVAL_S = 64, 0.25  # so many at once, as after a restart of verify; then one in each interval
_FIRST_S, _LONGEST_S = 1.0, 60.0  # for one whose drafter was expelled
_FORGOTTEN_S = 60.0  # after that wait
_HELD_S, _MAX_HELD = 1.0, 64  # who comes too soon is kept waiting, so that it does not dial again at once
_TIMER_S = 0.002  # by which a timer may end before its time
_MAX_HOSTS = 1024  # the one that was heard of first is forgotten


@dataclass(slots=True)
class _Host:
    paid_until_s: float = 0.0  # by the enlistments so far, each an interval
    barred_until_s: float = 0.0
    bar_s: float = 0.0

    def wait_s(self, now_s: float) -> float:
        """Seconds until the next drafter of this host may enlist; 0 or less: now."""
        return max(self.barred_until_s - now_s, self.paid_until_s - (_BURST - 1) * _INTERVAL_S - now_s)


class Hosts:
    """Admits drafters host by host.

    peer: gRPC's name of a connection. All drafters behind one proxy are of one host, and so are all on Unix sockets.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._hosts: dict[str, _Host] = {}
        self._num_held = 0

    async def admit(self, peer: str) -> None:
        """Returns once a drafter of this host may enlist. ResourceExhausted where that takes over a second or so."""
        name = _name(peer)
        host, began_s = self._of(name), self._clock()
        while (left_s := host.wait_s(now_s := self._clock())) > 0.0:
            rest_s = began_s + _HELD_S - now_s
            if rest_s <= 0.0 or self._num_held >= _MAX_HELD:
                thrown_out = now_s < host.barred_until_s
                why = f"a drafter of {name} was thrown out" if thrown_out else f"drafters of {name} come too often"
                raise ResourceExhausted(f"{why}; its next one may enlist in {left_s:.1f} s", retry_after_s=left_s)
            await self._hold(min(left_s, rest_s) + _TIMER_S)
        host.paid_until_s = max(host.paid_until_s, now_s) + _INTERVAL_S

    async def _hold(self, seconds: float) -> None:
        self._num_held += 1
        try:
            await self._sleep(seconds)
        finally:
            self._num_held -= 1

    def expelled(self, peer: str) -> None:
        """Notes that a drafter of this host was expelled; its next one has to wait, each time twice as long."""
        host, now_s = self._of(_name(peer)), self._clock()
        repeats = now_s < host.barred_until_s + _FORGOTTEN_S
        host.bar_s = min(2 * host.bar_s, _LONGEST_S) if host.bar_s and repeats else _FIRST_S
        host.barred_until_s = now_s + host.bar_s

    def _of(self, name: str) -> _Host:
        host = self._hosts.setdefault(name, _Host())
        if len(self._hosts) > _MAX_HOSTS:
            del self._hosts[next(iter(self._hosts))]
        return host


def _name(peer: str) -> str:
    """The host: what comes before the port; one name for all Unix sockets."""
    return "unix" if peer.startswith("unix") else peer.rpartition(":")[0] or peer
