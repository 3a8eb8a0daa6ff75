"""Pools whose threads run from the start: once a process serves, none can be refused it (`ulimit -u`, `--pids-limit`).

Python's own begins each thread with work that finds none idle, and fails that work where no thread can be had.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from outrider.cores import num_cores
from outrider.errors import StartupError

_MOST_WORKERS = 32
_MORE_THAN_CORES = 4  # workers wait for files, too


def thread_pool(size: int, name: str, on_thread: Callable[[], object] = lambda: None) -> ThreadPoolExecutor:
    """A pool of `size` threads, all of them begun; each runs `on_thread` first. StartupError where one is refused."""
    pool = ThreadPoolExecutor(size, name, on_thread)
    all_begun = threading.Event()  # none is idle before, so that each call begins one
    try:
        for _ in range(size):
            pool.submit(all_begun.wait)
    except RuntimeError as error:
        pool.shutdown(wait=False, cancel_futures=True)
        raise StartupError(
            f"cannot start the {size} threads of {name!r}: {error}; the limit of processes and threads (`ulimit -u`, a "
            "container's --pids-limit) is too low"
        ) from error
    finally:
        all_begun.set()
    return pool


def workers(on_thread: Callable[[], object] = lambda: None) -> ThreadPoolExecutor:
    """The pool for `asyncio.to_thread`: to be an event loop's default executor, which it then closes."""
    return thread_pool(min(_MOST_WORKERS, num_cores() + _MORE_THAN_CORES), "worker", on_thread)
