"""Open files and connections: how many a process may have."""

from __future__ import annotations

import contextlib
import resource

_WANTED = 65_536  # more than all limits of connections together; some programs go through all numbers there are


def raise_limit() -> None:
    """Lets this process, and what it starts, have as many as the system allows: usual is 1024 unless asked."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _WANTED if hard == resource.RLIM_INFINITY else min(hard, _WANTED)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # macOS has a limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def limit() -> int:
    """How many this process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _WANTED if soft == resource.RLIM_INFINITY else soft
