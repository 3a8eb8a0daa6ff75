"""What a forward pass costs by the rows in it, as measured: verify's steps, in verify and in the drafters it tells."""

from __future__ import annotations

import bisect

import numpy as np
from numpy.typing import NDArray

_ALPHA = 0.1  # weight of a new measurement in a moving average
_FADE = 0.99  # of what is known of the other points, with each measurement
_MOST_WEIGHT = 1e9

Line = tuple[list[int], list[float]]
"""Points, ascending, and their times."""


class CostTable:
    """Milliseconds of a step by its rows, measured, between the points by straight lines.

    More rows never cost less: points that were measured so share their mean, in which many and new ones count for more.
    """

    POINTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)

    def __init__(self, measured_ms: dict[int, float] | None = None) -> None:
        self._ms: dict[int, float] = dict(measured_ms or {})
        self._counts = dict.fromkeys(self._ms, 1 / _ALPHA)  # of measurements that each stands for, as far as they count
        self._weights = dict(self._counts)
        self._newest = 1.0  # weight of a measurement made now, beside those of older ones
        self._line: Line = [], []
        self._refresh()

    def observe(self, rows: int, ms: float) -> None:
        """Takes in a step's time; of none there is nothing to learn."""
        if not ms > 0.0:
            return
        point = self.POINTS[min(bisect.bisect_left(self.POINTS, rows), len(self.POINTS) - 1)]
        known = self._ms.get(point, ms)
        self._counts[point] = count = min(self._counts.get(point, 0.0) + 1, 1 / _ALPHA)
        # One slow step (a page fault, a busy core) moves the table little.
        self._ms[point] = known + (min(ms, 2 * known) - known) / count
        self._newest *= 1 / _FADE  # in place of all others' fading
        self._weights[point] = count * self._newest
        if self._newest > _MOST_WEIGHT:
            self._weights = {each: weight / self._newest for each, weight in self._weights.items()}
            self._newest = 1.0
        self._refresh()

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

    def _row_ms(self, xs: list[int], ys: list[float]) -> float:
        """What each row costs beyond the points."""
        return ys[-1] / xs[-1]

    def _refresh(self) -> None:
        """Isotonic regression, by pooling neighbours that violate the order."""
        xs = sorted(self._ms)
        pools: list[tuple[float, float, int]] = []  # mean, weight, points
        for x in xs:
            ms, weight, count = self._ms[x], self._weights[x], 1
            while pools and pools[-1][0] > ms:
                before_ms, before, points = pools.pop()
                ms = (before_ms * before + ms * weight) / (before + weight)
                weight, count = before + weight, count + points
            pools.append((ms, weight, count))
        # At once: while one thread takes a step in, another may ask.
        self._line = xs, [ms for ms, _, count in pools for _ in range(count)]
