"""When plain steps are measured, and what is made of it."""

from __future__ import annotations

import pytest

from outrider.cost_table import CostTable
from verify_service.plain_times import SAMPLES, QuietTimes

COSTS = CostTable({1: 10.0, 4: 16.0, 8: 24.0})


def measured(*sessions: int) -> QuietTimes:
    """Quiet times where these numbers of sessions were measured to take a fifth more than the table says."""
    quiet = QuietTimes(COSTS)
    for count in (count for count in sessions for _ in range(SAMPLES)):
        quiet.observe(count, 1.2 * COSTS.ms(count))
    return quiet


def steps_until_due(quiet: QuietTimes, sessions: int) -> int:
    """Steps with drafts until a plain one is wanted."""
    for step in range(10_000):
        if quiet.is_measuring:
            return step
        quiet.step(sessions, is_quiet=False)
    return 10_000


def test_slow_steps_among_the_first_do_not_matter() -> None:
    quiet = measured()
    for ms in (*[90.0] * (SAMPLES - 2), 80.0, 21.0):
        assert quiet.ms(4) is None
        quiet.observe(4, ms)
    assert quiet.ms(4) == 21.0


def test_nothing_is_said_before_anything_was_measured() -> None:
    assert measured().ms(4) is None


def test_what_was_measured_says_about_other_numbers_what_their_rows_cost_beside_it() -> None:
    quiet = measured(1, 8)
    assert [quiet.ms(count) for count in (1, 2, 4, 8, 16)] == pytest.approx([12.0, 14.4, 19.2, 28.8, 48.0])


def test_one_slow_step_moves_it_little() -> None:
    quiet = measured(4)
    before = quiet.ms(4)
    assert before is not None
    quiet.observe(4, 1e6)
    assert quiet.ms(4) == pytest.approx(1.1 * before)


def test_a_step_that_verified_nothing_bounds_it_where_drafters_were_asked_too() -> None:
    quiet = measured(4)
    quiet.bound(4, 18.0)
    assert quiet.ms(4) == pytest.approx(19.2)  # such steps differ
    for _ in range(20):
        quiet.bound(8, 20.0)
    assert [quiet.ms(count) for count in (4, 8)] == pytest.approx([19.2, 22.0])


def test_one_lucky_step_and_a_session_alone_bound_it_little_or_not_at_all() -> None:
    quiet = measured(1, 4)
    quiet.bound(1, 1.0)
    quiet.bound(4, 19.2 / 1.1 / 2)
    assert [quiet.ms(count) for count in (1, 4)] == pytest.approx([12.0, 0.75 * 19.2])


def test_what_is_only_bounded_is_measured_all_the_same() -> None:
    quiet = measured(4)
    quiet.bound(32, 40.0)
    assert quiet.ms(32) == pytest.approx((1.2 * COSTS.ms(32) + 44.0) / 2)
    quiet.begin(32)
    assert quiet.is_measuring
    for _ in range(SAMPLES):
        quiet.observe(32, 60.0)
        quiet.step(32, is_quiet=True)
    assert quiet.ms(32) == 60.0
    assert steps_until_due(quiet, 32) > 1000


def test_where_nothing_was_measured_there_is_nothing_to_bound() -> None:
    quiet = measured()
    quiet.bound(4, 18.0)
    assert quiet.ms(4) is None


def test_a_new_number_of_sessions_is_measured_first_unless_it_is_one() -> None:
    quiet = measured()
    quiet.begin(1)
    assert not quiet.is_measuring
    quiet.begin(8)
    assert quiet.is_measuring
    for _ in range(SAMPLES):
        assert quiet.is_measuring
        quiet.observe(8, 30.0)
        quiet.step(8, is_quiet=True)
    assert not quiet.is_measuring
    quiet.begin(8)
    assert not quiet.is_measuring


def test_nearly_as_many_sessions_need_no_measurement() -> None:
    quiet = measured(8)
    quiet.begin(9)
    assert not quiet.is_measuring
    quiet.begin(4)
    assert quiet.is_measuring


def test_a_measurement_that_does_not_come_about_is_given_up() -> None:
    quiet, steps = measured(), 0
    quiet.begin(8)
    while quiet.is_measuring:
        quiet.step(8, is_quiet=False)
        steps += 1
    assert SAMPLES < steps < 20
    quiet.begin(8)
    assert not quiet.is_measuring
    assert steps_until_due(quiet, 8) < 100


def ended_early(quiet: QuietTimes, quiet_steps: int) -> None:
    """A measurement of eight sessions, most of which end after so many quiet steps."""
    quiet.begin(8)
    for step in range(20):
        sessions = 8 if step < quiet_steps else 2
        if quiet.is_measuring:
            quiet.observe(sessions, 30.0 + step)
            quiet.step(sessions, is_quiet=True)


def test_a_measurement_that_ends_early_makes_do_with_what_it_has() -> None:
    quiet = measured()
    ended_early(quiet, 3)
    assert quiet.ms(8) == 30.0
    quiet.begin(8)
    assert not quiet.is_measuring


def test_a_measurement_that_had_no_chance_is_made_again() -> None:
    quiet = measured()
    ended_early(quiet, 1)
    assert not quiet.is_measuring
    quiet.begin(8)
    assert quiet.is_measuring


def test_prompts_that_never_end_do_not_hold_up_drafting_for_ever() -> None:
    quiet, steps = measured(), 0
    quiet.begin(8)
    while quiet.is_measuring:
        quiet.prompt_step()
        steps += 1
    assert 20 < steps < 200


def test_a_plain_step_is_due_sooner_where_none_was_measured() -> None:
    unknown = steps_until_due(measured(), 1)
    assert 20 < unknown < 200
    assert steps_until_due(measured(1), 1) > 10 * unknown
