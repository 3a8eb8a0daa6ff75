"""Grammars that may take for ever to compile are compiled on trial first, in a process that the kernel ends.

The library that compiles them intersects patterns that hold at one place, which takes twice as long for each one more,
and cannot be stopped. How it goes is for the caller to see again: what ends in the trial ends there.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import llguidance

from outrider.errors import Internal
from outrider.telemetry import get_logger
from verify_service import grammar_trial_worker

log = get_logger(__name__)

MOST_AT_ONE_PLACE = 8  # patterns, which might all meet, of a grammar that needs no trial: about 1 ms
MAX_CPU_S = 1
_MAX_WALL_S = 20 * MAX_CPU_S  # of a machine that has other things to do
_PATTERNS = re.compile(r'"(?:pattern|patternProperties|propertyNames|format)"\s*:|[&~]')


def is_needed(source: str) -> bool:
    """Whether so many patterns are in a schema or a grammar, its escapes undone, that they might take for ever."""
    return sum(1 for _ in _PATTERNS.finditer(source)) > MOST_AT_ONE_PLACE


def ends(grammar: str) -> bool:
    """Whether compiling a grammar (in Lark's form) comes to an end within the limits, well or not.

    Internal where it cannot be tried.
    """
    packages = str(Path(llguidance.__file__).parents[1])
    try:
        tried = subprocess.run(
            [sys.executable, "-I", grammar_trial_worker.__file__, str(MAX_CPU_S), packages], input=grammar.encode(),
            timeout=_MAX_WALL_S, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return False
    if tried.returncode > 0:  # by no signal
        log.error("a grammar could not be tried", stderr=tried.stderr.decode(errors="replace")[-1000:])
        raise Internal("this grammar cannot be tried; the server's log says why")
    return tried.returncode == 0
