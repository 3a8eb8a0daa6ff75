"""How long drafters take to answer, as verify sees it: nobody's word is taken for it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

_LEAST_SLACK_MS = 4.0  # beyond the mean


@dataclass(slots=True)
class ReplyTimes:
    """How long a drafter takes to answer, as verify sees it: mean and mean deviation in ms (RFC 6298's estimator).

    least_ms: what the quickest answers take. Where both share cores, that is one that verify waits for; the mean, of
    answers made during its steps too, would say that waiting is for nothing just because nobody waits.
    """

    mean_ms: float = 2.0
    deviation_ms: float = 1.0
    least_ms: float = 2.0

    def observe(self, times_ms: Collection[float]) -> None:
        """Takes in the answers of one step, as one: each would say again what the others say, as if it were sure.

        What counts is the slowest, for which a step of several sessions waits.
        """
        if not times_ms:
            return
        slowest, quickest = max(times_ms), min(times_ms)
        self.deviation_ms += 0.25 * (abs(slowest - self.mean_ms) - self.deviation_ms)
        self.mean_ms += 0.125 * (slowest - self.mean_ms)
        self.least_ms = min(quickest, self.least_ms + 0.02 * (quickest - self.least_ms))

    @property
    def bound_ms(self) -> float:
        """A wait that almost all answers keep within.

        However regular they are, one is now and then late by what a busy core takes: giving up on it costs a step.
        """
        return self.mean_ms + max(4 * self.deviation_ms, _LEAST_SLACK_MS)
