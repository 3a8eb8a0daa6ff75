"""Which thread takes the engine's steps on: one of its own, or the event loop, one at a time.

Between two threads that wake one another lie 50 to 100 microseconds each way, since a core that slept has lost its
caches. So where the engine waits for drafts and nothing else is under way, the event loop, which brings them, runs the
step itself, if it is a short one, and tells drafters of it with no thread between.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass

from verify_service.commands import Command, Inbox

_RETRY_NS = 10_000_000  # after which the thread looks again whether the event loop still runs a step


@dataclass(frozen=True, slots=True)
class Wait:
    """For commands, until so many monotonic nanoseconds (None: for ever; 0: those that are there)."""

    until_ns: int | None


@dataclass(frozen=True, slots=True)
class Settle:
    """Drafters were told: until that is on its way, or so many nanoseconds, nothing else is done.

    deadline_ns: of the wait that follows.
    """

    until_ns: int
    deadline_ns: int


@dataclass(frozen=True, slots=True)
class Compute:
    """A forward pass is next, of so many milliseconds about; inf: it is not to be lent."""

    ms: float


Pause = Wait | Settle | Compute
"""Where steps may change hands. The next thread sends in the commands that are there; none where a Compute was."""

Steps = Generator[Pause, list[Command], None]

LOOK = Wait(0)


class Turns:
    """Takes `steps` on, by `run` on a thread of their own and by `bring` on the event loop.

    most_ms: what a step may take that the event loop runs, which does nothing else meanwhile; 0: it runs none.
    """

    def __init__(self, steps: Steps, inbox: Inbox, *, most_ms: float) -> None:
        self._steps = steps
        self._inbox = inbox
        self._most_ms = most_ms
        self._turn = threading.Lock()  # held by whoever takes the steps on
        self._pause: Pause | None = None  # None: they have not begun, or have ended
        self._has_ended = False
        self._error: BaseException | None = None
        self._sleeps_until_ns: float = math.inf  # at most, the thread

    def run(self) -> None:
        """Until the steps end; raises what they raise."""
        with self._turn:
            self._pause = next(self._steps)
        while not self._has_ended:
            if self._turn.acquire(blocking=False):
                try:
                    while self._is_due():
                        self._go_on()
                    until_ns = None if self._pause is None else _until_ns(self._pause)
                    self._sleeps_until_ns = math.inf if until_ns is None else until_ns
                finally:
                    self._turn.release()
            else:
                self._sleeps_until_ns = until_ns = time.monotonic_ns() + _RETRY_NS
            if not self._has_ended:
                self._inbox.wait(until_ns)
        if self._error is not None:
            raise self._error

    def bring(self, command: Command) -> None:
        """Puts a command in and does what it makes due, one short step included; the thread does the rest."""
        self._inbox.put(command, ring=False)
        if not self._take_turn():
            self._inbox.ring()
            return
        steps_left = 1
        while is_due := self._is_due():
            if isinstance(self._pause, Compute):
                if self._pause.ms > self._most_ms or not steps_left:
                    break
                steps_left -= 1
            self._go_on()
        self._hand_back(is_due=is_due)

    def settled(self) -> None:
        """What drafters were told is on its way."""
        if isinstance(self._pause, Settle) and self._take_turn():
            if isinstance(self._pause, Settle):
                self._go_on()
            self._hand_back(is_due=self._is_due())

    def _take_turn(self) -> bool:
        return self._most_ms > 0.0 and self._pause is not None and self._turn.acquire(blocking=False)

    def _hand_back(self, *, is_due: bool) -> None:
        """Ends the event loop's turn; wakes the thread where it sleeps for longer than it may."""
        pause = self._pause
        until_ns = pause.deadline_ns if isinstance(pause, Settle) else None if pause is None else _until_ns(pause)
        too_long = until_ns is not None and until_ns < self._sleeps_until_ns
        self._turn.release()
        if is_due or too_long or self._has_ended:
            self._inbox.ring()

    def _is_due(self) -> bool:
        pause = self._pause
        if pause is None or isinstance(pause, Compute):
            return pause is not None
        return bool(self._inbox.num_waiting) or (pause.until_ns is not None and time.monotonic_ns() >= pause.until_ns)

    def _go_on(self) -> None:
        commands = [] if isinstance(self._pause, Compute) else self._inbox.take()
        try:
            self._pause = self._steps.send(commands)
        except BaseException as error:
            self._pause, self._has_ended = None, True
            if not isinstance(error, StopIteration):
                self._error = error  # `run` raises it


def _until_ns(pause: Pause) -> int | None:
    return 0 if isinstance(pause, Compute) else pause.until_ns
