"""A child that is asked for something, and what it started."""

from __future__ import annotations

import os
import select
import signal
import sys

import pytest

from outrider import asked_child
from outrider.asked_child import answer_of

STARTS = """
import signal, subprocess, sys
sleeps = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", sleeps], stdout=subprocess.PIPE, start_new_session={apart})
child.stdout.readline()
print(child.pid, file=sys.stderr, flush=True)
child.wait()
"""


@pytest.mark.asyncio
@pytest.mark.parametrize("apart", [False, True])
async def test_a_child_of_the_child_that_holds_its_pipes_holds_nobody_up(
    apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    grandchildren: list[int] = []

    def take(line: bytes) -> None:
        grandchildren.append(os.pidfd_open(int(line)))
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(asked_child, "to_stderr", take)
    monkeypatch.setattr(asked_child, "_TO_TIDY_S", 0.1)
    monkeypatch.setattr(asked_child, "_TO_DIE_S", 0.1 if apart else 60.0)
    with pytest.raises(SystemExit):
        await answer_of("draft", (sys.executable, "-c", STARTS.format(apart=apart)), timeout_s=600.0)
    (grandchild,) = grandchildren
    if apart:
        signal.pidfd_send_signal(grandchild, signal.SIGKILL)
    assert select.select([grandchild], [], [], 60)[0]  # it has ended
    os.close(grandchild)
