"""Processes of a benchmark: `python -m bench.NAME` as `outrider bench NAME`, and how one is told to end."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from types import FrameType

from outrider import cli
from outrider.stopping import stop_signals


def as_command(name: str) -> int:
    """Runs a benchmark with the process's words; what cannot start is told in a line, with exit code 2."""
    return cli.main(["bench", name, *sys.argv[1:]])


def ended_by_signals(main: Callable[[list[str]], int], words: list[str]) -> int:
    """`main(words)`, which SIGTERM and SIGHUP end as Ctrl-C does, so that its servers and folders go with it.

    Returns its exit code, or a shell's for the signal. Only the first counts: another would cut the ending short.
    """
    told: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        if not told:
            told.append(number)
            interrupt = signal.getsignal(signal.SIGINT)  # asyncio's own, while it runs; none where Ctrl-C is ignored
            (interrupt if callable(interrupt) else signal.default_int_handler)(signal.SIGINT, frame)

    before = {number: signal.signal(number, end) for number in stop_signals() if number is not signal.SIGINT}
    try:
        return main(words)
    except KeyboardInterrupt:
        if told:
            return 128 + told[0]
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def told_to_end() -> asyncio.Event:
    """Set by SIGTERM."""
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    return told
