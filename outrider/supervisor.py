"""Child processes kept together: started, watched, restarted where they may be, and ended as one.

Knows nothing of what the parts do: a part is a command and a way to tell that it serves. Linux only.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from outrider import env
from outrider.backoff import Backoff, of_restarts
from outrider.child_output import ChildOutput, to_stderr
from outrider.errors import StartupError
from outrider.stopping import Stopping, leave_haste_to_supervisor, stop_signals

_PR_SET_PDEATHSIG = 1
_LAST_CHANCE_S = 1.0  # between SIGTERM for all that is left and SIGKILL


@dataclass(frozen=True)
class Part:
    """One child process. `ready` returns once the part serves; it is cancelled when the wait is over."""

    name: str
    command: tuple[str, ...]
    ready: Callable[[], Awaitable[None]]
    disposable: bool = False  # started again when it dies after having served
    grpc_speaks: bool = False  # gRPC's own lines are let through: handshakes that fail are told there


class PartFailed(Exception):
    """A part that the others need has died. `exit_code` is what the whole should exit with."""

    def __init__(self, name: str, status: int, tail: Sequence[str]) -> None:
        lines = "".join(f"\n  {name} | {line}" for line in tail)
        self.summary = f"{name} failed ({describe_status(status)})"
        super().__init__(f"{self.summary}; its last lines:{lines or ' none'}")
        self.exit_code = status if status > 0 else 1


def describe_status(status: int) -> str:
    """A process's end in words: "exit code 2" or "signal SIGKILL"."""
    return f"exit code {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"


def die_with_parent() -> None:
    """In a supervisor's child: asks the kernel for SIGKILL when the supervisor dies, and leaves haste at the end to it.

    Elsewhere: nothing.
    """
    parent = env.take_parent_pid()
    if parent is None:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        raise StartupError("the process that started this one is gone")
    leave_haste_to_supervisor()


