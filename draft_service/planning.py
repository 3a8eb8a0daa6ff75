"""What a drafter does in its next rounds: how deep and wide it drafts, whether ahead of the step, and whether at all.

From what was measured (evidence.py): tokens that a round commits by the depth of its drafts, over the time that it
takes, verify's step and what of the drafting is waited for. Verify trims and silences by itself, session by session;
here it is decided what is worth making. Nothing is planned where the user has fixed the trees.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from draft_service.drafters.shape import TreeShape
from draft_service.evidence import MAX_DEPTH, Evidence
from draft_service.session import Extension
from outrider.v1 import verify_pb2

MAX_OUTCOMES = 2  # drafted below ahead of each step: the likeliest one, and the next in case
_BETTER = 1.03  # that another shape must promise to be taken
_REPLAN = 4  # rounds between decisions
_TRIAL = 8  # rounds that are drafted in spite of a plan not to
_FIRST_PAUSE, _LAST_PAUSE = 32, 512  # rounds between trials
_WIDE_TRIAL = 12  # rounds in which another number of branches is tried
_WIDE_EVERY = 512


@dataclass(frozen=True, slots=True)
class Plan:
    """shape: None leaves trees as the flags have them. outcomes: to draft below ahead of a step; 0: do not overlap."""

    shape: TreeShape | None = None
    speculate: bool = True
    outcomes: int = MAX_OUTCOMES


class Planner(Protocol):
    """Asked once per round, on the event loop."""

    decisions: Counter[str]
    current: Plan

    def plan(self, extensions: Sequence[Extension]) -> Plan:
        """Takes in a round's verdicts; what to do in the next one."""
        ...

    def drafted(self, kind: str, sessions: int, ms: float) -> None:
        """A call of the drafter, `tree` or `early`, took so long."""
        ...


class FixedPlanner:
    """Does as it is told."""

    def __init__(self, plan: Plan) -> None:
        self.decisions: Counter[str] = Counter()
        self.current = plan

    def plan(self, extensions: Sequence[Extension]) -> Plan:
        """Always the same."""
        return self.current

    def drafted(self, kind: str, sessions: int, ms: float) -> None:
        """Of no interest."""


