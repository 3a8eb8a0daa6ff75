"""A start that is told to end while it compiles leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

COMPILER = """#!/bin/sh
case "$*" in
*attention.c*) exec 3>"{fifo}"; touch "$TMPDIR/of-the-compiler"; sleep 600 & echo compiling >&3; wait;;
*" -c "*) exec sleep 600;;
esac
"""
START = """
import sys
from kernels.native import build
build.COMPILERS = (sys.argv[1],)
from {module} import {function}
{function}()
"""


@pytest.mark.parametrize(
    ("module", "function"), [("engine.cpu_kernels", "cpu_kernels"), ("outrider.demo", "kernels_fault")]
)
def test_a_signal_ends_the_compilers_and_removes_their_folder(tmp_path: Path, module: str, function: str) -> None:
    compiler, fifo, temporary = tmp_path / "cc", tmp_path / "fifo", tmp_path / "temporary"
    temporary.mkdir()
    os.mkfifo(fifo)
    compiler.write_text(COMPILER.format(fifo=fifo))
    compiler.chmod(0o755)
    environment = {"OUTRIDER_HOME": str(tmp_path / "home"), "TMPDIR": str(temporary), "OUTRIDER_CPU_KERNEL": "1"}
    script = START.format(module=module, function=function)
    words = [sys.executable, "-c", script, str(compiler)]
    with subprocess.Popen(words, env=os.environ | environment) as process, fifo.open() as held_by_compilers:
        assert held_by_compilers.readline() == "compiling\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait() == -signal.SIGTERM
        assert held_by_compilers.read() == ""  # once the last of them has ended
    assert not list(temporary.iterdir())
