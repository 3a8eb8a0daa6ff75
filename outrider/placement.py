"""Which cores a process's threads keep to, where two services share a few.

Left alone, Linux moves who is woken to the core of who wakes it, so that verify and drafter meet on one core while the
other sleeps, and each finds caches that the other has filled. With one session that costs a tenth of a round with
drafts. Steps without drafts, and many sessions, keep both cores busy, and threads do better where there is room. Linux
only: elsewhere none are placed.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable
from pathlib import Path

from outrider.cores import allowed_cores
from outrider.errors import StartupError

HELPER_PREFIX = "team-"  # names of the C kernels' helper threads (kernels/native/team.c)
_FEWEST_CORES, FEW_CORES = 2, 4  # on which two services are placed: on more of them, threads find one that is free
FEW_SESSIONS = 2  # that run at once
_SETTLED = 16  # rounds of few, after which they are thought to go on
_OVER = 4  # other steps in a row, after which they are thought to be over


def cores_of_two() -> tuple[int, int] | None:
    """Cores for two services of this host, the first and the last; None where there is nothing to choose.

    Of those allowed: a quota of many is time on whichever is free.
    """
    cores = sorted(allowed_cores())
    return (cores[0], cores[-1]) if _FEWEST_CORES <= len(cores) <= FEW_CORES else None


class Placement:
    """Keeps this process's threads to one core while few sessions are drafted for, and the kernels' helpers to others.

    core: None places nothing. StartupError for one that the process may not use.
    """

    def __init__(self, core: int | None) -> None:
        self._core = core
        self._allowed = allowed_cores()
        self._roaming: set[int] = set()
        self._rounds = self._others = 0
        self._is_placed = False
        if core is not None and core not in self._allowed:
            usable = ", ".join(map(str, sorted(self._allowed))) or "none that it can name"
            raise StartupError(f"--core is {core}; this process may use {usable}")

    def roam(self) -> None:
        """The calling thread may use every core, whatever the others do."""
        if self._core is not None:
            self._roaming.add(threading.get_native_id())
            keep_to([threading.get_native_id()], self._allowed)

    def step(self, sessions: int, *, drafts: bool) -> None:
        """Places threads for a step in which so many sessions ran; drafts: trees of theirs were verified, or made."""
        if self._core is None:
            return
        if drafts and sessions <= FEW_SESSIONS:
            self._rounds, self._others = self._rounds + 1, 0
        else:
            self._others += 1 if sessions <= FEW_SESSIONS else _OVER
        if self._others >= _OVER:
            self._rounds = 0
        if self._is_placed and not self._rounds:
            self._is_placed = False
            keep_to(tasks(), self._allowed)
        elif not self._is_placed and self._rounds > _SETTLED:
            self._place()

    def _place(self) -> None:
        core = self._core
        assert core is not None
        others = sorted(self._allowed - {core}, key=lambda other: abs(other - core)) or [core]
        helpers = [task for task in tasks() if _name(task).startswith(HELPER_PREFIX)]
        for index, helper in enumerate(helpers):
            keep_to([helper], {others[index % len(others)]})
        keep_to(set(tasks()) - set(helpers) - self._roaming, {core})
        self._is_placed = True


def tasks() -> list[int]:
    """Ids of this process's threads, oldest first."""
    return sorted(int(task.name) for task in Path("/proc/self/task").iterdir())


def _name(task: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/self/task/{task}/comm").read_text(encoding="utf-8")
    return ""


def keep_to(threads: Iterable[int], cores: set[int]) -> None:
    """Has these threads run on these cores from now on."""
    for task in threads:
        with contextlib.suppress(OSError):  # it has just ended, or the cores were taken from us while we run
            os.sched_setaffinity(task, cores)
