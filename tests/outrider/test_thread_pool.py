"""Pools have all their threads from the start, or say that they cannot be had."""

import asyncio
import threading

import pytest

from outrider.errors import StartupError
from outrider.thread_pool import thread_pool, workers


def no_more_threads(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Lets `after` threads be started from now on, as a limit of the system does."""
    start, left = threading.Thread.start, iter(range(after))

    def limited(self: threading.Thread) -> None:
        if next(left, None) is None:
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", limited)


def test_no_thread_is_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    with thread_pool(3, "some", lambda: begun.append(threading.current_thread().name)) as pool:
        no_more_threads(monkeypatch, 0)
        meeting = threading.Barrier(3)  # passed by three at once alone
        places = [pool.submit(meeting.wait) for _ in range(3)]
        assert sorted(place.result() for place in places) == [0, 1, 2]
    assert sorted(begun) == ["some_0", "some_1", "some_2"]


def test_an_event_loop_gets_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def in_thread() -> str:
        asyncio.get_running_loop().set_default_executor(workers())
        with monkeypatch.context() as limited:  # an event loop that ends starts a thread
            no_more_threads(limited, 0)
            return (await asyncio.to_thread(threading.current_thread)).name

    assert asyncio.run(in_thread()).startswith("worker")


@pytest.mark.parametrize("after", [0, 2])
def test_threads_that_cannot_be_had_are_told_and_none_is_left(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    before = set(threading.enumerate())
    no_more_threads(monkeypatch, after)
    with pytest.raises(StartupError, match=r"cannot start the 3 threads of 'some': can't start .*ulimit -u"):
        thread_pool(3, "some")
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=10)
    assert set(threading.enumerate()) <= before
