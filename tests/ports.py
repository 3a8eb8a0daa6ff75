"""Ports of the loopback interface for processes that are told where to listen."""

from __future__ import annotations

import socket

_held: list[socket.socket] = []


def free_port() -> int:
    """A port that no connection takes by chance while this process lives; one that is told of it may listen there."""
    probe = socket.socket()
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    probe.bind(("127.0.0.1", 0))
    _held.append(probe)
    return probe.getsockname()[1]
