"""What was left out of garbage collection comes back into it where a part is loaded once more."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path

from outrider.process_tuning import free_what_ended, keep_steady


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def run() -> None:
    cycle = Cycle()
    is_there = weakref.ref(cycle)
    keep_steady()
    del cycle
    gc.collect()
    assert is_there() is not None
    free_what_ended()
    assert is_there() is None


def test_what_ended_is_freed() -> None:
    """The setting stays for the rest of a process, so the test has one of its own."""
    script = "from tests.outrider.test_process_tuning import run; run()"
    root = Path(__file__).parents[2]
    ended = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