class CostPlanner:
    """Chooses the shape that commits most tokens per millisecond.

    first, most: the shape to begin with, and the largest; None where a drafter's work does not depend on it (NGRAM), so
    that only overlap is decided. apply: tells the drafter of a shape. overlap: None leaves it at `outcomes`.
    """

    def __init__(
        self, first: TreeShape | None, most: TreeShape | None, apply: Callable[[TreeShape], object],
        overlap: OverlapRule | None = None, outcomes: int = 0, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.evidence = Evidence()
        self.decisions: Counter[str] = Counter()
        self.current = Plan(first, outcomes=outcomes)
        self._most = most
        self._outcomes = outcomes
        self._apply = apply
        self._overlap = overlap
        self._rounds = 0
        self._next = 0  # round of the next decision
        self._pause = _FIRST_PAUSE
        self._clock = clock
        self._planned_s: float | None = None  # when the last round was
        self._drafted_ms: float | None = None  # in this one

    def plan(self, extensions: Sequence[Extension]) -> Plan:
        """See Planner."""
        self.evidence.observe(list(extensions))
        outcomes = self._overlap.outcomes(extensions) if self._overlap is not None else self._outcomes
        if not extensions:
            return self.current
        self._time_round([extension.verdict for extension in extensions])
        self._rounds += max(extension.verdict.steps for extension in extensions)
        shape, speculate = self.current.shape, self.current.speculate
        if self._most is not None and self._rounds >= self._next:
            self._next = self._rounds + _REPLAN
            shape, speculate = self._decide(self._most, overlaps=outcomes > 0)
        self._set(Plan(shape, speculate, outcomes if speculate else 0))
        return self.current

    def drafted(self, kind: str, sessions: int, ms: float) -> None:
        """See Planner."""
        shape = self.current.shape
        if kind == "tree" and shape is not None:
            self._drafted_ms = ms
            self.evidence.times.observe(shape.topk, sessions, shape.num_steps, ms)

    def _time_round(self, verdicts: Sequence[verify_pb2.Verdict]) -> None:
        """Of rounds in which verify waited for what was drafted after the last verdict."""
        now_s, before_s, drafted_ms = self._clock(), self._planned_s, self._drafted_ms
        self._planned_s, self._drafted_ms = now_s, None
        if before_s is None or drafted_ms is None or self.current.outcomes:
            return
        if all(verdict.steps == 1 and verdict.credits for verdict in verdicts):
            step_ms = max(verdict.verify_us for verdict in verdicts) / 1000
            self.evidence.round_trip.observe(1000 * (now_s - before_s) - step_ms - drafted_ms)

    def _decide(self, most: TreeShape, *, overlaps: bool) -> tuple[TreeShape | None, bool]:
        plain_rate = 1.0 / float(self.evidence.costs.ms(self.evidence.sessions))
        best, rate = max(((shape, self._rate(shape, overlaps)) for shape in shapes(most)), key=lambda found: found[1])
        now = self.current.shape
        if now is not None and rate < _BETTER * self._rate(now, overlaps):
            best, rate = now, self._rate(now, overlaps)
        if most.topk > 1 and self._rounds % _WIDE_EVERY < _WIDE_TRIAL:
            self._next = self._rounds + _WIDE_TRIAL  # what was seen of the other width fades
            other = 1 if best.topk > 1 else most.topk
            best = max((s for s in shapes(most) if s.topk == other), key=lambda shape: self._rate(shape, overlaps))
            return best, True
        if rate > plain_rate:
            self._pause = _FIRST_PAUSE if self.current.speculate else self._pause
            return best, True
        if self.current.speculate:  # the pause begins
            self._next, self._pause = self._rounds + self._pause, min(2 * self._pause, _LAST_PAUSE)
            return best, False
        self._next = self._rounds + _TRIAL
        self.evidence.accepted(best.topk).forget()
        return best, True

    def _rate(self, shape: TreeShape, overlaps: bool) -> float:
        """Tokens per millisecond and session."""
        evidence = self.evidence
        plain_ms = float(evidence.costs.ms(evidence.sessions))
        rows = evidence.sessions * shape.num_draft_tokens
        draft_ms = evidence.times.ms(shape.topk, evidence.sessions, shape.num_steps, plain_ms) + evidence.round_trip.ms
        waited = 1.0 - evidence.hit_rate if overlaps else 1.0
        tokens = float(evidence.accepted(shape.topk).tokens()[shape.num_steps])
        return tokens / (float(evidence.costs.ms(rows)) + waited * draft_ms)

    def _set(self, plan: Plan) -> None:
        before, self.current = self.current, plan
        if plan.shape is not None and plan.shape != before.shape:
            self.decisions["reshaped"] += 1
            self._apply(plan.shape)
        if plan.speculate != before.speculate:
            self.decisions["resumed" if plan.speculate else "paused"] += 1
        if (plan.outcomes > 0) != (before.outcomes > 0):
            self.decisions["overlapped" if plan.outcomes else "sequential"] += 1


def shapes(most: TreeShape) -> list[TreeShape]:
    """Chains, and trees of as many branches as `most` has, no deeper than it and of no more nodes a step."""
    found = [TreeShape(steps, 1, steps + 1) for steps in range(1, min(most.num_steps, MAX_DEPTH) + 1)]
    if most.topk > 1:
        each = (most.num_draft_tokens - 1) / most.num_steps
        for steps in range(1, min(most.num_steps, MAX_DEPTH) + 1):
            nodes = max(most.topk, round(each * steps))
            found.append(TreeShape(steps, most.topk, min(nodes, most.topk + (steps - 1) * most.topk**2) + 1))
    return found


class OverlapRule:
    """Whether drafting ahead of steps pays, found by trying: rounds with it and without it, in turn.

    It costs CPU that verify may be short of, and may commit less a round, but saves waiting. The time between a
    session's verdicts shows the first and the last; tokens of a round vary more, so that they are averaged for longer.
    A trial is `WINDOW` rounds each way, twice; its outcome holds for a number of rounds that doubles while it stays.
    """

    WINDOW = 12
    TURNS = 4
    FIRST_HOLD, LAST_HOLD = 128, 2048
    SKIPPED = 3  # of a window's first rounds: drafts made the other way are still about
    FORGOTTEN_S = 1.0  # a verdict so long after the last one says nothing of a round's time

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, first: bool = True) -> None:
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
        self._seen: dict[int, float] = {}  # when each session's last verdict came, by uid

    def outcomes(self, extensions: Sequence[Extension]) -> int:
        """Takes in a round's verdicts; how many outcomes to draft for now."""
        if extensions:
            self._observe(extensions)
            self._left -= 1
            if self._left <= 0:
                self._turn()
        return MAX_OUTCOMES if self._on else 0

    def _observe(self, extensions: Sequence[Extension]) -> None:
        now, seen = self._clock(), self._seen
        uids = [extension.session.uid for extension in extensions]
        gaps = [now - seen[uid] for uid in uids if uid in seen]
        self._seen = {uid: at for uid, at in seen.items() if now - at < self.FORGOTTEN_S} | dict.fromkeys(uids, now)
        if self._turns and self._left > self.WINDOW - self.SKIPPED:
            return
        tokens = sum(len(extension.verdict.tokens) for extension in extensions) / len(extensions)
        self._rounds[self._on] += 1
        self._tokens[self._on] += max(0.02, 1 / self._rounds[self._on]) * (tokens - self._tokens[self._on])
        if self._turns and gaps and max(gaps) < self.FORGOTTEN_S:
            self._seconds[self._on].append(sum(gaps) / len(gaps))

    def _turn(self) -> None:
        """A window, or the time for which an outcome holds, is over."""
        if self._turns:
            self._turns -= 1
            self._on, self._left = not self._on, self.WINDOW
            if self._turns:
                return
            best = self._preferred
            if all(self._seconds.values()):
                best = max((True, False), key=lambda on: self._tokens[on] / statistics.median(self._seconds[on]))
            self._hold = min(2 * self._hold, self.LAST_HOLD) if best is self._preferred else self.FIRST_HOLD
            self._on = self._preferred = best
            self._left = self._hold
        else:
            self._turns, self._left = self.TURNS, self.WINDOW
            self._seconds = {True: [], False: []}
