"""Whether trees are drafted ahead of verify's steps, found by trying."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from draft_service.session import Extension

MAX_OUTCOMES = 2  # drafted below ahead of each step: the likeliest one, and the next in case


class Overlap(Protocol):
    """Decides once per round whether to draft ahead."""

    def outcomes(self, extensions: Sequence[Extension]) -> int:
        """Takes in a round's verdicts; how many outcomes to draft below ahead of the next step, 0: none."""
        ...


class FixedOverlap:
    """Always or never."""

    def __init__(self, *, on: bool) -> None:
        self._outcomes = MAX_OUTCOMES if on else 0

    def outcomes(self, extensions: Sequence[Extension]) -> int:
        """The number that was set."""
        return self._outcomes


NO_OVERLAP = FixedOverlap(on=False)


class OverlapRule:
    """Whether drafting ahead of steps pays, found by trying: rounds with it and without it, in turn.

    It costs CPU that verify may be short of, and may commit less a round, but saves waiting. The time between a
    session's verdicts shows the first and the last; tokens of a round vary more, so that they are averaged for longer.
    A trial is `WINDOW` rounds each way, twice; its outcome holds for a number of rounds that doubles while it stays.
    It ends at once where rounds take much longer with it: a drafter that is busy with what is ahead is late for what is
    waited for.
    """

    WINDOW = 12
    TURNS = 4
    FIRST_HOLD, LAST_HOLD = 128, 2048
    SKIPPED = 3  # of a window's first rounds: drafts made the other way are still about
    HOPELESS, MOST_HOPELESS = 1.5, 2  # times as long as without it, and so many such rounds end a trial
    FORGOTTEN_S = 1.0  # a verdict so long after the last one says nothing of a round's time

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, first: bool) -> None:
        """first: whether to begin with it; without, it is tried when the first hold is over."""
        self._clock = clock
        self._on = first
        self._preferred = first
        self._turns = self.TURNS if first else 0  # windows of the trial that are left; 0: the last outcome holds
        self._left = self.WINDOW if first else self.FIRST_HOLD
        self._hold = self.FIRST_HOLD
        self._tokens = {True: 0.0, False: 0.0}  # of a round, moving averages
        self._rounds = {True: 0, False: 0}
        self._seconds: dict[bool, list[float]] = {True: [], False: []}
        self._hopeless = 0
        self._seen: dict[int, float] = {}  # when each session's last verdict came, by uid

    def outcomes(self, extensions: Sequence[Extension]) -> int:
        """See Overlap; verdicts on copies tell nothing."""
        for extension in extensions:
            if extension.copied:
                self._seen.pop(extension.session.uid, None)
        drafted = [extension for extension in extensions if not extension.copied]
        if drafted:
            self._observe(drafted)
            self._left -= 1
            if self._hopeless >= self.MOST_HOPELESS:
                self._conclude(False)
            elif self._left <= 0:
                self._turn()
        return MAX_OUTCOMES if self._on else 0

    def _observe(self, extensions: Sequence[Extension]) -> None:
        now, seen = self._clock(), self._seen
        uids = [extension.session.uid for extension in extensions]
        gaps = [now - seen[uid] for uid in uids if uid in seen]
        self._seen = {uid: at for uid, at in seen.items() if now - at < self.FORGOTTEN_S} | dict.fromkeys(uids, now)
        round_s = sum(gaps) / len(gaps) if gaps and max(gaps) < self.FORGOTTEN_S else None
        if self._turns and round_s is not None and self._on and (without := self._seconds[False]):
            step_s = max(extension.verdict.verify_us for extension in extensions) / 1e6  # long where it ran a prompt
            self._hopeless += round_s > self.HOPELESS * max(step_s, statistics.median(without))
        if self._turns and self._left > self.WINDOW - self.SKIPPED:
            return
        tokens = sum(len(extension.verdict.tokens) for extension in extensions) / len(extensions)
        self._rounds[self._on] += 1
        self._tokens[self._on] += max(0.02, 1 / self._rounds[self._on]) * (tokens - self._tokens[self._on])
        if self._turns and round_s is not None:
            self._seconds[self._on].append(round_s)

    def _turn(self) -> None:
        """A window, or the time for which an outcome holds, is over."""
        if self._turns:
            self._turns -= 1
            self._on, self._left = not self._on, self.WINDOW
            if self._turns:
                return
            best = self._preferred
            if all(self._seconds.values()):
                round_s = {on: max(1e-9, statistics.median(seconds)) for on, seconds in self._seconds.items()}
                best = max((True, False), key=lambda on: self._tokens[on] / round_s[on])
            self._conclude(best)
        else:
            self._turns, self._left, self._hopeless = self.TURNS, self.WINDOW, 0
            self._seconds = {True: [], False: []}

    def _conclude(self, best: bool) -> None:
        self._hold = min(2 * self._hold, self.LAST_HOLD) if best is self._preferred else self.FIRST_HOLD
        self._on = self._preferred = best
        self._turns, self._left, self._hopeless = 0, self._hold, 0
