"""What plain steps take by the number of sessions in them: measured while no drafter has anything to do."""

from __future__ import annotations

from collections import Counter

from outrider.cost_table import CostTable

_ALPHA = 0.1
SAMPLES = 6  # quiet steps that a measurement of several sessions takes
_SAMPLES_ALONE = 3  # the same of one session, which no other joins meanwhile
_LEAST_SAMPLES = 2  # that will do where sessions ended meanwhile
_TRIES = 12  # steps that a measurement may take; the first two may still be disturbed by drafts under way
_PATIENCE = 64  # steps that ran prompts, which say nothing, after which a measurement is given up
_NEAR = 1 / 2  # of a number of sessions, by which one that was measured may differ and do for it, by what rows cost
_SLACK = 1.1  # how many times as long as others a step may take by chance
_FIRST_AFTER, _AGAIN_AFTER = 64, 2048  # steps without a quiet one before a number of sessions is measured, or again


class QuietTimes:
    """Milliseconds of a whole step in which no drafter had anything to do, by its number of sessions.

    Several sessions are measured before they are drafted for: each step that does not pay costs all of them. One alone
    is drafted for at once, and measured later.
    """

    def __init__(self, costs: CostTable) -> None:
        self._costs = costs
        self._ms: dict[int, float] = {}
        self._reckoned: set[int] = set()  # numbers of sessions that were bounded, but not measured
        self._first: dict[int, list[float]] = {}  # where there are too few
        self._since: Counter[int] = Counter()  # steps that were not quiet
        self._samples_left = 0
        self._tries_left = 0
        self._patience = 0
        self._measured = 0  # the number of sessions that is measured, or was last
        self._tried: set[int] = set()

    def ms(self, sessions: int) -> float | None:
        """Milliseconds of a quiet step: as measured, or by what its rows cost beside the nearest that was measured.

        None where nothing was.
        """
        if sessions in self._ms or not self._ms:
            return self._ms.get(sessions)
        nearest = min(self._ms, key=lambda known: max(known, sessions) / min(known, sessions))
        return self._ms[nearest] * self._costs.ms(sessions) / self._costs.ms(nearest)

    @property
    def is_measuring(self) -> bool:
        """Whether steps should be quiet now."""
        return self._tries_left > 0 and self._patience > 0

    def begin(self, sessions: int) -> None:
        """Begins to measure where nothing is known of as many sessions as are about to run."""
        if sessions > 1 and not self.is_measuring and sessions not in self._tried and not self._is_known(sessions):
            self._measure(sessions)

    def observe(self, sessions: int, ms: float) -> None:
        """Takes in a quiet step's time."""
        self._since[sessions] = 0
        self._samples_left -= sessions == self._measured
        if sessions in self._ms and sessions not in self._reckoned:
            known = self._ms[sessions]
            self._ms[sessions] = known + _ALPHA * (min(ms, 2 * known) - known)
            return
        first = self._first.setdefault(sessions, [])
        first.append(ms)
        if len(first) == _samples(sessions):  # what disturbs a step only makes it longer
            self._ms[sessions] = min(self._first.pop(sessions))
            self._reckoned.discard(sessions)

    def bound(self, sessions: int, ms: float) -> None:
        """Takes in a step that drafters were asked in and that verified no nodes: a quiet one is not much longer.

        What was measured of several sessions while prompts arrived, or beside a drafter that read some, may be longer
        by half.
        """
        known = self.ms(sessions)
        if sessions > 1 and known is not None and known > _SLACK * ms:
            if sessions not in self._ms:
                self._reckoned.add(sessions)
            self._ms[sessions] = (known + _SLACK * ms) / 2  # one step alone may have been lucky

    def step(self, sessions: int, *, is_quiet: bool) -> None:
        """Counts a step without prompts, after `observe`; many that were not quiet make a measurement due."""
        if self.is_measuring:
            self._tries_left = self._tries_left - 1 if self._samples_left > 0 else 0
            if not self.is_measuring:
                self._conclude(sessions)
        elif not is_quiet:
            self._since[sessions] += 1
            if self._since[sessions] >= (_AGAIN_AFTER if self._is_known(sessions) else _FIRST_AFTER):
                self._measure(sessions)

    def prompt_step(self) -> None:
        """Counts a step that ran prompts."""
        self._patience -= 1

    def _is_known(self, sessions: int) -> bool:
        return any(abs(known - sessions) <= _NEAR * sessions for known in self._ms.keys() - self._reckoned)

    def _conclude(self, sessions: int) -> None:
        """Ends a measurement, after which so many sessions ran: where some ended meanwhile, fewer steps will do."""
        for number, times in self._first.items():
            if len(times) >= _LEAST_SAMPLES:
                self._ms[number] = min(times)
                self._reckoned.discard(number)
        self._first.clear()
        if sessions != self._measured and not self._is_known(self._measured):
            self._tried.discard(self._measured)  # there was no chance to

    def _measure(self, sessions: int) -> None:
        self._measured = sessions
        self._tried.add(sessions)
        self._since[sessions] = 0
        self._samples_left, self._tries_left, self._patience = _samples(sessions), _TRIES, _PATIENCE


def _samples(sessions: int) -> int:
    return SAMPLES if sessions > 1 else _SAMPLES_ALONE
