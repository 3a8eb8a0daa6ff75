"""Which cores a process's threads keep to, where two services share a few.

Left alone, Linux moves who is woken to the core of who wakes it, so that verify and drafter meet on one core while the
other sleeps, and each finds caches that the other has filled. Linux only: elsewhere threads cannot be placed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from outrider.errors import StartupError

HELPER_PREFIX = "team-"  # names of the C kernels' helper threads (kernels/native/team.c)
_FEWEST, _MOST = 2, 4  # cores on which two services are placed: on more of them, threads find one that is free

_before: set[int] | None = None  # cores that the process had, once it is placed


def cores_of_two() -> tuple[int, int] | None:
    """Cores for two services of this host, the first and the last; None where there is nothing to choose."""
    cores = sorted(_allowed())
    return (cores[0], cores[-1]) if _FEWEST <= len(cores) <= _MOST else None


def keep_to(core: int) -> None:
    """Keeps the calling thread, and those that it starts from now on, to one core; the kernels' helpers to the others.

    To be called once everything is loaded and before gRPC's threads are there. StartupError for a core that the process
    may not use.
    """
    global _before
    allowed = _allowed()
    if core not in allowed:
        raise StartupError(
            f"--core is {core}; this process may use {', '.join(map(str, sorted(allowed))) or 'none that it can name'}"
        )
    _before = allowed
    others = [other for other in sorted(allowed, key=lambda other: abs(other - core)) if other != core]
    for index, helper in enumerate(_helpers() if others else ()):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(helper, {others[index % len(others)]})
    os.sched_setaffinity(0, {core})


def roam() -> None:
    """Lets the calling thread use every core again that the process had before it was placed."""
    if _before is not None:
        os.sched_setaffinity(0, _before)


def _allowed() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def _helpers() -> Iterator[int]:
    """Ids of this process's helper threads."""
    for task in sorted(Path("/proc/self/task").iterdir(), key=lambda task: int(task.name)):
        with contextlib.suppress(OSError):
            if (task / "comm").read_text(encoding="utf-8").startswith(HELPER_PREFIX):
                yield int(task.name)
