"""What child processes print on stderr: passed on as it comes, and its last lines kept. Linux only."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import sys
import termios
from collections import deque
from collections.abc import Callable, Generator

from outrider.lossy import lossy

_TAIL_LINES = 12
_DRAIN_S = 1.0


def to_stderr(data: bytes) -> None:
    """Passes what a part says on to the person at the terminal."""
    lossy(sys.stderr).write_bytes(data)


class ChildOutput:
    """The output of a process and of those that follow it, one at a time. `pass_on` gets all that they print."""

    def __init__(self, pass_on: Callable[[bytes], None]) -> None:
        self._pass_on = pass_on
        self._tail = _Tail()
        self._read_end = -1
        self._ended = asyncio.Event()

    @contextlib.contextmanager
    def opened(self) -> Generator[int]:
        """What a new process is to have for stderr: a terminal if we have one, so that it looks the same there."""
        self._read_end, write_end = _open_terminal() if sys.stderr.isatty() else os.pipe()
        self._ended.clear()
        asyncio.get_running_loop().add_reader(self._read_end, self._take)
        try:
            yield write_end
        except BaseException:  # there is no process
            self._close()
            raise
        finally:
            os.close(write_end)

    async def drain(self) -> None:
        """Waits for the last output; a grandchild that still holds the pipe open does not hold us up."""
        try:
            async with asyncio.timeout(_DRAIN_S):
                await self._ended.wait()
        except TimeoutError:
            self._close()

    def last_lines(self) -> list[str]:
        """The last lines, at most a dozen; of a line drawn over by carriage returns, the final state."""
        return self._tail.lines()

    def _take(self) -> None:
        try:
            data = os.read(self._read_end, 65536)
        except OSError:  # a terminal whose other end is closed
            data = b""
        if data:
            self._tail.feed(data)
            self._pass_on(data)
        else:
            self._close()

    def _close(self) -> None:
        if self._ended.is_set():  # `drain` was late by no more than a turn of the loop
            return
        asyncio.get_running_loop().remove_reader(self._read_end)
        os.close(self._read_end)
        self._ended.set()


class _Tail:
    """The last lines of a stream of bytes."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_TAIL_LINES)
        self._partial = b""

    def feed(self, data: bytes) -> None:
        *whole, rest = (self._partial + data).split(b"\n")
        self._lines.extend(self._text(line) for line in whole if line.strip())
        self._partial = rest[-4096:]

    def lines(self) -> list[str]:
        rest = [self._text(self._partial)] if self._partial.strip() else []
        return [*self._lines, *rest][-_TAIL_LINES:]

    @staticmethod
    def _text(line: bytes) -> str:
        return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")


def _open_terminal() -> tuple[int, int]:
    """A pseudo-terminal as wide as ours: (end to read, end to write)."""
    read_end, write_end = pty.openpty()
    termios.tcsetwinsize(write_end, termios.tcgetwinsize(sys.stderr.fileno()))
    return read_end, write_end
