"""`python -m bench.NAME` as `outrider bench NAME`: what cannot start is told in a line, with exit code 2."""

from __future__ import annotations

import sys

from outrider import cli


def as_command(name: str) -> int:
    """Runs a benchmark with the process's words; returns the exit code."""
    return cli.main(["bench", name, *sys.argv[1:]])
