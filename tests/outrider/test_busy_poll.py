"""The loop stays awake until a frame comes that is due, and not for frames that do not come or take long."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outrider.busy_poll import BusyPoll, is_wanted


class FakeLoop:
    """An event loop whose time is moved by hand; a look takes 10 microseconds."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.looks: list[int] = []
        self._soon: list[Callable[[], object]] = []

    def call_soon(self, callback: Callable[[], object], /) -> None:
        self._soon.append(callback)

    def look(self) -> None:
        self.looks.append(self.now_ns)

    def run_for(self, ms: float) -> None:
        end_ns = self.now_ns + int(ms * 1e6)
        while self.now_ns < end_ns:
            soon, self._soon = self._soon, []
            for callback in soon:
                callback()
            self.now_ns += 10_000


def polling(*, on: bool = True, cores: int = 2) -> tuple[FakeLoop, BusyPoll]:
    loop = FakeLoop()
    return loop, BusyPoll(loop, on=on, clock=lambda: loop.now_ns, give_way=loop.look, cores=cores)


def test_it_looks_all_the_time_until_a_frame_comes_and_not_between() -> None:
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
    assert min(looked_ms) == pytest.approx(0.0, abs=0.05)
    assert max(looked_ms) == pytest.approx(8.0, abs=0.05)
    assert len(looked_ms) > 750


def test_an_answer_that_takes_long_is_slept_for() -> None:
    loop, poll = polling()
    for _ in range(3):
        poll.asked(1)
        loop.run_for(60.0)
        poll.came()
    assert not loop.looks


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


def test_a_newer_question_prolongs_the_look() -> None:
    loop, poll = polling()
    poll.asked(1)
    loop.run_for(5.0)
    poll.came()
    poll.asked(1)
    loop.run_for(4.0)
    loop.looks.clear()
    poll.asked(1)
    loop.run_for(6.9)
    assert len(loop.looks) == pytest.approx(690, abs=2)  # one look at a time
    loop.looks.clear()
    loop.run_for(1.0)
    assert len(loop.looks) < 20


@pytest.mark.parametrize("cores", [4, 8])
def test_many_sessions_are_looked_for_where_there_are_many_cores(cores: int) -> None:
    loop, poll = polling(cores=cores)
    poll.asked(1)
    loop.run_for(5.0)
    poll.came()
    poll.asked(2)
    loop.run_for(1.0)
    poll.asked(3)
    loop.looks.clear()
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
