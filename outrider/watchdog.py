"""Ends a process in which something that has work makes no more progress: a step on a hung device, a stuck event loop.

Such a process still answers HTTP/2 pings, which gRPC's core does without Python, so that its peers would wait for it.
What hangs with Python's own lock is ended by faulthandler, which needs no Python, later and with stacks alone. After
SGLang's --watchdog-timeout.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from outrider.telemetry import get_logger

log = get_logger(__name__)

LOOKS = 10  # within the time after which a process is ended
# Times as long without one, by the clock, and it is ended too: also where it was stopped as a whole, when it goes on.
_NO_LOOK = 3
Progress = Callable[[], object]  # something that changes as work is done; None: there is none to do


class Stalled:
    """Which of what is watched has been as it was for too long.

    Time is counted by looks, and not by the clock: a process that is stopped as a whole, and goes on later, has not
    stalled. But where nothing looks for three times as long, as while it is stopped, `watching` ends it.
    """

    def __init__(self, watched: Mapping[str, Progress]) -> None:
        self._watched = watched
        self._seen: dict[str, tuple[object, int]] = {}

    def look(self) -> str | None:
        """The name of one that has been the same for LOOKS looks after the first that saw it so."""
        for name, progress in self._watched.items():
            now = progress()
            before, count = self._seen.get(name, (None, 0))
            count = count + 1 if now is not None and now == before else 0
            self._seen[name] = now, count
            if count >= LOOKS:
                return name
        return None


def beats(loop: asyncio.AbstractEventLoop) -> Progress:
    """The progress of an event loop: how often it has done what each look gives it to do."""
    done = asked = 0

    def beat() -> None:
        nonlocal done
        done += 1

    def progress() -> object:
        nonlocal asked
        if done == asked and not loop.is_closed():
            asked += 1
            loop.call_soon_threadsafe(beat)
        return done

    return progress


@contextmanager
def watching(timeout_s: float, watched: Mapping[str, Progress]) -> Iterator[None]:
    """Ends the process, all stacks on stderr, when one makes no progress for `timeout_s`; 0: never."""
    if not timeout_s:
        yield
        return
    over = threading.Event()
    log_file = sys.__stderr__ or 2

    def end_unless_looked_at() -> None:
        faulthandler.dump_traceback_later(_NO_LOOK * timeout_s, exit=True, file=log_file)

    stalled = Stalled(watched)

    def watch() -> None:
        while not over.wait(timeout_s / LOOKS):
            end_unless_looked_at()
            if (name := stalled.look()) is not None:
                faulthandler.dump_traceback(log_file, all_threads=True)
                # Last, as a supervisor that tells of the end shows the last lines.
                log.error("no progress: this process ends", stuck=name, watchdog_timeout_s=timeout_s)
                os._exit(1)

    end_unless_looked_at()
    thread = threading.Thread(target=watch, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        faulthandler.cancel_dump_traceback_later()
