"""What a forward pass costs by the rows in it, as measured: verify's steps, in verify and in the drafters it tells."""

from __future__ import annotations

import bisect

import numpy as np
from numpy.typing import NDArray

_ALPHA = 0.1  # weight of a new measurement in a moving average
_FADE = 0.99  # of what is known of the other points, with each measurement
_MOST_WEIGHT = 1e9
_LEAST_WEIGHT = 1e-9  # of a measurement made now: a point that nobody measures for long still weighs something

# Most rows of steps that share a point. A load needs few of them, so that what is asked of the table is cheap.
_GROUPS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096)

Line = tuple[list[float], list[float]]
"""Points, ascending, and their times."""


class CostTable:
    """Milliseconds of a step by its rows, measured, between the points by straight lines.

    A point is the mean of steps with about as many rows, of their rows as of their times. More rows never cost less:
    points that were measured so share their mean, in which many and new ones count for more.
    """

    def __init__(self, measured_ms: dict[int, float] | None = None) -> None:
        self._rows: dict[int, float] = {}  # by group
        self._ms: dict[int, float] = {}
        self._counts: dict[int, float] = {}  # of measurements that each stands for, as far as they count
        for rows, ms in (measured_ms or {}).items():
            self._take(rows, ms)
        self._counts = dict.fromkeys(self._ms, 1 / _ALPHA)
        self._weights = dict(self._counts)
        self._newest = 1.0  # weight of a measurement made now, beside those of older ones
        self._line: Line = [], []
        self._refresh()

    def observe(self, rows: int, ms: float) -> None:
        """Takes in a step's time; of none there is nothing to learn."""
        if not (ms > 0.0 and rows > 0):
            return
        group = self._take(rows, ms)
        self._newest *= 1 / _FADE  # in place of all others' fading
        self._weights[group] = self._counts[group] * self._newest
        if self._newest > _MOST_WEIGHT:
            self._weights = {each: max(weight / self._newest, _LEAST_WEIGHT) for each, weight in self._weights.items()}
            self._newest = 1.0
        self._refresh()

    def _take(self, rows: int, ms: float) -> int:
        """Puts a step into its group's means; which group that is."""
        group = _GROUPS[min(bisect.bisect_left(_GROUPS, rows), len(_GROUPS) - 1)]
        known_rows, known_ms = self._rows.get(group, rows), self._ms.get(group, ms)
        self._counts[group] = count = min(self._counts.get(group, 0.0) + 1, 1 / _ALPHA)
        self._rows[group] = known_rows + (rows - known_rows) / count
        # One slow step (a page fault, a busy core) moves the table little.
        most_ms = 2 * known_ms * max(1.0, rows / known_rows)
        self._ms[group] = known_ms + (min(ms, most_ms) - known_ms) / count
        return group

    def ms(self, rows: float) -> float:
        """Expected time of a step with that many rows; 1 where nothing is measured yet."""
        line = self._line
        return self._between(line, bisect.bisect_left(line[0], rows), rows) if line[0] else 1.0

    def ms_from(self, rows: int, count: int) -> list[float]:
        """`ms` of so many steps, of `rows` and on: sooner than numpy begins where they are few."""
        line = self._line
        if not (xs := line[0]):
            return [1.0] * count
        found: list[float] = []
        at = bisect.bisect_left(xs, rows)
        for each in range(rows, rows + count):
            at += at < len(xs) and xs[at] < each
            found.append(self._between(line, at, each))
        return found

    def ms_each(self, rows: NDArray[np.integer]) -> NDArray[np.float64]:
        """`ms` of many."""
        xs, ys = self._line
        if not xs:
            return np.ones_like(rows, np.float64)
        beyond = np.maximum(0, np.asarray(rows) - xs[-1])
        return np.interp(rows, xs, ys) + beyond * self._row_ms(xs, ys)

    def _between(self, line: Line, at: int, rows: float) -> float:
        """`ms` of so many rows, more than point number at - 1 and no more than point number `at`."""
        xs, ys = line
        if at == len(xs):
            return ys[-1] + (rows - xs[-1]) * self._row_ms(xs, ys)
        if at == 0 or xs[at] == rows:
            return ys[at]
        slope = (ys[at] - ys[at - 1]) / (xs[at] - xs[at - 1])
        return slope * (rows - xs[at - 1]) + ys[at - 1]

    def _row_ms(self, xs: list[float], ys: list[float]) -> float:
        """What each row costs beyond the points: as much as between the first and the last."""
        return (ys[-1] - ys[0]) / (xs[-1] - xs[0]) if len(xs) > 1 else ys[-1] / xs[-1]

    def _refresh(self) -> None:
        """Isotonic regression, by pooling neighbours that violate the order."""
        groups = sorted(self._ms)
        pools: list[tuple[float, float, int]] = []  # mean, weight, points
        for group in groups:
            ms, weight, count = self._ms[group], self._weights[group], 1
            while pools and pools[-1][0] > ms:
                before_ms, before, points = pools.pop()
                ms = (before_ms * before + ms * weight) / (before + weight)
                weight, count = before + weight, count + points
            pools.append((ms, weight, count))
        # At once: while one thread takes a step in, another may ask.
        xs = [self._rows[group] for group in groups]
        self._line = xs, [ms for ms, _, count in pools for _ in range(count)]