class Supervisor:
    """Runs parts until one that is needed fails, or until it is told to stop.

    startup_timeout_s bounds the time until all parts serve, stop_timeout_s the time that they get to end by themselves.
    Parts start together, are waited for first to last and ended last to first, so a part may rely on those named before
    it. `output` gets what parts print on stderr.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        startup_timeout_s: float,
        stop_timeout_s: float,
        output: Callable[[bytes], None] = to_stderr,
        backoff: Callable[[], Backoff] = of_restarts,
    ) -> None:
        self._children = [_Child(part, output, self.say, backoff()) for part in parts]
        self._startup_timeout_s = startup_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._output = output
        self._stopping = Stopping()
        self._cut_short_by: signal.Signals | None = None

    def say(self, line: str) -> None:
        """One line of the supervisor's own: for a person, or as services' logs are."""
        if not sys.stderr.isatty():
            now = f"{datetime.now(UTC).replace(tzinfo=None).isoformat()}Z"  # as all other lines have it
            named = {"service": "serve", "module": __name__, "level": "warning", "timestamp": now}
            line = json.dumps({"event": line, **named})
        self._output(f"{line}\n".encode())

    def stop(self) -> None:
        """Ends the run in good order; a second call ends it at once."""
        self._stopping.ask()

    @property
    def _all_were_ready(self) -> bool:
        return all(child.was_ready for child in self._children)

    def _take(self, number: signal.Signals) -> None:
        if not (self._stopping.asked.is_set() or self._all_were_ready):
            self._cut_short_by = number
        self.stop()

    async def run(self, when_ready: Callable[[], Awaitable[None]]) -> int:
        """Starts the parts, awaits `when_ready()` once all serve, and goes on until stop() or a signal to end.

        Returns the exit code: 0, or a shell's for the signal that came before all served. Raises PartFailed when a
        needed part dies and StartupError when the parts are not ready in time; every child has ended when this returns
        or raises.
        """
        loop = asyncio.get_running_loop()
        signals = stop_signals()
        for number in signals:
            loop.add_signal_handler(number, self._take, number)
        stopped = asyncio.create_task(self._stopping.asked.wait())
        tasks: set[asyncio.Task[Any]] = {asyncio.create_task(child.keep()) for child in self._children}
        tasks |= {stopped, asyncio.create_task(self._start(when_ready))}
        try:
            while not stopped.done():
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                tasks -= done
                for task in done:
                    task.result()
        except PartFailed as failed:
            if self._all_were_ready:
                self.say(f"{failed.summary}; ending the others")
            raise
        finally:
            self._stopping.asked.set()  # from here on stop() means at once
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._end()
            for number in signals:
                loop.remove_signal_handler(number)
        return 0 if self._cut_short_by is None else 128 + self._cut_short_by

    async def _start(self, when_ready: Callable[[], Awaitable[None]]) -> None:
        try:
            async with asyncio.timeout(self._startup_timeout_s):
                for child in self._children:
                    await child.wait_ready()
        except TimeoutError:
            late = next(child.part.name for child in self._children if not child.was_ready)
            raise StartupError(f"{late} did not become ready within {self._startup_timeout_s:g} s") from None
        await when_ready()

    async def _end(self) -> None:
        """Ends the parts: SIGTERM, then SIGKILL for what is left when time is up or stop() comes again."""
        in_order = asyncio.create_task(self._terminate())
        killed = asyncio.create_task(self._stopping.hurry.wait())
        await asyncio.wait({in_order, killed}, timeout=self._stop_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not (in_order.done() or killed.done()):  # one that hangs must not cost those before it their own end
            for child in self._children:
                child.signal(signal.SIGTERM)
            await asyncio.wait({in_order, killed}, timeout=_LAST_CHANCE_S, return_when=asyncio.FIRST_COMPLETED)
        late = [child for child in self._children if child.running]
        if late:
            self.say(f"ending {' and '.join(child.part.name for child in late)} by force")
        for child in late:
            child.signal(signal.SIGKILL)
        for task in (in_order, killed):
            task.cancel()
        await asyncio.gather(in_order, killed, return_exceptions=True)
        await asyncio.gather(*(child.wait() for child in late))

    async def _terminate(self) -> None:
        """Sends SIGTERM from last to first; to all at once where not all have served: nobody relies on them yet."""
        at_once = not self._all_were_ready
        for child in self._children if at_once else ():
            child.signal(signal.SIGTERM)
        for child in reversed(self._children):
            if not at_once:
                child.signal(signal.SIGTERM)
            await child.wait()


class _Child:
    """A part's process, the one after it if it is restarted, and the last lines of both."""

    def __init__(
        self, part: Part, output: Callable[[bytes], None], say: Callable[[str], None], backoff: Backoff
    ) -> None:
        self.part = part
        self.was_ready = False
        self._say = say
        self._backoff = backoff
        self._printed = ChildOutput(output)
        self._process: asyncio.subprocess.Process | None = None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def _is_replaced(self) -> bool:
        return self.part.disposable and self.was_ready

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None and self.running:
            self._process.send_signal(number)

    async def wait(self) -> int:
        """The exit status, negative for a signal, once the process has ended and all it printed is passed on."""
        if self._process is None:
            return 0
        status = await self._process.wait()
        await self._printed.drain()
        return status

    async def wait_ready(self) -> None:
        await self.part.ready()
        self.was_ready = True

    async def keep(self) -> None:
        """Runs the part for ever. Raises PartFailed or StartupError when it ends and may not be started again."""
        while True:
            began_s = time.monotonic()
            try:
                status = await self._live()
            except StartupError as error:
                if not self._is_replaced:
                    raise
                end = str(error)
            else:
                if not self._is_replaced:
                    raise PartFailed(self.part.name, status, self._printed.last_lines())
                end = f"{self.part.name} ended ({describe_status(status)})"
            self._backoff.lasted(time.monotonic() - began_s)
            delay_s = self._backoff.next_s()
            self._say(f"{end}; starting it again in {delay_s:g} s")
            await asyncio.sleep(delay_s)

    async def _live(self) -> int:
        """One process from its start to its end; says when it serves, if it is not the first. Returns its status."""
        await self._spawn()
        if not self.was_ready:
            return await self.wait()
        news = asyncio.create_task(self._say_ready())
        try:
            return await self.wait()
        finally:
            news.cancel()
            await asyncio.gather(news, return_exceptions=True)

    async def _say_ready(self) -> None:
        try:
            await self.part.ready()
        except Exception as error:  # the process runs on, whether or not it is of use
            self._say(f"{self.part.name} does not serve again: {error}")
        else:
            self._say(f"{self.part.name} serves again")

    async def _spawn(self) -> None:
        """Starts the process. What it says on stdout is for who starts it alone."""
        try:
            with self._printed.opened() as write_end:
                self._process = await asyncio.create_subprocess_exec(
                    *self.part.command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=write_end,
                    env=env.for_child(grpc_speaks=self.part.grpc_speaks),
                    process_group=0,  # a terminal's Ctrl-C is for the supervisor, which ends its parts in order
                )
        except OSError as error:
            raise StartupError(f"cannot start {self.part.name}: {error}") from error
