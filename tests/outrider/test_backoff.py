"""Waits before what failed is tried again."""

from __future__ import annotations

import random

from outrider.backoff import Backoff, of_restarts


def test_waits_double_up_to_a_limit_and_are_spread() -> None:
    backoff = Backoff(rng=random.Random(1))
    waits = [backoff.next_s() for _ in range(40)]
    assert all(0.5 * 0.1 * 2**n <= wait <= 0.1 * 2**n for n, wait in enumerate(waits[:5]))
    assert all(2.5 <= wait <= 5.0 for wait in waits[6:])
    assert len(set(waits)) == len(waits)
    assert 15.0 <= backoff.next_s(refused=True) <= 30.0
    backoff.lasted(0.5)
    assert backoff.next_s() >= 2.5
    backoff.lasted(2.0)
    assert backoff.next_s() <= 0.1


def test_restarts_wait_longer_and_longer_and_begin_anew_after_a_minute() -> None:
    backoff = of_restarts()
    assert [backoff.next_s() for _ in range(8)] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    backoff.lasted(59.0)
    assert backoff.next_s() == 30.0
    backoff.lasted(60.0)
    assert backoff.next_s() == 0.5
