"""How many remainders the values of multipleOf have, wherever they stand."""

from __future__ import annotations

import pytest

from outrider.multiples import remainders, remainders_of


@pytest.mark.parametrize(
    ("value", "count"),
    [
        ("7", 7),
        ("0.01", 1),
        ("1e9", 1),
        ("1500", 15),
        ("2147483648", 2147483648),
        ("-3", 3),
        ("0", 1),
        ("1-2", 1),
        ("1e" + 30 * "9", 1),
        ("NaN", 1),
        ("-Infinity", 1),
        ("True", 1),
    ],
)
def test_remainders(value: str, count: int) -> None:
    assert remainders(value) == count


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ('{"type": "integer"}', 1),
        ('{"allOf": [{"multipleOf": 6}, {"multipleOf" : 0.4}]}', 12),
        ('start: %json {"\\u006dultipleOf": 9}', 9),
        ('{"multipleOf": "many"}', 1),
    ],
)
def test_of_all_together(source: str, count: int) -> None:
    assert remainders_of(source) == count
