"""Open files and connections: how many a process may have."""

from __future__ import annotations

import contextlib
import resource

from outrider.errors import StartupError

_WANTED = 65_536  # more than all limits of connections together; some programs go through all numbers there are
_LEAST = 128  # for what is loaded, logs, metrics, and some connections; with some twenty, gRPC aborts the process


def raise_limit() -> None:
    """Lets this process, and what it starts, have as many as the system allows: usual is 1024 unless asked."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _WANTED if hard == resource.RLIM_INFINITY else min(hard, _WANTED)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # macOS has a limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def check() -> None:
    """StartupError where a process that serves may have too few to do so."""
    if limit() < _LEAST:
        raise StartupError(f"the limit of open files (ulimit -n) is {limit()}; at least {_LEAST} are needed")


def limit() -> int:
    """How many this process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _WANTED if soft == resource.RLIM_INFINITY else soft
