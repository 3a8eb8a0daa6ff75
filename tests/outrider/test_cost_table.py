"""What steps cost by their rows: monotone, steady, and not held up by what was measured once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.cost_table import CostTable


def test_an_unmeasured_step_costs_one_whatever_its_rows() -> None:
    assert CostTable().ms_each(np.array([1, 7, 900])).tolist() == CostTable().ms_from(7, 3) == [1.0, 1.0, 1.0]


@given(
    measured=st.dictionaries(st.integers(1, 600), st.floats(0.01, 1e3), min_size=1),
    seen=st.lists(st.tuples(st.integers(1, 3000), st.floats(0.01, 1e3))),
    first=st.integers(1, 700),
)
def test_more_rows_never_cost_less(measured: dict[int, float], seen: list[tuple[int, float]], first: int) -> None:
    costs = CostTable(measured)
    for rows, ms in seen:
        costs.observe(rows, ms)
    table = costs.ms_each(np.arange(1, 3000))
    assert (table > 0).all()
    assert (np.diff(table) >= -1e-9 * table[:-1]).all()
    assert table.tolist() == pytest.approx([costs.ms(rows) for rows in range(1, 3000)])
    assert costs.ms_from(first, 40) == [costs.ms(rows) for rows in range(first, first + 40)]


def test_one_slow_step_moves_the_table_little_and_many_move_it_there() -> None:
    costs = CostTable({1: 10.0})
    costs.observe(1, 1e6)
    assert costs.ms(1) < 12.0
    for _ in range(100):
        costs.observe(1, 30.0)
    assert costs.ms(1) == pytest.approx(30.0, rel=0.05)


def test_what_is_in_order_stays_as_measured() -> None:
    costs = CostTable({1: 2.0, 4: 3.0, 16: 9.0})
    assert [costs.ms(rows) for rows in (1, 4, 10, 16)] == [2.0, 3.0, 6.0, 9.0]


@pytest.mark.parametrize("rows", [3, 33, 513, 1584, 9000])
def test_a_step_of_any_rows_costs_what_it_took(rows: int) -> None:
    for measured in (None, {1: 1.0}, {1: 1.0, 2: 1.5}):
        costs = CostTable(measured)
        for _ in range(20):
            costs.observe(rows, 10.0)
        assert costs.ms(rows) == pytest.approx(10.0)


@pytest.mark.parametrize("slope_ms", [0.001, 1.0])
def test_steps_of_many_sizes_do_not_bend_a_straight_line(slope_ms: float) -> None:
    costs = CostTable({1: 10.0 + slope_ms})
    for rows in [*range(3, 3000, 7), *range(5000, 20000, 500)]:
        costs.observe(rows, 10.0 + slope_ms * rows)
    for rows in (3, 33, 700, 1500, 9000, 30_000):
        assert costs.ms(rows) == pytest.approx(10.0 + slope_ms * rows)


def test_what_nothing_is_known_of_goes_on_as_what_is() -> None:
    assert CostTable({1: 5.0, 31: 5.3}).ms(61) == pytest.approx(5.6)
    assert CostTable({4: 6.0}).ms(8) == 12.0


def test_one_dear_step_of_few_rows_does_not_make_all_sizes_dear() -> None:
    """A drafter's first verdict is of a plain step, often a slow one, and it may never see another."""
    costs = CostTable()
    costs.observe(1, 7.2)
    for _ in range(50):
        costs.observe(12, 8.4)
        costs.observe(8, 6.3)
    costs.observe(4, 5.0)
    assert costs.ms(4) == pytest.approx(6.0, abs=1.3)
    assert costs.ms(8) == pytest.approx(6.3, rel=0.02)
    for _ in range(10):
        costs.observe(4, 5.0)
    assert costs.ms(1) == costs.ms(4) == pytest.approx(5.0, rel=0.05)


def test_thousands_of_steps_later_the_newest_still_count_for_most() -> None:
    costs = CostTable({1: 9.0, 8: 6.0})
    for _ in range(5000):
        costs.observe(8, 6.0)
    assert costs.ms(1) == costs.ms(8) == pytest.approx(6.0, rel=1e-3)
    for _ in range(300):
        costs.observe(1, 9.0)
    assert costs.ms(1) == costs.ms(8) == pytest.approx(9.0, rel=0.1)


def test_what_nobody_measures_for_days_keeps_its_place() -> None:
    """Points out of order, as warm-up found them, and then steps of one size alone."""
    costs = CostTable({1: 5.0, 2: 5.5, 8: 9.0, 16: 8.8, 32: 15.0})
    for _ in range(200_000):
        costs.observe(1, 5.0)
    assert [costs.ms(rows) for rows in (1, 2, 32)] == pytest.approx([5.0, 5.5, 15.0])
    assert costs.ms(8) == costs.ms(16) == pytest.approx(8.9)
    costs.observe(16, 8.8)
    assert costs.ms(8) == pytest.approx(8.8)


def test_of_two_that_are_out_of_order_the_newer_one_counts() -> None:
    """The machine has become twice as fast; only one size says so yet."""
    costs = CostTable({8: 10.0, 16: 12.0})
    for _ in range(300):
        costs.observe(16, 6.0)
    assert costs.ms(8) == pytest.approx(6.0, rel=0.1)


def test_it_can_be_asked_while_another_thread_has_it_take_a_step_in(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = CostTable({1: 2.0, 32: 9.0})
    before, told = costs.ms(64), list[float]()

    class Asks(dict[int, float]):
        def __getitem__(self, point: int) -> float:
            told.append(costs.ms(64))
            return super().__getitem__(point)

    monkeypatch.setattr(costs, "_ms", Asks({1: 2.0, 32: 9.0}))
    costs.observe(64, 20.0)
    assert set(told) == {before}
    assert before < 20.0
    assert costs.ms(64) == 20.0


def test_steps_of_no_time_teach_nothing() -> None:
    costs = CostTable()
    for ms in (0.0, -1.0, float("nan")):
        costs.observe(4, ms)
    assert costs.ms(4) == 1.0
    costs.observe(4, 20.0)
    assert costs.ms(4) == 20.0
