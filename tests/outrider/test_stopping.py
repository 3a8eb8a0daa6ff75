"""Which signals count, and how often."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from outrider.stopping import cancelled, first_of
from tests.outrider.test_supervisor import Output, supervisor, up

SCRIPT = """
import asyncio, signal
from outrider.stopping import on_signals
from outrider.supervisor import die_with_parent

async def main():
    num_asked, heard = 0, asyncio.Event()
    def stop():
        nonlocal num_asked
        num_asked += 1
    die_with_parent()
    on_signals(stop)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, heard.set)  # those before it are heard by then
    for number in (signal.SIGTERM, signal.SIGTERM, {last}, signal.SIGUSR1):
        signal.raise_signal(number)
    await heard.wait()
    print(num_asked)

asyncio.run(main())
"""

SWALLOWING = """
import signal
from outrider.stopping import tidied_when_stopped

class Finalized:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)

with tidied_when_stopped():
    try:
        Finalized()
        print("swallowed", flush=True)
        signal.raise_signal(signal.SIGTERM)
        print("and so was this")
    finally:
        signal.raise_signal(signal.SIGTERM)
        print("tidied", flush=True)
"""


def test_a_signal_after_one_that_a_finalizer_swallowed_ends_the_block_and_no_other_cuts_its_tidying_short() -> None:
    ended = subprocess.run([sys.executable, "-c", SWALLOWING], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (-signal.SIGTERM, "swallowed\ntidied\n")
    assert "Exception ignored" in ended.stderr


@pytest.mark.asyncio
async def test_a_cancel_of_who_ends_others_is_its_own() -> None:
    other = asyncio.create_task(asyncio.Event().wait())
    ending = asyncio.create_task(cancelled(other))
    await asyncio.sleep(0)  # until it waits
    ending.cancel()
    await asyncio.wait([ending])
    assert (ending.cancelled(), other.cancelled()) == (True, True)


@pytest.mark.asyncio
async def test_of_those_that_were_not_first_only_the_tasks_go_on() -> None:
    going_on = asyncio.create_task(asyncio.Event().wait())
    before = asyncio.all_tasks()
    await first_of(going_on, asyncio.Event().wait(), asyncio.sleep(0))
    await first_of(going_on, asyncio.Event().wait(), timeout_s=0)
    assert asyncio.all_tasks() == before
    await cancelled(going_on)


@pytest.mark.usefixtures("hangups")
@pytest.mark.parametrize(
    ("has_supervisor", "last", "num_asked"),
    [
        (False, "signal.SIGTERM", 3),
        (True, "signal.SIGTERM", 1),
        (True, "signal.SIGINT", 2),
        (True, "signal.SIGHUP", 2),
    ],
)
def test_a_part_is_not_hurried_by_the_sigterm_of_its_supervisor(
    has_supervisor: bool, last: str, num_asked: int
) -> None:
    parent = {"OUTRIDER_PARENT_PID": str(os.getpid())} if has_supervisor else {}
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(last=last)],
        env={**os.environ, **parent},
        stdout=subprocess.PIPE,
        check=True,
    )
    assert int(ended.stdout.split()[-1]) == num_asked


@pytest.mark.asyncio
async def test_a_hangup_that_is_ignored_stays_so() -> None:
    """nohup has its command ignore it."""
    output = Output()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)

    async def when_ready() -> None:
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        running.stop()

    running = supervisor(output, up(output, "verify"))
    try:
        await running.run(when_ready)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
