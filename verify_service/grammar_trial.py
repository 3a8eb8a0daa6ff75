"""Grammars that may take for ever to compile are compiled on trial first, in a process that the kernel ends.

The library that compiles them intersects patterns that hold at one place, which takes twice as long for each one more,
and cannot be stopped; and where an integer is surely no more than -2^63, it calls itself until the stack is full. How
it goes is for the caller to see again: what ends in the trial ends there.
"""

from __future__ import annotations

import re
import signal
import subprocess
from itertools import islice
from pathlib import Path

import llguidance

from outrider import env, isolated
from outrider.errors import RETRY_SOON_S, Internal, ResourceExhausted
from outrider.telemetry import get_logger
from verify_service import grammar_trial_worker

log = get_logger(__name__)

MOST_AT_ONE_PLACE = 8  # patterns, which might all meet, of a grammar that needs no trial: about 1 ms
MAX_CPU_S = 1
_MAX_WALL_S = 20 * MAX_CPU_S  # of a machine that has other things to do
_TOO_MUCH = (-signal.SIGXCPU, -signal.SIGABRT, -signal.SIGSEGV)  # time; memory, where the library gives up; stack
_PATTERNS = re.compile(r'"(?:pattern|patternProperties|propertyNames|format)"\s*:|[&~]')
_FAR_BELOW = re.compile(r"[\s:,\[]-(?:\d{19}|[\d.]+[eE]\+?\d)")  # numbers that may be at or below -2^63


def is_needed(source: str) -> bool:
    """Whether a schema or a grammar, its escapes undone, might take for ever, or all of the stack."""
    return len(list(islice(_PATTERNS.finditer(source), MOST_AT_ONE_PLACE + 1))) > MOST_AT_ONE_PLACE or bool(
        _FAR_BELOW.search(source)
    )


def ends(grammar: str, tokenizer: Path, vocab_size: int) -> bool:
    """Whether compiling a grammar (in Lark's form) comes to an end within the limits, well or not.

    tokenizer: the file. Internal where it cannot be tried, ResourceExhausted where that takes a process too many.
    """
    words = str(MAX_CPU_S), str(tokenizer), str(vocab_size)
    try:
        tried = subprocess.run(
            isolated.command(grammar_trial_worker, *words, packages=(llguidance,)), input=grammar.encode(),
            timeout=_MAX_WALL_S, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=env.for_worker(),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise Internal(f"this grammar could not be tried within {_MAX_WALL_S} s; the machine is busy") from None
    except OSError as error:
        raise ResourceExhausted(
            f"no process can be started to try this grammar: {error.strerror}; try again later",
            retry_after_s=RETRY_SOON_S,
        ) from error
    if tried.returncode not in (0, *_TOO_MUCH):
        log.error(
            "a grammar could not be tried", status=tried.returncode,
            stderr=tried.stderr.decode(errors="replace")[-1000:],
        )  # fmt: skip
        raise Internal("this grammar cannot be tried; the server's log says why")
    return tried.returncode == 0
