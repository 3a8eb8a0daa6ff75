"""Real child processes, a line of Python each; nothing waits for time but for what the children print."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from outrider import supervisor as supervisor_module
from outrider.backoff import Backoff
from outrider.errors import StartupError
from outrider.supervisor import Part, PartFailed, Supervisor, die_with_parent

UP = "import os, signal, sys; print('{name} up', os.getpid(), file=sys.stderr); signal.pause()"
POLITE = (
    "import os, signal, sys\n"
    "def end(*_): os.write(2, b'{name} down\\n'); sys.exit(0)\n"
    "signal.signal(signal.SIGTERM, end)\n"
    "print('{name} up', os.getpid(), file=sys.stderr)\n"
    "while True: signal.pause()"
)
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + UP
FAILING = "import sys; print('unheard'); sys.stderr.write('a line\\nthe reason'); sys.exit(3)"


class Output:
    """Collects what the parts print; `seen` waits for it."""

    def __init__(self) -> None:
        self.text = ""
        self._changed = asyncio.Event()

    def __call__(self, data: bytes) -> None:
        self.text += data.decode()
        self._changed.set()

    async def seen(self, text: str, times: int = 1) -> None:
        while self.text.count(text) < times:
            self._changed.clear()
            await self._changed.wait()

    def pid(self, name: str) -> int:
        """The process id that the part printed last."""
        return int(self.text.rpartition(f"{name} up ")[2].split()[0])


def part(name: str, script: str, ready: Callable[[], Awaitable[None]], *, disposable: bool = False) -> Part:
    return Part(name, (sys.executable, "-ISc", script.format(name=name)), ready, disposable)


def up(output: Output, name: str, script: str = UP, *, disposable: bool = False) -> Part:
    return part(name, script, lambda: output.seen(f"{name} up"), disposable=disposable)


def supervisor(output: Output, *parts: Part, startup_timeout_s: float = 60, stop_timeout_s: float = 60) -> Supervisor:
    return Supervisor(
        parts,
        startup_timeout_s=startup_timeout_s,
        stop_timeout_s=stop_timeout_s,
        output=output,
        backoff=lambda: Backoff(first_s=0.001),
    )


async def never() -> None:
    await asyncio.Event().wait()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.asyncio
async def test_ready_comes_once_all_serve_and_parts_end_last_to_first() -> None:
    output = Output()
    running = supervisor(output, up(output, "verify", POLITE), up(output, "gateway", POLITE))

    async def when_ready() -> None:
        assert "verify up" in output.text
        assert "gateway up" in output.text
        running.stop()

    await running.run(when_ready)
    assert output.text.index("gateway down") < output.text.index("verify down")
    assert not alive(output.pid("verify"))
    assert not alive(output.pid("gateway"))


@pytest.mark.asyncio
async def test_a_needed_part_that_dies_ends_all_and_is_named_with_its_last_lines() -> None:
    output = Output()
    running = supervisor(output, part("verify", FAILING, never), up(output, "gateway", POLITE))
    with pytest.raises(PartFailed) as failure:
        await running.run(never)
    assert failure.value.exit_code == 3
    message = str(failure.value)
    assert message.startswith("verify failed (exit code 3)")
    assert "verify | a line" in message
    assert "verify | the reason" in message
    assert "unheard" not in message + output.text


@pytest.mark.asyncio
async def test_a_needed_part_killed_later_is_named_with_the_signal() -> None:
    output = Output()
    running = supervisor(output, up(output, "verify"))

    async def when_ready() -> None:
        os.kill(output.pid("verify"), signal.SIGKILL)

    with pytest.raises(PartFailed, match=r"verify failed \(signal SIGKILL\)") as failure:
        await running.run(when_ready)
    assert failure.value.exit_code == 1
    assert "verify failed (signal SIGKILL); ending the others" in output.text


@pytest.mark.asyncio
async def test_a_disposable_part_is_started_again() -> None:
    output = Output()
    running = supervisor(output, up(output, "verify"), up(output, "draft", disposable=True))

    async def when_ready() -> None:
        first = output.pid("draft")
        for lives in (2, 3):
            os.kill(output.pid("draft"), signal.SIGKILL)
            await output.seen("draft up", times=lives)
            await output.seen("draft serves again", times=lives - 1)
        assert output.pid("draft") != first
        assert output.text.count("draft ended (signal SIGKILL); starting it again") == 2
        running.stop()

    await running.run(when_ready)
    assert not alive(output.pid("draft"))


@pytest.mark.asyncio
async def test_a_restarted_part_that_does_not_come_back_to_serving_says_why() -> None:
    output = Output()
    lives = 0

    async def ready() -> None:
        nonlocal lives
        lives += 1
        await output.seen("draft up", times=lives)
        if lives > 1:
            raise StartupError("it was refused")

    running = supervisor(output, part("draft", UP, ready, disposable=True))

    async def when_ready() -> None:
        os.kill(output.pid("draft"), signal.SIGKILL)
        await output.seen("draft does not serve again: it was refused")
        running.stop()

    await running.run(when_ready)


@pytest.mark.asyncio
async def test_a_disposable_part_that_cannot_be_started_again_is_tried_until_it_can(tmp_path: Path) -> None:
    output, python = Output(), tmp_path / "python"
    python.symlink_to(sys.executable)
    drafter = up(output, "draft", disposable=True)
    drafter = dataclasses.replace(drafter, command=(str(python), *drafter.command[1:]))
    running = supervisor(output, up(output, "verify", POLITE), drafter)

    async def when_ready() -> None:
        python.unlink()
        os.kill(output.pid("draft"), signal.SIGKILL)
        await output.seen("cannot start draft: ")
        num_open = len(os.listdir("/proc/self/fd"))
        await output.seen("cannot start draft: ", times=4)
        assert len(os.listdir("/proc/self/fd")) <= num_open  # fewer where an earlier test's go meanwhile
        python.symlink_to(sys.executable)
        await output.seen("draft serves again")
        running.stop()

    await running.run(when_ready)
    assert "verify down" in output.text
    assert not alive(output.pid("draft"))


@pytest.mark.asyncio
async def test_a_disposable_part_that_never_served_fails_the_start() -> None:
    output = Output()
    running = supervisor(output, up(output, "verify"), part("draft", FAILING, never, disposable=True))
    with pytest.raises(PartFailed, match="draft failed"):
        await running.run(never)


@pytest.mark.asyncio
async def test_parts_that_are_late_are_named() -> None:
    output = Output()
    running = supervisor(output, part("verify", UP, never), startup_timeout_s=0.01)
    with pytest.raises(StartupError, match=r"verify did not become ready within 0\.01 s"):
        await running.run(never)


@pytest.mark.asyncio
async def test_a_command_that_does_not_exist() -> None:
    running = supervisor(Output(), Part("verify", ("/nowhere/outrider",), never))
    with pytest.raises(StartupError, match="cannot start verify"):
        await running.run(never)


@pytest.mark.asyncio
@pytest.mark.parametrize("stop_timeout_s", [0.01, 3600])
async def test_a_part_that_ignores_sigterm_is_killed_when_time_is_up_or_on_the_second_stop(
    stop_timeout_s: float,
) -> None:
    output = Output()
    running = supervisor(output, up(output, "verify", DEAF), stop_timeout_s=stop_timeout_s)

    async def when_ready() -> None:
        running.stop()
        if stop_timeout_s == 3600:
            running.stop()

    await running.run(when_ready)
    assert "ending verify by force" in output.text
    assert not alive(output.pid("verify"))


@pytest.mark.asyncio
async def test_one_that_hangs_does_not_cost_those_before_it_their_own_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "_LAST_CHANCE_S", 3600.0)  # however slow the machine is
    output = Output()
    running = supervisor(output, up(output, "verify", POLITE), up(output, "gateway", DEAF), stop_timeout_s=0.01)

    async def when_ready() -> None:
        running.stop()

    task = asyncio.create_task(running.run(when_ready))
    await output.seen("verify down")
    running.stop()
    await task
    assert "gateway by force" in output.text
    assert not alive(output.pid("gateway"))


@pytest.mark.asyncio
@pytest.mark.usefixtures("hangups")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_signals_stop_it(number: signal.Signals) -> None:
    output = Output()

    async def when_ready() -> None:
        os.kill(os.getpid(), number)

    assert await supervisor(output, up(output, "verify", POLITE)).run(when_ready) == 0
    assert "verify down" in output.text


@pytest.mark.asyncio
async def test_a_signal_before_all_serve_is_told_by_the_exit_code() -> None:
    output = Output()

    async def ready() -> None:
        await output.seen("verify up")
        os.kill(os.getpid(), signal.SIGTERM)
        await never()

    assert await supervisor(output, part("verify", POLITE, ready)).run(never) == 128 + signal.SIGTERM
    assert "verify down" in output.text


@pytest.mark.asyncio
async def test_parts_end_all_at_once_where_one_has_never_served() -> None:
    """One that loads hears no SIGTERM before it is done, and those before it need not wait for it."""
    output = Output()

    async def fail() -> None:
        await output.seen("verify up")
        await output.seen("draft up")
        raise StartupError("no")

    parts = part("verify", POLITE, fail), up(output, "draft", DEAF)
    task = asyncio.create_task(supervisor(output, *parts, stop_timeout_s=3600).run(never))
    await output.seen("verify down")
    os.kill(output.pid("draft"), signal.SIGKILL)
    with pytest.raises(StartupError, match="no"):
        await task


@pytest.mark.asyncio
async def test_a_failure_after_ready_is_raised() -> None:
    async def when_ready() -> None:
        raise StartupError("no")

    output = Output()
    with pytest.raises(StartupError, match="no"):
        await supervisor(output, up(output, "verify")).run(when_ready)
    assert not alive(output.pid("verify"))


def test_children_die_with_a_supervisor_that_is_killed() -> None:
    child = "from outrider.supervisor import die_with_parent; die_with_parent();" + UP.format(name="verify")
    script = f"""
