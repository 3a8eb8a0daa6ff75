"""Compiles the grammar on standard input (Lark's form) within so much processor time, and a bound on memory, or dies.

Run as a file of its own (`python -I grammar_trial_worker.py SECONDS FOLDER`, which has llguidance): it imports nothing
of ours.
"""

from __future__ import annotations

import ctypes
import resource
import signal
import sys

MAX_MEMORY_BYTES = 2**31
_PR_SET_PDEATHSIG = 1


def main(cpu_s: int, packages: str) -> None:
    """The tokenizer is one of bytes: what takes so long has nothing to do with tokens."""
    for number in (signal.SIGINT, signal.SIGTERM):  # whoever stops a service may tell all its processes
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    sys.path.append(packages)
    from llguidance import LLMatcher, LLTokenizer

    LLMatcher(LLTokenizer("byte"), sys.stdin.read(), log_level=0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
