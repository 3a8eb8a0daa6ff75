"""Which cores a process's threads keep to, where two services share a few.

Left alone, Linux moves who is woken to the core of who wakes it, so that verify and drafter meet on one core while the
other sleeps, and each finds caches that the other has filled. With one session that costs a tenth of a round; with
many, both cores are busy anyhow, and threads do better where there is room. Linux only: elsewhere none are placed.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable
from pathlib import Path

from outrider.errors import StartupError

HELPER_PREFIX = "team-"  # names of the C kernels' helper threads (kernels/native/team.c)
_FEWEST, _MOST = 2, 4  # cores on which two services are placed: on more of them, threads find one that is free
_FEW = 2  # sessions that run at once
_SETTLED = 64  # steps with few, after which they are thought to stay so


def cores_of_two() -> tuple[int, int] | None:
    """Cores for two services of this host, the first and the last; None where there is nothing to choose."""
    cores = sorted(_allowed())
    return (cores[0], cores[-1]) if _FEWEST <= len(cores) <= _MOST else None


class Placement:
    """Keeps this process's threads to one core, and the kernels' helpers to the others.

    To be made by the process's own thread once everything is loaded; threads that are started later do as who starts
    them. core: None places nothing. StartupError for one that the process may not use.
    """

    def __init__(self, core: int | None) -> None:
        self._core = core
        self._allowed = _allowed()
        self._roaming: set[int] = set()
        self._steps_with_few = 0
        self._is_placed = False
        if core is None:
            return
        if core not in self._allowed:
            usable = ", ".join(map(str, sorted(self._allowed))) or "none that it can name"
            raise StartupError(f"--core is {core}; this process may use {usable}")
        self._place()

    def roam(self) -> None:
        """The calling thread may use every core, whatever the others do."""
        if self._core is not None:
            self._roaming.add(threading.get_native_id())
            os.sched_setaffinity(0, self._allowed)

    def step(self, sessions: int) -> None:
        """So many sessions ran in a step: with many, all threads use all cores."""
        if self._core is None:
            return
        self._steps_with_few = self._steps_with_few + 1 if sessions <= _FEW else 0
        if self._is_placed and not self._steps_with_few:
            self._is_placed = False
            _set(_tasks(), self._allowed)
        elif not self._is_placed and self._steps_with_few > _SETTLED:
            self._place()

    def _place(self) -> None:
        core = self._core
        assert core is not None
        others = sorted(self._allowed - {core}, key=lambda other: abs(other - core)) or [core]
        helpers = [task for task in _tasks() if _name(task).startswith(HELPER_PREFIX)]
        for index, helper in enumerate(helpers):
            _set([helper], {others[index % len(others)]})
        _set(set(_tasks()) - set(helpers) - self._roaming, {core})
        self._is_placed = True


def _allowed() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def _tasks() -> list[int]:
    """Ids of this process's threads, oldest first."""
    return sorted(int(task.name) for task in Path("/proc/self/task").iterdir())


def _name(task: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/self/task/{task}/comm").read_text(encoding="utf-8")
    return ""


def _set(tasks: Iterable[int], cores: set[int]) -> None:
    for task in tasks:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(task, cores)
