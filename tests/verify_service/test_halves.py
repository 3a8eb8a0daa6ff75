"""Whom a step leaves out, with scripted costs and a clock of the test's own."""

from __future__ import annotations

import pytest

from verify_service.halves import Halves, Part, halves_pay, leaving_out_pays

MS = 1_000_000


def flat(rows: int) -> float:
    """A device that takes as long for many rows as for one."""
    return 8.0


def steep(rows: int) -> float:
    """A processor on which every row costs."""
    return 0.5 * rows


def ready(*sessions: int, rows: int = 4) -> list[Part]:
    return [Part(session, rows) for session in sessions]


def late(*sessions: int, rows: int = 4, deadline_ms: int = 20) -> list[Part]:
    return [Part(session, rows, late=True, deadline_ns=deadline_ms * MS) for session in sessions]


@pytest.mark.parametrize(
    ("step_ms", "wait_ms", "pays"),
    # Flat: 8 + 8 against wait + 8. Steep: max(8, wait) + 8 against wait + 16.
    [(flat, 4.0, False), (flat, 7.9, False), (flat, 12.0, False), (steep, 0.1, False), (steep, 4.0, True)],
)
def test_ready_sessions_run_alone_where_that_gets_round_sooner(step_ms: object, wait_ms: float, pays: bool) -> None:
    assert leaving_out_pays(step_ms, ready_rows=16, late_rows=16, wait_ms=wait_ms) is pays  # type: ignore[arg-type]


def test_a_few_late_ones_cost_less_apart_where_their_step_is_short() -> None:
    def step_ms(rows: int) -> float:
        return 1.0 + 0.25 * rows

    assert leaving_out_pays(step_ms, ready_rows=60, late_rows=4, wait_ms=6.0)  # 16 + 2 against 6 + 17
    assert not leaving_out_pays(step_ms, ready_rows=60, late_rows=4, wait_ms=0.5)


def test_halves_pay_where_rows_cost_and_not_where_they_are_free() -> None:
    assert halves_pay(steep, rows=32, reply_ms=5.0)  # 16 against 21
    assert not halves_pay(steep, rows=32, reply_ms=0.5)
    assert not halves_pay(flat, rows=32, reply_ms=5.0)  # 16 against 13
    assert not halves_pay(flat, rows=32, reply_ms=12.0)  # 20 against 20


def test_two_halves_take_turns_and_verify_never_waits() -> None:
    halves = Halves()
    for _ in range(20):  # every step had to wait
        halves.ran([1, 2, 3, 4], num_late=4, num_left_out=0)
    out = halves.leave_out(ready(1, 2, 3, 4), steep, reply_ms=4.0, now_ns=0)
    assert len(out) == 2
    first = {1, 2, 3, 4} - out
    halves.ran(sorted(first), num_late=0, num_left_out=2)
    # The first half's drafts are being made: the other half runs now.
    parts = ready(*out) + late(*first)
    assert halves.leave_out(parts, steep, reply_ms=4.0, now_ns=0) == first
    halves.ran(sorted(out), num_late=2, num_left_out=2)
    assert halves.num_parted == 2


def test_who_was_left_out_is_in_the_next_half() -> None:
    halves = Halves()
    for _ in range(20):
        halves.ran([1, 2, 3, 4, 5], num_late=5, num_left_out=0)
    first = halves.leave_out(ready(1, 2, 3, 4, 5), steep, reply_ms=9.0, now_ns=0)
    halves.ran([s for s in (1, 2, 3, 4, 5) if s not in first], num_late=5, num_left_out=2)
    assert not first & halves.leave_out(ready(1, 2, 3, 4, 5), steep, reply_ms=9.0, now_ns=0)


@pytest.mark.parametrize(("since", "left_out"), [(1023, 1), (1024, 2)])
def test_who_ran_a_thousand_steps_ago_is_as_one_who_never_did(since: int, left_out: int) -> None:
    halves = Halves()
    halves.ran([1, 2, 3], num_late=3, num_left_out=0)
    halves.ran([1], num_late=3, num_left_out=0)
    for _ in range(since):
        halves.ran([3], num_late=3, num_left_out=0)
    assert halves.leave_out(ready(1, 2), steep, reply_ms=9.0, now_ns=0) == {left_out}


def test_nobody_is_left_out_where_drafts_come_in_time() -> None:
    halves = Halves()
    for _ in range(20):
        halves.ran([1, 2], num_late=0, num_left_out=0)
    assert halves.leave_out(ready(1, 2), steep, reply_ms=9.0, now_ns=0) == set()
    assert halves.leave_out(ready(1), steep, reply_ms=9.0, now_ns=0) == set()
    assert halves.leave_out(late(1, 2), steep, reply_ms=9.0, now_ns=0) == set()  # nothing else to run


def test_a_late_session_is_left_out_no_longer_than_it_would_be_waited_for() -> None:
    halves, parts = Halves(), ready(1, 2) + late(3, deadline_ms=20)
    assert halves.leave_out(parts, steep, reply_ms=6.0, now_ns=17 * MS) == set()  # a step of 4 ms would outlast it
    assert halves.leave_out(parts, steep, reply_ms=6.0, now_ns=5 * MS) == {3}
    assert halves.leave_out(parts, steep, reply_ms=6.0, now_ns=20 * MS) == set()
