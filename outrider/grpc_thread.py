"""Which thread is let in first where several want one core.

Linux (from 6.12 on) has a thread that asks for short slices of time go before a running one whose slices are longer.
gRPC's thread only hands a frame on and sleeps again, but whoever woke it, on the same core as a rule, would go on for a
millisecond or more: a verify service with the answers of its step, while the drafter's core lies idle.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import threading

_SLICE_NS = 100_000  # the shortest that there is
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}  # of <asm/unistd.h>; most C libraries have no function for it
_POLLER = "_poll_wrapper"  # part of the name of grpc.aio's thread, of which a process has one


class _SchedAttr(ctypes.Structure):
    """struct sched_attr of <linux/sched/types.h>."""

    _fields_ = [
        ("size", ctypes.c_uint32), ("policy", ctypes.c_uint32), ("flags", ctypes.c_uint64), ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32), ("runtime", ctypes.c_uint64), ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    ]  # fmt: skip


def let_grpc_in_first() -> None:
    """Gives gRPC's thread the shortest time slices, so that it runs first. To be called once there is a server or a
    channel; does nothing where the system has no such slices."""
    number = _SCHED_SETATTR.get(platform.machine()) if sys.platform == "linux" else None
    if number is None:
        return
    wanted = _SchedAttr(size=ctypes.sizeof(_SchedAttr), runtime=_SLICE_NS)
    for thread in threading.enumerate():
        if _POLLER in thread.name:
            ctypes.CDLL(None).syscall(number, thread.native_id, ctypes.byref(wanted), 0)
