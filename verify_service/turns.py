"""Which thread takes the engine's steps on: one of its own, or the event loop, one at a time.

Between two threads that wake one another lie 50 to 100 microseconds each way, since a core that slept has lost its
caches. So where the engine waits for drafts and nothing else is under way, the event loop, which brings them, runs the
step itself, if it is a short one, and tells drafters of it with no thread between. The thread sleeps meanwhile: each
time that it woke up it would want the interpreter, most of all right after a step, when drafters are to be told.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass

from verify_service.commands import Command, Inbox


@dataclass(eq=False, slots=True)
class Wait:
    """A wait for commands, until so many monotonic nanoseconds (None: for ever)."""

    until_ns: int | None


@dataclass(eq=False, slots=True)
class Settle:
    """A wait until what drafters were told is on its way, or so many nanoseconds; nothing else is done meanwhile.

    deadline_ns: of the wait that follows.
    """

    until_ns: int
    deadline_ns: int


@dataclass(eq=False, slots=True)
class Compute:
    """A forward pass that is next, of about so many milliseconds; inf: it is not to be lent."""

    ms: float


Pause = Wait | Settle | Compute
"""Where steps may change hands. The next thread sends in the commands that are there; none where a Compute was."""

Steps = Generator[Pause, list[Command], None]


@dataclass(frozen=True, slots=True)
class Lending:
    """Which steps the event loop may run, while it does nothing else.

    most_ms: how long they may take. call_later: has something called on the event loop in about so many seconds, by
    which the thread is woken for waits that were left behind.
    """

    most_ms: float
    call_later: Callable[[float, Callable[[], object]], object]


_NOTHING_LENT = Lending(0.0, lambda delay_s, call: None)


class Turns:
    """Takes `steps` on, by `run` on a thread of their own and by `bring` on the event loop.

    lending: the steps that the event loop may run; None: none.
    """

    def __init__(self, steps: Steps, inbox: Inbox, lending: Lending | None) -> None:
        self._steps = steps
        self._inbox = inbox
        self._lending = lending or _NOTHING_LENT
        self._turn = threading.Lock()  # held by whoever takes the steps on
        self._pause: Pause | None = None  # None: they have not begun, or have ended
        self._has_ended = False
        self._error: BaseException | None = None
        self._is_looked_after = False  # the event loop left the wait behind that there is now
        self._looks_ns: float = math.inf  # when the event loop looks whether it is over

    def run(self) -> None:
        """Takes the steps on until they end; raises what they raise."""
        with self._turn:
            self._pause = next(self._steps)
        while not self._has_ended:
            until_ns = None
            if self._turn.acquire(blocking=False):
                try:
                    while self._is_due():
                        self._is_looked_after = False
                        self._go_on()
                    if self._pause is not None and not self._is_looked_after:
                        until_ns = _until_ns(self._pause)
                finally:
                    self._turn.release()
            if not self._has_ended:
                self._inbox.wait(until_ns)
        if self._error is not None:
            raise self._error

    def bring(self, command: Command) -> None:
        """Puts a command in and does what it makes due, one short step included; the thread does the rest."""
        self._inbox.put(command, wake=False)
        if not self._take_turn():
            self._inbox.wake()
            return
        steps_left = 1
        while is_due := self._is_due():
            if isinstance(self._pause, Compute):
                if self._pause.ms > self._lending.most_ms or not steps_left:
                    break
                steps_left -= 1
            self._go_on()
        self._hand_back(is_due=is_due)

    def settled(self) -> None:
        """Ends a Settle: what drafters were told is on its way."""
        if isinstance(self._pause, Settle) and self._take_turn():
            if isinstance(self._pause, Settle):
                self._go_on()
            self._hand_back(is_due=self._is_due())

    def _take_turn(self) -> bool:
        return self._lending.most_ms > 0.0 and self._pause is not None and self._turn.acquire(blocking=False)

    def _hand_back(self, *, is_due: bool) -> None:
        """Ends the event loop's turn; wakes the thread where there is something for it to do, now or later."""
        self._is_looked_after = True
        self._turn.release()
        if is_due or self._has_ended:
            self._inbox.wake()
        else:
            self._look_later()

    def _look_later(self) -> None:
        until_ns = _deadline_ns(self._pause)
        if until_ns is None or self._looks_ns <= until_ns:
            return
        self._looks_ns = until_ns
        self._lending.call_later(max(0, math.ceil((until_ns - time.monotonic_ns()) / 1e6)) / 1e3, self._look)

    def _look(self) -> None:
        """Wakes the thread if the wait is over that there is now. Those of former steps are not taken back."""
        self._looks_ns = math.inf
        until_ns = _deadline_ns(self._pause)
        if until_ns is not None and until_ns <= time.monotonic_ns():
            self._inbox.wake()
        else:
            self._look_later()

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


def _deadline_ns(pause: Pause | None) -> int | None:
    """When the wait is over; None: never, or there is no pause, since the thread may end while the event loop looks."""
    if pause is None:
        return None
    return pause.deadline_ns if isinstance(pause, Settle) else _until_ns(pause)
