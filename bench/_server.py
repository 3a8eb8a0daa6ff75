"""A server of any system for the time of a block: started, waited for, ended with all that it started."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from bench._systems import OURS_READY, Launch
from outrider import env
from outrider.errors import StartupError

_OURS_STARTUP_S = 900.0  # a model's first download included
_POLL_S = 0.1
_END_S = 10.0
_TAIL_CHARS = 2000
# Becomes a server of any system, to which the kernel's promise stays.
_DYING_WITH_US = """
import os, sys
from outrider.supervisor import die_with_parent
die_with_parent()
os.execvp(sys.argv[1], sys.argv[1:])
"""


def free_port(in_a_row: int = 1) -> int:
    """The first of so many TCP ports of the loopback interface that nobody has at the moment."""
    while True:
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            first = 0
            for offset in range(in_a_row):
                probe = held.enter_context(socket.socket())
                probe.bind(("127.0.0.1", first + offset))
                first = first or probe.getsockname()[1]
            return first


@dataclass(frozen=True)
class Served:
    """A server that is up: where it listens, and its first process."""

    url: str
    pid: int


@contextlib.contextmanager
def serving(launch: Launch, port: int, log: Path, timeout_s: float) -> Iterator[Served]:
    """Yields once `/health` says 200, and the server that it is ready, if it is to.

    StartupError, with its log's end, for one that does not come up, and for one that cannot be run.

    The server has a process group of its own, which is killed where it does not end by SIGTERM, and dies with us.
    """
    url = f"http://127.0.0.1:{port}"
    with _running(launch, log) as (process, said_before):

        def ready() -> bool:
            return launch.ready.encode() in log.read_bytes()[said_before:]

        trouble = _until_healthy(process, url, timeout_s, ready)
        if trouble:
            tail = log.read_bytes()[-_TAIL_CHARS:].decode(errors="replace")
            raise StartupError(f"{' '.join(launch.command[:4])} ... {trouble}; its log ends with:\n{tail}")
        yield Served(url, process.pid)


@contextlib.contextmanager
def ours_serving(
    flags: Sequence[str], port: int | None = None, environment: Mapping[str, str] | None = None
) -> Iterator[Served]:
    """`outrider serve` with these flags for the time of the block; see serving."""
    port = port or free_port()
    command = [sys.executable, "-P", "-m", "outrider", "serve", f"--port={port}", *flags]
    launch = Launch(command, dict(environment or {}), ready=OURS_READY)
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(launch, port, Path(folder) / "serve.log", _OURS_STARTUP_S) as served,
    ):
        yield served


@contextlib.contextmanager
def _running(launch: Launch, log: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Runs a server: its process, and how long the log was before. StartupError where it cannot be run."""
    if shutil.which(launch.command[0]) is None:
        raise StartupError(f"{launch.command[0]} cannot be run: there is no such program")
    try:
        with log.open("ab") as sink:
            said_before = sink.tell()
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _DYING_WITH_US, *launch.command], stdin=subprocess.DEVNULL, stdout=sink,
                env={**env.for_child(), **launch.environment}, stderr=sink, start_new_session=True,
            )  # fmt: skip
    except OSError as error:
        raise StartupError(f"{launch.command[0]} cannot be run: {error}") from error
    try:
        yield process, said_before
    finally:
        _end(process)


def _until_healthy(
    process: subprocess.Popen[bytes], url: str, timeout_s: float, ready: Callable[[], bool]
) -> str | None:
    """Waits until a server is healthy; what went wrong, if anything did."""
    deadline = time.monotonic() + timeout_s
    with httpx.Client(base_url=url, trust_env=False) as client:
        while True:
            with contextlib.suppress(httpx.TransportError):
                if client.get("/health").status_code == 200 and ready():
                    return None
            if process.poll() is not None:
                return f"ended with {process.returncode}"
            if time.monotonic() > deadline:
                return f"did not come up in {timeout_s:.0f} s"
            time.sleep(_POLL_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, and SIGKILL for whatever of its group is left."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
