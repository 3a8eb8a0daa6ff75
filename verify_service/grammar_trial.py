"""A process in which a grammar is compiled for trial, where it may take for ever: the library that compiles them
intersects patterns that hold at one place, which takes twice as long for each one more, and cannot be stopped.

Run as a file of its own (`python -I grammar_trial.py`), with the grammar on standard input; it imports nothing of ours.
The kernel ends it when it takes too much time or memory. How it goes is for the caller to see again: what ends here
ends there.
"""

from __future__ import annotations

import ctypes
import re
import resource
import signal
import subprocess
import sys

MOST_AT_ONE_PLACE = 8  # patterns, which might all meet, of a grammar that needs no trial: about 1 ms
MAX_CPU_S = 3
MAX_MEMORY_BYTES = 2**31
_MAX_WALL_S = 4 * MAX_CPU_S  # of a machine that has other things to do
_PR_SET_PDEATHSIG = 1
_PATTERNS = re.compile(r'"(?:pattern|patternProperties|propertyNames|format)"\s*:|[&~]')


def is_needed(source: str) -> bool:
    """Whether so many patterns are in a schema or a grammar, its escapes undone, that they might take for ever."""
    return sum(1 for _ in _PATTERNS.finditer(source)) > MOST_AT_ONE_PLACE


def ends(grammar: str) -> bool:
    """Whether compiling a grammar (in Lark's form) comes to an end within the limits, well or not."""
    try:
        return subprocess.run(
            [sys.executable, "-I", __file__, str(MAX_CPU_S)], input=grammar.encode(), timeout=_MAX_WALL_S, check=False,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        ).returncode == 0  # fmt: skip
    except subprocess.TimeoutExpired:
        return False


def main(cpu_s: int) -> None:
    """The trial. The tokenizer is one of bytes: what takes so long has nothing to do with tokens."""
    for number in (signal.SIGINT, signal.SIGTERM):  # whoever stops a service may tell all its processes
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    from llguidance import LLMatcher, LLTokenizer

    LLMatcher(LLTokenizer("byte"), sys.stdin.read(), log_level=0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
