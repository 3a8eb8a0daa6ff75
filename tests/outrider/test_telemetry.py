"""What is said to the person at the terminal."""

from __future__ import annotations

import os
import subprocess
import sys

SAYS = "from outrider.telemetry import announce; announce('one'); announce('two'); import os; os.write(2, b'alive')"


def test_a_service_outlives_who_read_its_first_line() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    ended = subprocess.run([sys.executable, "-c", SAYS], stdout=write_end, stderr=subprocess.PIPE, check=False)
    os.close(write_end)
    assert (ended.returncode, ended.stderr) == (0, b"alive")


def test_nobody_need_listen() -> None:
    command = ["sh", "-c", 'exec "$0" -c "$1" >&-', sys.executable, SAYS]
    ended = subprocess.run(command, stderr=subprocess.PIPE, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"alive")
