"""A process that hangs ends; one that is idle, slow, or stopped as a whole and gone on does not."""

from __future__ import annotations

import asyncio
import subprocess
import sys

from outrider.watchdog import LOOKS, Stalled, beats

HANGING = """
import re, threading
from outrider.telemetry import configure_logging
from outrider.watchdog import watching

def stuck_here():
    {hang}

configure_logging("x")
with watching(0.2, {{"engine": lambda: 1}}):
    stuck_here()
"""
WITH_THE_LOCK = 're.match("(a+)+$", "a" * 64 + "b")'


def run(hang: str) -> subprocess.CompletedProcess[str]:
    """A process that does this."""
    script = HANGING.format(hang=hang)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)


def test_only_what_has_work_and_stays_as_it_is_has_stalled() -> None:
    steps: object = 0
    stalled = Stalled({"other": lambda: None, "engine": lambda: steps})
    for _ in range(LOOKS):
        assert stalled.look() is None
    steps = 1
    for _ in range(LOOKS):
        assert stalled.look() is None
    steps = None  # idle
    for _ in range(3 * LOOKS):
        assert stalled.look() is None
    steps = 1
    for _ in range(LOOKS):
        assert stalled.look() is None
    assert stalled.look() == "engine"


def test_an_event_loop_that_turns_makes_progress() -> None:
    async def looked_at() -> None:
        stalled = Stalled({"loop": beats(asyncio.get_running_loop())})
        for _ in range(3 * LOOKS):
            assert stalled.look() is None
            await asyncio.sleep(0)
        assert "loop" in [stalled.look() for _ in range(LOOKS + 1)]  # within which it does not turn

    asyncio.run(looked_at())


def test_the_process_ends_and_shows_where_it_hung() -> None:
    ended = run("threading.Event().wait()")
    assert ended.returncode == 1
    assert "stuck_here" in ended.stderr
    assert "no progress" in ended.stderr.splitlines()[-1]  # which a supervisor shows


def test_a_process_that_can_run_no_python_ends_too() -> None:
    ended = run(WITH_THE_LOCK)
    assert ended.returncode == 1
    assert "stuck_here" in ended.stderr
