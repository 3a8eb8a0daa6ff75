"""A child process that is asked for something: its answer on stdout, and its end before ours."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Sequence

from outrider import env
from outrider.child_output import to_stderr
from outrider.errors import StartupError
from outrider.stopping import stop_signals
from outrider.supervisor import describe_status

_TO_TIDY_S = 5.0  # what it was making, once it is told to end
_TO_DIE_S = 1.0  # of SIGKILL


async def answer_of(name: str, command: Sequence[str], *, timeout_s: float) -> bytes:
    """What the child, `outrider NAME`, prints. What it says meanwhile goes to our stderr, but for its complaint.

    Raises StartupError with that where it fails, and TimeoutError. A signal to end ends the child, then raises
    SystemExit with a shell's status for it.
    """
    process = await asyncio.create_subprocess_exec(
        *command, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, env=env.for_child(),
        process_group=0,  # a terminal's Ctrl-C is for us, who end it
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    loop = asyncio.get_running_loop()
    told = asyncio.gather(process.stdout.read(), _passed_on(process.stderr, f"outrider {name}: "), process.wait())
    signals, cut_short = stop_signals(), loop.create_future()
    for number in signals:
        loop.add_signal_handler(number, _note, cut_short, 128 + number)
    try:
        await asyncio.wait({told, cut_short}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if cut_short.done():
            raise SystemExit(cut_short.result())
        if not told.done():
            raise TimeoutError
    finally:
        await _end(process, told)
        for number in signals:
            loop.remove_signal_handler(number)
    out, complaint, status = told.result()
    if status != 0:
        raise StartupError(complaint or f"the {name} process ended with {describe_status(status)}")
    return out


def _note(cut_short: asyncio.Future[int], status: int) -> None:
    if not cut_short.done():
        cut_short.set_result(status)


async def _end(process: Process, told: asyncio.Future[tuple[bytes, str, int]]) -> None:
    """Ends the child and what it started. What left its group may live on, and holds nobody up."""
    for number, time_s in ((signal.SIGTERM, _TO_TIDY_S), (signal.SIGKILL, _TO_DIE_S)):
        if not told.done():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            await asyncio.wait({told}, timeout=time_s)
    told.cancel()
    process._transport.close()  # type: ignore[attr-defined]  # its pipes, which close by themselves once all let go
    await asyncio.gather(told, return_exceptions=True)


async def _passed_on(stream: asyncio.StreamReader, complaint: str) -> str:
    """Writes what the child says to our stderr as it comes; from the line on that begins so, it is returned."""
    last: list[str] = []
    async for line in stream:
        text = line.decode(errors="replace")
        if last or text.startswith(complaint):
            last.append(text)
        else:
            to_stderr(line)
    return "".join(last).strip().removeprefix(complaint)
