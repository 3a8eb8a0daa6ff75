"""Renders one chat template in a process of its own, which the kernel ends when it takes too long or too much memory.

Knows nothing of what is rendered. The gateway has the same for its event loop; here the caller waits.
"""

from __future__ import annotations

import socket
import subprocess
import weakref
from collections.abc import Mapping
from typing import Any, Final

from outrider import env, isolated, template_worker
from outrider.errors import StartupError
from outrider.template_worker import (
    OUT_OF_TIME,
    TIME_LIMIT_S,
    WALL_FACTOR,
    Failed,
    Load,
    Loaded,
    Render,
    Rendered,
    Reply,
    frame,
    was_killed,
)

# Far above the longest context, far below the memory that the process may take.
MAX_CHARS: Final = 2**23


class Refused(StartupError):
    """The template does not take this conversation; it may take others."""


class _Killed(StartupError):
    """Somebody ended the process, which is not the template's doing."""


class TemplateProcess:
    """A template that compiles. `place`: what errors call it, such as its file. StartupError for one that does not."""

    def __init__(self, place: str, source: str, variables: Mapping[str, str]) -> None:
        self._place = place
        self._load = Load(source, dict(variables), TIME_LIMIT_S)
        self._worker: _Worker | None = None
        self._start()

    def render(self, context: dict[str, Any]) -> str:
        """The text. Refused where the template refuses the context, StartupError where it breaks or takes too long."""
        reply = self._ask(Render(context, MAX_CHARS))
        if isinstance(reply, Rendered):
            return reply.text
        assert isinstance(reply, Failed)
        if reply.kind == "refused":
            raise Refused(f"the chat template {self._place} refuses a conversation: {_line(reply.message)}")
        raise self._failure(reply.message or f"it writes more than {MAX_CHARS} characters")

    def close(self) -> None:
        """Ends the process, which ends with this object too; another render starts a new one."""
        if self._worker is not None:
            self._worker.end()
        self._worker = None

    def _start(self) -> _Worker:
        self._worker = _Worker()
        reply = self._exchange(self._worker, self._load)
        if isinstance(reply, Failed):
            self.close()
            raise self._failure(reply.message)
        assert isinstance(reply, Loaded)
        return self._worker

    def _ask(self, request: Render) -> Reply:
        worker = self._worker
        if worker is None or not worker.is_alive():  # whoever stops a service may end all its processes
            self.close()
            worker = self._start()
        try:
            return self._exchange(worker, request)
        except _Killed:
            return self._exchange(self._start(), request)

    def _exchange(self, worker: _Worker, request: Load | Render) -> Reply:
        """A request's reply. Whatever else comes of it, a process in the middle of something is of no more use."""
        try:
            return worker.ask(request)
        except UnicodeEncodeError as error:
            self.close()
            raise self._failure("it, or what it is to render, is not Unicode text") from error
        except (EOFError, OSError) as error:
            self.close()
            if was_killed(worker.status):
                raise _Killed(f"the process that renders the chat template {self._place} was killed") from error
            late = worker.status == -OUT_OF_TIME
            raise self._failure(
                f"it took more than {TIME_LIMIT_S:g} seconds" if late else "it ended its process"
            ) from error
        except BaseException:
            self.close()
            raise

    def _failure(self, reason: str) -> StartupError:
        return StartupError(f"the chat template {self._place} cannot be rendered: {_line(reason)}")


class _Worker:
    """The process, and our end of its pipe."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # A session of its own: Ctrl-C and signals to our group are for us, who finish what is under way.
            end = theirs.fileno()
            process = subprocess.Popen(
                isolated.command(template_worker, packages=template_worker.PACKAGES), stdin=end, stdout=end,
                env=env.for_worker(), start_new_session=True,
            )  # fmt: skip
        # Its own clock comes before this, unless the process gets next to no core.
        ours.settimeout(WALL_FACTOR * TIME_LIMIT_S)
        self._process, self._pipe = process, ours
        self.end = weakref.finalize(self, _end, process, ours)

    @property
    def status(self) -> int | None:
        """How it ended, once it has."""
        return self._process.returncode

    def is_alive(self) -> bool:
        """Whether nobody has ended it."""
        return self._process.poll() is None

    def ask(self, request: Load | Render) -> Reply:
        """One exchange; EOFError or OSError when the process is gone."""
        self._pipe.sendall(frame(request))
        size = template_worker.body_size(self._read(template_worker.HEADER_BYTES))
        return template_worker.reply_of(self._read(size))

    def _read(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            part = self._pipe.recv(min(size - len(found), 2**20))
            if not part:
                raise EOFError
            found += part
        return bytes(found)


def _line(text: str) -> str:
    return " ".join(text.split())


def _end(process: subprocess.Popen[bytes], pipe: socket.socket) -> None:
    pipe.close()
    process.kill()
    process.wait()
