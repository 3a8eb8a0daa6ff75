"""How long to wait before what failed is tried again: a call, or a process."""

from __future__ import annotations

import random
from dataclasses import dataclass, field


@dataclass(slots=True)
class Backoff:
    """Doubling waits. As they are here: of a drafter that dials verify."""

    first_s: float = 0.1
    longest_s: float = 5.0
    refused_s: float = 30.0  # after a mismatch, which only a restart of either side mends
    steady_s: float = 1.0  # of a run that was a success: who is thrown out as soon as it is in waits ever longer
    jitter: float = 0.5  # the most a wait is shortened by, so that not all drafters return to a verify at once
    rng: random.Random = field(default_factory=random.Random)
    failures: int = 0

    def next_s(self, *, refused: bool = False) -> float:
        """Seconds to wait after one more failure: the doubled wait, shortened at random."""
        wait_s = self.refused_s if refused else min(self.longest_s, self.first_s * 2.0 ** min(self.failures, 30))
        self.failures += 1
        return wait_s * self.rng.uniform(1.0 - self.jitter, 1.0)

    def lasted(self, seconds: float) -> None:
        """Notes how long the last run was: after one that was long enough the waits begin anew."""
        if seconds >= self.steady_s:
            self.failures = 0


def of_restarts() -> Backoff:
    """Waits before a service that failed is started again on its own machine."""
    return Backoff(first_s=0.5, longest_s=30.0, steady_s=60.0, jitter=0.0)
