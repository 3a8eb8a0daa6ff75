"""How long to wait before dialling again."""

from __future__ import annotations

import random
from dataclasses import dataclass, field


@dataclass(slots=True)
class Backoff:
    """Doubling waits with jitter, so that drafters do not return to a restarted verify service all at once."""

    first_s: float = 0.1
    longest_s: float = 5.0
    refused_s: float = 30.0  # after a mismatch, which only a restart of either side mends
    steady_s: float = 1.0  # of a stream that was a success: who is thrown out as soon as it is in waits ever longer
    rng: random.Random = field(default_factory=random.Random)
    failures: int = 0

    def next_s(self, *, refused: bool = False) -> float:
        """Seconds to wait after one more failure: half to all of the doubled wait."""
        wait_s = self.refused_s if refused else min(self.longest_s, self.first_s * 2.0 ** min(self.failures, 30))
        self.failures += 1
        return wait_s * self.rng.uniform(0.5, 1.0)

    def lasted(self, seconds: float) -> None:
        """After a stream that lasted so long."""
        if seconds >= self.steady_s:
            self.failures = 0
