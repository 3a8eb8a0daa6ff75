"""How a service is asked to end: once in good order, twice at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import Any
from weakref import WeakSet

from outrider.telemetry import get_logger

log = get_logger(__name__)

_counted_once: set[signal.Signals] = set()
_heard: set[signal.Signals] = set()  # those that have asked this process to end


async def cancelled(*tasks: asyncio.Task[Any]) -> None:
    """Cancels tasks and waits until they have ended, however they do. A cancel of the caller's own goes on to it."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def first_of(*waits: Coroutine[Any, Any, object] | asyncio.Task[Any], timeout_s: float | None = None) -> None:
    """Returns when one of them has ended, or the time is up. Coroutines are then cancelled; tasks go on."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    own = set(tasks).difference(waits)
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancelled(*(task for task in own if not task.done()))
    for task in own:
        if not task.cancelled():
            task.result()  # whose error is the caller's


def leave_haste_to_supervisor() -> None:
    """Counts SIGTERM once from here on, in a part of a supervisor: whoever sends it to all processes (as systemd does)
    has the supervisor send it too, and that one hurries nobody so, but kills."""
    _counted_once.add(signal.SIGTERM)


def stop_signals() -> tuple[signal.Signals, ...]:
    """What a process is asked to end by: SIGTERM, SIGINT, and a SIGHUP that is not ignored, as nohup has it."""
    hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return signal.SIGTERM, signal.SIGINT, *hangup


class Stopping:
    """What a process is asked. `asked`: end in good order; `hurry`: do not wait any longer."""

    def __init__(self) -> None:
        self.asked, self.hurry = asyncio.Event(), asyncio.Event()

    def ask(self) -> None:
        """Asks, or asks again."""
        (self.hurry if self.asked.is_set() else self.asked).set()


class _Leaving(SystemExit):
    """Ends a block for the sake of a signal. A class of its own, since SystemExit cannot be referred to weakly."""


@contextlib.contextmanager
def tidied_when_stopped() -> Iterator[None]:
    """A signal that would end the process at once, as SIGTERM does where nobody minds it, ends the block first, so that
    it tidies up, and then the process. Only in the main thread; elsewhere: nothing.
    """
    told: list[int] = []
    under_way: WeakSet[_Leaving] = WeakSet()

    def leave(number: int, frame: FrameType | None) -> None:
        if not under_way:  # another would cut the tidying short; but one that a finalizer swallowed is gone
            told[:] = [number]
            raise noted(_Leaving(128 + number))

    def noted(leaving: _Leaving) -> _Leaving:
        under_way.add(leaving)
        return leaving

    in_main = threading.current_thread() is threading.main_thread()
    fatal = [number for number in stop_signals() if in_main and signal.getsignal(number) is signal.SIG_DFL]
    for number in fatal:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in fatal:
            signal.signal(number, signal.SIG_DFL)
        for number in told:
            os.kill(os.getpid(), number)


def has_begun() -> bool:
    """Whether a signal has asked this process to end."""
    return bool(_heard)


def on_signals(stop: Callable[[], object]) -> None:
    """Has the signals to end call `stop` in the running loop, each time that they come."""

    def take(number: signal.Signals) -> None:
        if number in _heard & _counted_once:
            return
        _heard.add(number)
        log.info("asked to stop", signal=number.name)
        stop()

    for number in stop_signals():
        asyncio.get_running_loop().add_signal_handler(number, take, number)


def stopped_by_signals() -> Stopping:
    """A Stopping that the process's signals ask."""
    stopping = Stopping()
    on_signals(stopping.ask)
    return stopping
