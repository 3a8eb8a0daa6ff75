"""How many cores this process has, and which."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

from outrider.cgroups import groups, text_of


def num_cores(root: Path = Path("/")) -> int:
    """The cores that threads find time on at once: those allowed, or fewer by the quota of a control group.

    root: where /proc and /sys are.
    """
    found = len(allowed_cores()) or os.cpu_count() or 1
    return min([found, *map(math.ceil, _quotas(root))])


def allowed_cores() -> set[int]:
    """The cores that this process may use; empty where the system does not tell."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def _quotas(root: Path) -> Iterator[float]:
    """The CPU quota, in cores, of each control group that has one."""
    for group in groups("cpu", root):
        words = text_of(group / "cpu.max").split()
        words = words or [text_of(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        if len(words) == 2 and all(word.isdigit() and int(word) for word in words):  # without one: `max`, or -1
            yield int(words[0]) / int(words[1])
