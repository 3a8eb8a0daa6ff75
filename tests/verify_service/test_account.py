"""The account of all sessions together: what does not pay ends after a few steps, and is tried ever less often."""

from __future__ import annotations

import itertools

import pytest

from verify_service.account import Account

QUIET_MS = 10.0


def observe(account: Account, sessions: int, *, speed: float) -> None:
    """Has a step observed in which drafters had a part. speed: tokens per ms over those of plain steps."""
    account.observe(sessions, committed=sessions, wall_ms=QUIET_MS / speed, quiet_ms=QUIET_MS)


def lose(account: Account, sessions: int, *, speed: float = 0.5) -> float:
    """Observes drafts that do not pay until there is a pause; returns how many plain steps' time they cost."""
    for step in range(1, 10_000):
        observe(account, sessions, speed=speed)
        if account.is_paused(sessions):
            return step * (1 / speed - 1)
    raise AssertionError("it was never paused")


def rest(account: Account, sessions: int) -> int:
    """Waits the pause out; returns how many steps it takes."""
    steps = 0
    while account.is_paused(sessions):
        account.rest(sessions)
        steps += 1
    return steps


def on_trial() -> Account:
    """An account whose steps have earned a first trial of many sessions."""
    account = Account()
    rest(account, 8)
    return account


def watch(account: Account, sessions: int) -> None:
    """Has a trial watched for as long as it takes, and cost nothing."""
    for _ in range(4):
        observe(account, sessions, speed=1.0)


def test_many_sessions_begin_with_plain_steps_and_few_with_drafts() -> None:
    account = Account()
    assert [sessions for sessions in (1, 4, 5, 8, 32) if account.is_paused(sessions)] == [5, 8, 32]
    for _ in range(1000):
        account.rest(4)
    assert account.is_paused(5)
    first = rest(account, 8)
    assert not account.is_paused(32)
    lose(account, 8)
    assert rest(account, 8) == first


def test_drafts_that_have_paid_for_few_are_tried_at_once_with_twice_as_many() -> None:
    account = Account()
    for _ in range(20):
        observe(account, 4, speed=1.5)
    assert [sessions for sessions in (5, 8, 9, 16) if account.is_paused(sessions)] == [9, 16]


@pytest.mark.parametrize(("sessions", "most"), [(2, 6.0), (8, 3.0), (32, 2.0)])
@pytest.mark.parametrize("speed", [0.5, 0.8, 0.95])
def test_what_a_trial_costs_is_bounded_and_less_where_it_tells_more(sessions: int, most: float, speed: float) -> None:
    assert lose(on_trial(), sessions, speed=speed) <= most


def test_one_step_that_stands_still_is_no_failure() -> None:
    account = Account()
    observe(account, 2, speed=0.001)
    assert not account.is_paused(2)


def test_drafts_that_pay_are_heard_for_ever() -> None:
    account = on_trial()
    for _ in range(1000):
        observe(account, 8, speed=1.1)
    assert account.pays
    assert not account.is_paused(8)


def test_trials_that_fail_are_repeated_at_growing_intervals() -> None:
    account, pauses = on_trial(), []
    for _ in range(4):
        lose(account, 8)
        assert not account.pays
        pauses.append(rest(account, 8))
    assert pauses[0] > 50
    assert all(longer == 2 * shorter for shorter, longer in itertools.pairwise(pauses))


def test_a_drafter_that_was_reliable_since_is_paused_briefly_again() -> None:
    account = on_trial()
    lose(account, 8)
    first = rest(account, 8)
    lose(account, 8)
    rest(account, 8)
    for _ in range(400):
        observe(account, 8, speed=1.1)
    lose(account, 8)
    assert rest(account, 8) == first


def test_what_fails_with_some_sessions_is_not_tried_with_more_or_nearly_as_many_and_may_be_with_few() -> None:
    account = on_trial()
    lose(account, 8)
    assert [sessions for sessions in (1, 2, 4, 5, 7, 8, 9, 100) if account.is_paused(sessions)] == [5, 7, 8, 9, 100]
    assert rest(account, 7) > 0
    assert not account.is_paused(8)


def test_what_failed_with_fewer_sessions_is_tried_as_seldom_with_more() -> None:
    account = on_trial()
    lose(account, 4)
    first = rest(account, 4)
    lose(account, 8)
    assert rest(account, 8) == 2 * first


def test_a_pause_waits_while_few_sessions_run() -> None:
    account = on_trial()
    lose(account, 8)
    for _ in range(10_000):
        account.rest(1)
    assert account.is_paused(8)


