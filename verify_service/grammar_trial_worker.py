"""Compiles the grammar on standard input (Lark's form) within so much processor time, and a bound on memory, or dies.

The file runs alone (outrider/isolated.py), with the words SECONDS TOKENIZER VOCAB_SIZE, and imports nothing of ours.
"""

from __future__ import annotations

import ctypes
import math
import resource
import signal
import sys
from pathlib import Path

MAX_MEMORY_BYTES = 2**31
_PR_SET_PDEATHSIG = 1


def main(cpu_s: int, tokenizer: str, vocab_size: int) -> None:
    """Compiles the grammar. With the model's tokenizer: one that names tokens which do not exist is refused at once."""
    for number in (signal.SIGINT, signal.SIGTERM):  # whoever stops a service may tell all its processes
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    from llguidance import LLMatcher, LLTokenizer

    source = Path(tokenizer).read_text(encoding="utf-8")
    try:
        loaded = LLTokenizer(source, n_vocab=vocab_size)
    except ValueError:  # it has more tokens than the model; for whether compiling ends they are no matter
        loaded = LLTokenizer(source)
    used = resource.getrusage(resource.RUSAGE_SELF)
    last_s = math.ceil(used.ru_utime + used.ru_stime) + cpu_s
    resource.setrlimit(resource.RLIMIT_CPU, (last_s, last_s + 1))  # the first is told from other ends
    LLMatcher(loaded, sys.stdin.read(), log_level=0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
