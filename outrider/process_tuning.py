"""What makes a serving process answer evenly: no long collections of garbage, no memory asked for again and again.

`keep_steady` is to be called when everything is loaded. Linux's C library is told of memory; another is left as it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys

_SWITCH_INTERVAL_S = 0.001  # the engine's thread and the event loop wait for one another; Python's own is 5 ms
_COLLECT_AFTER = 10_000, 20, 50  # of allocations, and of collections of the younger generation; Python's: 700, 10, 10
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 64 * 1024 * 1024
_MAPPED_BYTES = 32 * 1024 * 1024  # larger pieces are mapped, and given back at once; the largest that glibc allows


def keep_steady() -> None:
    """Leaves what is loaded out of garbage collection, and keeps freed memory, whose pages need not be made again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    with contextlib.suppress(OSError, AttributeError):  # no glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def free_what_ended() -> None:
    """Collects also what was loaded before `keep_steady`: a part that failed, before it is loaded once more."""
    gc.unfreeze()
    gc.collect()