def test_what_comes_of_earlier_requests_is_not_counted_in_a_pause() -> None:
    account = on_trial()
    lose(account, 8)
    for _ in range(20):
        observe(account, 8, speed=0.1)
    rest(account, 8)
    assert lose(account, 8) > 1.0


def test_one_session_is_left_to_its_own_brake_and_its_debts_are_not_those_of_several() -> None:
    account = on_trial()
    for _ in range(1000):
        observe(account, 1, speed=0.5)
    assert not account.pays
    assert not account.is_paused(1)
    observe(account, 8, speed=0.9)
    assert not account.is_paused(8)
    for _ in range(20):
        observe(account, 1, speed=1.5)
    assert account.pays


def test_a_few_sessions_more_are_opened_until_drafting_has_paid_for_so_many() -> None:
    account = on_trial()
    watch(account, 8)
    assert [account.may_open(8, num_open, all_heard=True) for num_open in (0, 1, 2, 4)] == [1, 1, 2, 2]
    assert [account.may_open(64, num_open, all_heard=True) for num_open in (4, 32)] == [4, 8]
    assert account.may_open(8, 2, all_heard=False) == 0
    observe(account, 8, speed=0.5)
    assert [account.may_open(8, num_open, all_heard=True) for num_open in (0, 2)] == [1, 0]  # it owes much
    for _ in range(4):
        observe(account, 8, speed=1.5)
    assert account.may_open(8, 2, all_heard=True) == 2
    observe(account, 8, speed=0.5)
    assert account.may_open(8, 2, all_heard=True) == 0
    for _ in range(100):  # those that owe it are silent
        account.rest(8)
    assert account.may_open(8, 2, all_heard=True) == 2
    for _ in range(20):
        observe(account, 8, speed=1.1)
    assert [account.may_open(sessions, 1, all_heard=True) for sessions in (8, 12, 16)] == [8, 12, 1]
    assert account.may_open(8, 2, all_heard=False) == 8
    lose(account, 8)
    rest(account, 8)
    assert account.may_open(8, 1, all_heard=True) == 1


def test_on_trial_no_more_are_opened_before_steps_have_shown_what_reading_costs() -> None:
    account = on_trial()
    account.opened()
    assert account.may_open(4, 1, all_heard=True) == 4
    for _ in range(100):  # of which nothing is known
        account.rest(8)
    assert account.may_open(8, 1, all_heard=True) == 0
    watch(account, 8)
    assert account.may_open(8, 1, all_heard=True) == 1


def test_few_sessions_are_opened_together_while_little_is_owed() -> None:
    account = Account()
    assert [account.may_open(sessions, 0, all_heard=True) for sessions in (2, 4, 5)] == [2, 4, 1]
    assert account.may_open(4, 1, all_heard=False) == 0
    for _ in range(2):
        observe(account, 4, speed=0.5)
    assert account.may_open(4, 1, all_heard=True) == 0
    for _ in range(20):
        observe(account, 4, speed=1.5)
    # What paid for these is not unlikely to pay for twice as many, and reading more prompts than that costs too much.
    assert [account.may_open(sessions, 0, all_heard=True) for sessions in (5, 8, 9)] == [5, 8, 1]


def test_reading_prompts_may_cost_a_few_steps_besides_which_are_saved_up_again() -> None:
    def read(account: Account) -> float:
        """Reads until there is a pause; returns how many plain steps' time that cost."""
        for step in itertools.count(1):
            account.observe(4, committed=4, wall_ms=2 * QUIET_MS, quiet_ms=QUIET_MS, reading=True)
            if account.is_paused(4):
                return step
        raise AssertionError

    account, drafting = Account(), lose(Account(), 4)
    assert 2.0 <= read(account) - drafting <= 4.0
    while account.is_paused(4):
        account.rest(4)
    assert read(account) - drafting <= 2.0
    for _ in range(1000):
        account.rest(4)
    assert 2.0 <= read(account) - drafting <= 4.0


def test_drafts_that_have_paid_may_lose_more_before_they_are_paused_but_no_more_than_a_share_of_it() -> None:
    account = on_trial()
    for _ in range(200):
        observe(account, 8, speed=1.25)
    brought_in = 200 * (1 - 1 / 1.25)
    lost = lose(account, 8)
    assert 3.0 < lost < 3.0 + 0.15 * brought_in
    rest(account, 8)
    assert lose(account, 8) <= 3.0
