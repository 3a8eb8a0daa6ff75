"""stdout and stderr for processes that must not wait for whoever reads them: what there is no room for is lost.

Pipes and sockets are not waited for: O_NONBLOCK would be set for all who share one, so every write finds out by itself.
A file loses what its disk has no room for. Terminals are written as it comes.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import select
import socket
import stat
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TextIO

_Put = Callable[[bytes], int]  # writes a piece (see _PIECE), and says how many bytes it wrote; OSError: none
_PIECE = select.PIPE_BUF  # what a pipe takes whole


@functools.lru_cache(maxsize=2)  # a process has stdout and stderr
def lossy(stream: TextIO) -> Lossy:
    """The one Lossy of a stream, shared by all who write to it."""
    return Lossy(stream)


class Lossy:
    """A stream of lines. `service` is named by the line that tells how many were lost; without it none does."""

    def __init__(self, stream: TextIO) -> None:
        self.service = ""
        self._stream = stream
        self._put = _put_of(stream)
        self._lock = threading.Lock()
        self._lost = 0
        self._broken_off = False  # what was written last is no whole line
        self._skips = False  # the line that is being written is lost

    @property
    def is_direct(self) -> bool:
        """Whether lines go straight to a pipe, a socket or a file: what finds no room there is lost by whole lines."""
        return self._put is not None

    def write(self, text: str) -> None:
        """Writes lines, in pieces or whole."""
        if self._put is not None:
            self.write_bytes(text.encode(errors="backslashreplace"))
            return
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)

    def flush(self) -> None:
        """Flushes the stream, unless lines go straight to where it leads: nothing is held back there."""
        if self._put is None:
            with contextlib.suppress(OSError, ValueError):
                self._stream.flush()

    def write_bytes(self, data: bytes) -> None:
        """Writes lines as bytes, at once."""
        if self._put is None:
            with contextlib.suppress(OSError, ValueError):
                self._stream.buffer.write(data)
                self._stream.buffer.flush()
            return
        with self._lock:
            for line in io.BytesIO(data):
                self._write_line(line, self._put)

    def _write_line(self, line: bytes, put: _Put) -> None:
        ends = line.endswith(b"\n")
        if self._skips or (self._lost and not self._writes(self._news(), put)):
            written = False
        else:
            self._lost = 0
            written = self._writes(line, put)
        self._lost += ends and not written
        self._skips = not (ends or written)

    def _news(self) -> bytes:
        """What comes before the next line that there is room for."""
        end = b"\n" * self._broken_off
        if not self.service:
            return end
        now = f"{datetime.now(UTC).replace(tzinfo=None).isoformat()}Z"  # as all other lines have it
        named = {"service": self.service, "module": __name__, "level": "warning", "timestamp": now}
        event = {"event": "lines are lost that there was no room for", "num_lines": self._lost}
        return end + json.dumps({**event, **named}).encode() + b"\n"

    def _writes(self, data: bytes, put: _Put) -> bool:
        """Writes data; whether there was room for all of it."""
        for start in range(0, len(data), _PIECE):
            piece = data[start : start + _PIECE]
            try:
                written = put(piece)
            except OSError:
                written = 0
            if written:
                self._broken_off = not piece[:written].endswith(b"\n")
            if written < len(piece):
                return False
        return True


def _put_of(stream: TextIO) -> _Put | None:
    """What writes to where a stream leads; None where that is neither a pipe nor a socket nor a file."""
    try:
        number = stream.fileno()
        mode = os.fstat(number).st_mode
    except (OSError, ValueError):
        return None
    if stat.S_ISSOCK(mode):
        return functools.partial(_send, number)
    if stat.S_ISREG(mode):
        return functools.partial(os.write, number)
    if not stat.S_ISFIFO(mode):
        return None
    poll = select.poll()
    poll.register(number, select.POLLOUT)

    def put(piece: bytes) -> int:
        room = any(events & select.POLLOUT for _, events in poll.poll(0))  # for PIPE_BUF bytes, as Linux has it
        return os.write(number, piece) if room else 0

    return put


def _send(number: int, piece: bytes) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=os.dup(number)) as connection:  # of whatever family
        return connection.send(piece, socket.MSG_DONTWAIT)
