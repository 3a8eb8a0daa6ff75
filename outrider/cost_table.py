"""What a forward pass costs by the rows in it, as measured: verify's steps, in verify and in the drafters it tells."""

from __future__ import annotations

import bisect
import itertools

import numpy as np
from numpy.typing import NDArray

_ALPHA = 0.1  # weight of a new measurement in a moving average


class CostTable:
    """Milliseconds of a step by its rows, measured, between the points by straight lines."""

    POINTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)

    def __init__(self, measured_ms: dict[int, float] | None = None) -> None:
        self._ms: dict[int, float] = dict(measured_ms or {})
        self._refresh()

    def observe(self, rows: int, ms: float) -> None:
        """Takes in a step's time."""
        point = self.POINTS[min(bisect.bisect_left(self.POINTS, rows), len(self.POINTS) - 1)]
        known = self._ms.get(point)
        # One slow step (a page fault, a busy core) moves the table little.
        self._ms[point] = ms if known is None else known + _ALPHA * (min(ms, 2 * known) - known)
        self._refresh()

    def ms(self, rows: float) -> float:
        """Expected time of a step with that many rows; 1 where nothing is measured yet."""
        xs, ys = self._xs, self._ys
        if not xs:
            return 1.0
        at = bisect.bisect_left(xs, rows)
        if at == len(xs):
            return ys[-1] + (rows - xs[-1]) * self._row_ms
        if at == 0 or xs[at] == rows:
            return ys[at]
        slope = (ys[at] - ys[at - 1]) / (xs[at] - xs[at - 1])
        return slope * (rows - xs[at - 1]) + ys[at - 1]

    def ms_each(self, rows: NDArray[np.integer]) -> NDArray[np.float64]:
        """`ms` of many."""
        if not self._xs:
            return np.ones_like(rows, np.float64)
        ms = np.interp(rows, self._xs, self._ys)
        beyond = np.maximum(0, np.asarray(rows) - self._xs[-1])
        return ms + beyond * self._row_ms

    @property
    def _row_ms(self) -> float:
        """What each row costs beyond the points."""
        return self._ys[-1] / self._xs[-1]

    def _refresh(self) -> None:
        self._xs = sorted(self._ms)
        # More rows never cost less: the table is made monotone from the left.
        self._ys = list(itertools.accumulate((self._ms[x] for x in self._xs), max))