import asyncio, sys
from outrider.supervisor import Part, Supervisor
async def never(): await asyncio.Event().wait()
part = Part("verify", (sys.executable, "-c", {child!r}), never)
asyncio.run(Supervisor([part], startup_timeout_s=600, stop_timeout_s=1).run(never))
"""
    with subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE) as parent:
        assert parent.stderr is not None
        pid = int(parent.stderr.readline().split()[-1])
        watch = os.pidfd_open(pid)
        parent.kill()
        ended, _, _ = select.select([watch], [], [], 60)
        os.close(watch)
    assert ended


def test_a_child_whose_parent_is_already_gone_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_PARENT_PID", "1")
    with pytest.raises(StartupError, match="gone"):
        die_with_parent()
    die_with_parent()  # the variable was taken: no child of this process sees it


def test_parts_print_to_a_terminal_when_we_do(monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import sys; sys.stderr.write(str(sys.stderr.isatty()) + '\\n12%\\r100%\\n'); sys.exit(1)"
    ours, terminal = os.openpty()
    with os.fdopen(ours), os.fdopen(terminal, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        with pytest.raises(PartFailed) as failure:
            asyncio.run(run_only(part("verify", script, never)))
    assert "verify | True" in str(failure.value)
    assert "verify | 100%" in str(failure.value)  # what was drawn over is not repeated


async def run_only(only: Part) -> None:
    await supervisor(Output(), only).run(never)


def test_its_own_lines_tell_the_time_as_all_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    output = Output()
    monkeypatch.setattr("sys.stderr", io.StringIO())
    supervisor(output).say("something")
    line = json.loads(output.text)
    assert line["event"] == "something"
    assert re.fullmatch(r"[\d-]{10}T[\d:]{8}(\.\d+)?Z", line["timestamp"])
