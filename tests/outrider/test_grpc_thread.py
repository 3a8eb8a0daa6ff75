"""gRPC's thread asks for short slices of time, no other thread does, and a system without them is left alone."""

from __future__ import annotations

import asyncio
import ctypes
import platform
import sys
import threading

import grpc.aio
import pytest

from outrider.grpc_thread import _SCHED_SETATTR, let_grpc_in_first

SHORT_NS = 100_000


def slices() -> dict[str, int]:
    """The time slice of each thread by name, as the kernel tells it: runtime of struct sched_attr."""
    found: dict[str, int] = {}
    for thread in threading.enumerate():
        attributes = (ctypes.c_uint64 * 6)()
        asked = _SCHED_SETATTR[platform.machine()] + 1  # sched_getattr
        if ctypes.CDLL(None).syscall(asked, thread.native_id, attributes, ctypes.sizeof(attributes), 0) == 0:
            found[thread.name] = attributes[3]
    return found


async def serve_and_look() -> dict[str, int]:
    server = grpc.aio.server()
    let_grpc_in_first()
    found = slices()
    await server.stop(None)
    return found


def kernel() -> tuple[int, ...]:
    return tuple(int(number) for number in platform.release().split("-")[0].split(".")[:2])


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in _SCHED_SETATTR or kernel() < (6, 12),
    reason="the kernel has no slices of a thread's own",
)
def test_grpcs_thread_alone_has_short_ones() -> None:
    found = asyncio.run(serve_and_look())
    short = [name for name, slice_ns in found.items() if slice_ns == SHORT_NS]
    assert len(short) == 1
    assert "_poll_wrapper" in short[0]
    assert found[threading.current_thread().name] != SHORT_NS


@pytest.mark.parametrize(("system", "machine"), [("darwin", "arm64"), ("linux", "riscv64")])
def test_elsewhere_nothing_changes(system: str, machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(ctypes, "CDLL", None)  # who asks the system fails
    let_grpc_in_first()
