"""Threads on cores: when they go there, who roams, and what sets them free. Real threads, in a real process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from outrider.errors import StartupError
from outrider.placement import Placement, cores_of_two, keep_to

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system places no threads")

SCRIPT = """
import os, threading
from pathlib import Path
from outrider.placement import Placement

stop, up = threading.Event(), threading.Barrier(4)

def named(name):
    if name:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
    up.wait()
    stop.wait()

def roaming():
    up.wait()
    go.wait()
    placement.roam()
    roamed.set()
    stop.wait()

go, roamed = threading.Event(), threading.Event()
threads = [threading.Thread(target=named, args=("team-1",)), threading.Thread(target=named, args=("",)),
           threading.Thread(target=roaming)]
for thread in threads:
    thread.start()
up.wait()
first = min(os.sched_getaffinity(0))

def cores():
    return [sorted(os.sched_getaffinity(id)) for id in (0, *(thread.native_id for thread in threads))]

both = cores()[0]
placement = Placement(first)
go.set()
roamed.wait()
others = [core for core in both if core != first] or both

def are_free():
    return cores() == [both] * 4

def are_placed():
    main, helper, other, roamer = cores()
    return main == other == [first] and len(helper) == 1 and helper[0] in others and roamer == both

assert are_free(), cores()
for _ in range(16):
    placement.step(2, drafts=True)
assert are_free(), cores()
placement.step(1, drafts=True)
assert are_placed(), cores()
for _ in range(3):
    placement.step(1, drafts=False)
placement.step(1, drafts=True)
for _ in range(3):
    placement.step(1, drafts=False)
assert are_placed(), cores()
placement.step(1, drafts=False)
assert are_free(), cores()
for _ in range(17):
    placement.step(1, drafts=True)
assert are_placed(), cores()
placement.step(3, drafts=True)
assert are_free(), cores()
stop.set()
"""


def test_threads_keep_to_a_core_and_helpers_to_others_while_few_sessions_have_drafts() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, cwd=Path(__file__).parents[2], timeout=60)


def test_a_core_that_is_taken_from_the_process_ends_nothing() -> None:
    keep_to([threading.get_native_id()], {100_000})


def test_a_core_that_the_process_may_not_use_is_named() -> None:
    with pytest.raises(StartupError, match=r"--core is 100000; this process may use \d"):
        Placement(100_000)


def test_no_core_places_nothing() -> None:
    before = os.sched_getaffinity(0)
    placement = Placement(None)
    placement.roam()
    for sessions in (*[1] * 20, 9, 1):
        placement.step(sessions, drafts=True)
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(
    ("cores", "chosen"),
    [({3}, None), ({0, 1}, (0, 1)), ({2, 5, 7}, (2, 7)), ({0, 1, 2, 3}, (0, 3)), (set(range(8)), None)],
)
def test_two_services_are_placed_on_few_cores_alone(
    cores: set[int], chosen: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores)
    assert cores_of_two() == chosen


def test_openmp_binds_no_threads_to_cores() -> None:
    script = (
        "import os; cores = os.sched_getaffinity(0); import outrider, torch; assert os.sched_getaffinity(0) == cores"
    )
    bound = {**os.environ, "OMP_PROC_BIND": "true", "OMP_PLACES": "{0}", "GOMP_CPU_AFFINITY": "0"}
    subprocess.run([sys.executable, "-c", script], env=bound, check=True)
