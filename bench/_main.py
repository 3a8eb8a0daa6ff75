"""Processes of a benchmark: `python -m bench.NAME` as `outrider bench NAME`, and how one is told to end."""

from __future__ import annotations

import asyncio
import signal
import sys

from outrider import cli


def as_command(name: str) -> int:
    """Runs a benchmark with the process's words; what cannot start is told in a line, with exit code 2."""
    return cli.main(["bench", name, *sys.argv[1:]])


def told_to_end() -> asyncio.Event:
    """Set by SIGTERM."""
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    return told
