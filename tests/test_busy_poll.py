"""The loop stays awake from shortly before a frame is due until it comes, and not for frames that do not come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import pytest

from outrider.busy_poll import BusyPoll, is_wanted


class FakeLoop:
    """Time that is moved by hand; a look takes 10 microseconds."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.looks: list[int] = []
        self._soon: list[Callable[[], object]] = []
        self._later: list[tuple[int, Callable[[], object]]] = []

    def call_soon(self, callback: Callable[[], object], /) -> None:
        self._soon.append(callback)

    def call_later(self, delay: float, callback: Callable[[], object], /) -> asyncio.TimerHandle:
        entry = self.now_ns + int(delay * 1e9), callback
        self._later.append(entry)
        return cast("asyncio.TimerHandle", _Handle(lambda: self._later.remove(entry)))

    def look(self) -> None:
        self.looks.append(self.now_ns)

    def run_for(self, ms: float) -> None:
        end_ns = self.now_ns + int(ms * 1e6)
        while self.now_ns < end_ns:
            for entry in [entry for entry in self._later if entry[0] <= self.now_ns]:
                self._later.remove(entry)
                entry[1]()
            soon, self._soon = self._soon, []
            for callback in soon:
                callback()
            self.now_ns += 10_000


class _Handle:
    def __init__(self, cancel: Callable[[], object]) -> None:
        self.cancel = cancel


def polling(*, on: bool = True, cores: int = 2) -> tuple[FakeLoop, BusyPoll]:
    loop = FakeLoop()
    return loop, BusyPoll(loop, on=on, clock=lambda: loop.now_ns, give_way=loop.look, cores=cores)


def test_it_looks_from_a_millisecond_before_a_frame_is_due_until_it_comes() -> None:
    loop, poll = polling()
    asked_ns = 0
    for _ in range(5):
        loop.looks.clear()
        asked_ns = loop.now_ns
        poll.asked(1)
        loop.run_for(8.0)
        poll.came()
        loop.run_for(4.0)
    looked_ms = [(ns - asked_ns) / 1e6 for ns in loop.looks]
    assert min(looked_ms) == pytest.approx(7.0, abs=0.05)
    assert max(looked_ms) == pytest.approx(8.0, abs=0.05)
    assert len(looked_ms) > 90


def test_it_gives_up_after_a_while_and_altogether_where_frames_do_not_come() -> None:
    loop, poll = polling()
    poll.asked(1)
    loop.run_for(5.0)
    poll.came()
    for asks in range(10):
        loop.looks.clear()
        asked_ns = loop.now_ns
        poll.asked(1)
        loop.run_for(20.0)
        assert bool(loop.looks) == (asks < 4)
        assert all(ns - asked_ns < 7_100_000 for ns in loop.looks)
    poll.came()
    loop.looks.clear()
    poll.asked(1)
    loop.run_for(20.0)
    assert loop.looks


def test_a_newer_question_replaces_the_one_before() -> None:
    loop, poll = polling()
    poll.asked(1)
    loop.run_for(5.0)
    poll.came()
    poll.asked(1)
    loop.run_for(2.0)
    poll.asked(1)
    loop.run_for(3.5)
    assert not loop.looks
    loop.run_for(1.0)
    assert loop.looks


@pytest.mark.parametrize("cores", [4, 8])
def test_many_sessions_are_looked_for_where_there_are_many_cores(cores: int) -> None:
    loop, poll = polling(cores=cores)
    poll.asked(1)
    loop.run_for(5.0)
    poll.came()
    poll.asked(2)
    loop.run_for(1.0)
    poll.asked(3)
    loop.run_for(10.0)
    assert bool(loop.looks) == (cores == 8)


def test_off_it_does_nothing() -> None:
    loop, poll = polling(on=False)
    for _ in range(3):
        poll.asked(1)
        loop.run_for(10.0)
        poll.came()
    assert not loop.looks
    assert is_wanted("auto", on_device=True)
    assert not is_wanted("auto", on_device=False)
    assert is_wanted("on", on_device=False)
    assert not is_wanted("off", on_device=True)
