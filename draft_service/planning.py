"""What a drafter does in its next rounds: how deep and wide it drafts, whether ahead of the step, and whether at all.

What was measured (evidence.py) decides: tokens that a round commits by the depth of its drafts, over the time that it
takes, verify's step and what of the drafting is waited for. Verify trims and silences by itself, session by session;
here it is decided what is worth making. Nothing is planned where the user has fixed the trees.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from draft_service.drafters.shape import TreeShape
from draft_service.evidence import MAX_DEPTH, Evidence
from draft_service.overlap import NO_OVERLAP, Overlap
from draft_service.session import Extension, Grown
from outrider.tree_limits import most_nodes
from outrider.v1 import verify_pb2

_BETTER = 1.03  # that another shape must promise to be taken
_REPLAN = 4  # rounds between decisions
_PATIENCE = 48  # calls of a new drafter before it may pause: its first ones are slow, and few tell little
_TRIAL = 8  # rounds that are drafted in spite of a plan not to
_TRIAL_STEPS = 3
_NEWS = 16  # rounds of so many sessions, after which they are no news
_FIRST_PAUSE, _LAST_PAUSE = 32, 512  # rounds between trials
# Chance that a step's nodes are accepted once acceptance comes so far: 0.55 to 0.7 where it is in question, of the
# EAGLE-3 head that comes with Outrider on MT-bench. Its reaches are right within a tenth.
_NEXT_ACCEPTED = 0.6
_MOST_REACH = 0.8  # that is asked for: else what steps cost would not be learnt
_WIDE_TRIAL = 12  # rounds in which trees with branches, where there are any, are tried and all their steps are run
_WIDE_FIRST, _WIDE_EVERY = 128, 512


@dataclass(frozen=True, slots=True)
class Plan:
    """shape: None leaves trees as the flags have them. outcomes: to draft below ahead of a step; 0: do not overlap.

    least_reach: chance that acceptance comes as far as a step's nodes, below which the step is not run (growing.py).
    """

    shape: TreeShape | None = None
    speculate: bool = True
    outcomes: int = 0
    least_reach: float = 0.0


class Planner(Protocol):
    """Asked once per round, on the event loop."""

    decisions: Counter[str]
    current: Plan

    def meet(self, sessions: int) -> None:
        """Now so many sessions are to be drafted for, which may change the plan."""
        ...

    def plan(self, extensions: Sequence[Extension]) -> None:
        """Takes in a round's verdicts, and plans the next one."""
        ...

    def drafted(self, made: Sequence[Grown], sessions: int, ms: float) -> None:
        """A call of the drafter for trees at committed states, which grew so one after the other, took so long."""
        ...


class FixedPlanner:
    """Leaves trees as the flags have them, and speculates; only overlap may be decided."""

    def __init__(self, overlap: Overlap = NO_OVERLAP) -> None:
        self.decisions: Counter[str] = Counter()
        self._overlap = overlap
        self.current = Plan(outcomes=overlap.outcomes([]))

    def meet(self, sessions: int) -> None:
        """Does nothing."""

    def plan(self, extensions: Sequence[Extension]) -> None:
        """See Planner."""
        outcomes = self._overlap.outcomes(extensions)
        if outcomes != self.current.outcomes:
            before, self.current = self.current, replace(self.current, outcomes=outcomes)
            note_overlap(self.decisions, before, self.current)

    def drafted(self, made: Sequence[Grown], sessions: int, ms: float) -> None:
        """Does nothing."""


class CostPlanner:
    """Chooses the shape that commits most tokens per millisecond.

    first, most: the shape to begin with, and the largest. apply: tells the drafter of a shape and a least reach.
    """

    def __init__(
        self, first: TreeShape, most: TreeShape, apply: Callable[[TreeShape, float], object],
        overlap: Overlap = NO_OVERLAP, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.evidence = Evidence()
        self.decisions: Counter[str] = Counter()
        self.current = Plan(first, outcomes=overlap.outcomes([]))
        self._most = most
        self._apply = apply
        self._overlap = overlap
        self._rounds = 0
        self._next = 0  # round of the next decision
        self._pause = _FIRST_PAUSE
        self._paused_for = 0  # about how many sessions, where there is a pause
        self._num_calls = 0  # for trees
        self._rounds_of: Counter[int] = Counter()  # by about how many sessions
        self._clock = clock
        self._planned_s: float | None = None  # when the last round was
        self._drafted_ms: float | None = None  # in this one

    def meet(self, sessions: int) -> None:
        """See Planner."""
        if self._is_news(sessions):
            self._set(replace(self.current, shape=_first_chain(self._most), least_reach=0.0))

    def plan(self, extensions: Sequence[Extension]) -> None:
        """See Planner."""
        self.evidence.observe(list(extensions))
        outcomes = self._overlap.outcomes(extensions)
        if not extensions:
            return
        self._time_round([extension.verdict for extension in extensions])
        self._rounds += max(extension.verdict.steps for extension in extensions)
        self._rounds_of[self.evidence.sessions.bit_length()] += 1
        shape, speculate, least_reach = self.current.shape, self.current.speculate, self.current.least_reach
        # What did not pay for several may pay for fewer.
        has_fewer = not speculate and self.evidence.sessions.bit_length() < self._paused_for
        if self._rounds >= self._next or has_fewer:
            self._next = self._rounds + _REPLAN
            shape, speculate, is_trial = self._decide(self._most, overlaps=outcomes > 0)
            least_reach = 0.0 if is_trial else self._least_reach(shape, overlaps=outcomes > 0)
        self._set(Plan(shape, speculate, outcomes if speculate else 0, least_reach))

    def drafted(self, made: Sequence[Grown], sessions: int, ms: float) -> None:
        """See Planner."""
        if not made:
            return
        self._drafted_ms = ms
        self._num_calls += 1
        if len(made) == 1:
            grown, more = made[0], made[0].num_steps - 1
            self.evidence.trees(grown.topk).steps.observe(0, more, more + grown.cut_short)
            self.evidence.times.observe(grown.topk, sessions, grown.num_steps, ms)

    def _time_round(self, verdicts: Sequence[verify_pb2.Verdict]) -> None:
        """Measures the round trip, in rounds for whose drafts verify waited."""
        now_s, before_s, drafted_ms = self._clock(), self._planned_s, self._drafted_ms
        self._planned_s, self._drafted_ms = now_s, None
        if before_s is None or drafted_ms is None or self.current.outcomes:
            return
        waited = sum(verdict.steps == 1 and len(verdict.credits) > 0 for verdict in verdicts)
        if 2 * waited > len(verdicts):  # of the others all was trimmed, or they have just begun
            step_ms = max(verdict.verify_us for verdict in verdicts) / 1000
            self.evidence.round_trips.observe(self.evidence.sessions, 1000 * (now_s - before_s) - step_ms - drafted_ms)

    def _decide(self, most: TreeShape, *, overlaps: bool) -> tuple[TreeShape, bool, bool]:
        """The shape, whether to draft, and whether it is a trial: all steps of those are run."""
        if self._is_news(self.evidence.sessions):
            return _first_chain(most), True, True
        plain_rate = 1.0 / self.evidence.costs.ms(self.evidence.sessions)
        best, rate = max(((shape, self._rate(shape, overlaps)) for shape in shapes(most)), key=lambda found: found[1])
        now = self.current.shape
        if now is not None and rate < _BETTER * self._rate(now, overlaps):
            best, rate = now, self._rate(now, overlaps)
        if _WIDE_FIRST <= self._rounds % _WIDE_EVERY < _WIDE_FIRST + _WIDE_TRIAL:
            self._next = self._rounds + _WIDE_TRIAL  # what was seen of them fades
            return self._trial(most, most.topk, overlaps=overlaps), True, True
        if self._num_calls < _PATIENCE and self.evidence.sessions == 1:  # what is lost with several, all lose
            return best, True, self._num_calls < _TRIAL
        if rate > plain_rate:
            self._pause = _FIRST_PAUSE if self.current.speculate else self._pause
            return best, True, False
        if self.current.speculate:  # the pause begins
            self._next, self._pause = self._rounds + self._pause, min(2 * self._pause, _LAST_PAUSE)
            self._paused_for = self.evidence.sessions.bit_length()
            return best, False, False
        self._next = self._rounds + _TRIAL
        self.evidence.trees(best.topk).accepted.forget()
        return self._trial(most, best.topk, overlaps=overlaps), True, True

    def _is_news(self, sessions: int) -> bool:
        """Whether there were hardly rounds of so many sessions: what is planned for fewer takes too long for them."""
        size = sessions.bit_length()
        return sessions > 1 and all(seen < size or count < _NEWS for seen, count in self._rounds_of.items())

    def _trial(self, most: TreeShape, topk: int, *, overlaps: bool) -> TreeShape:
        """The best that is deep enough to tell what a step more costs and brings."""
        deep = min(_TRIAL_STEPS, most.num_steps)
        wanted = [shape for shape in shapes(most) if shape.topk == topk and shape.num_steps >= deep]
        return max(wanted, key=lambda shape: self._rate(shape, overlaps))

    def _rate(self, shape: TreeShape, overlaps: bool) -> float:
        """Tokens per millisecond and session."""
        return self.evidence.tokens(shape) / self._round_ms(shape, overlaps=overlaps)

    def _round_ms(self, shape: TreeShape, *, overlaps: bool) -> float:
        round_trip_ms = self.evidence.round_trips.ms(self.evidence.sessions)
        draft_ms = self._draft_ms(shape, self.evidence.steps_run(shape)) + round_trip_ms
        return self._step_ms(self.evidence.nodes(shape)) + self._waited(overlaps=overlaps) * draft_ms

    def _least_reach(self, shape: TreeShape, *, overlaps: bool) -> float:
        """The reach at which a draft step, with its row in verify's, takes as long as its tokens would otherwise."""
        steps, nodes = self.evidence.steps_run(shape), self.evidence.nodes(shape)
        draft_ms = self._draft_ms(shape, steps + 1) - self._draft_ms(shape, steps)
        verify_ms = max(0.0, self._step_ms(nodes + 1) - self._step_ms(nodes))  # others, less likely, are trimmed
        rate = self.evidence.committed / self._round_ms(shape, overlaps=overlaps)  # of what is verified, more would be
        reach = (self._waited(overlaps=overlaps) * draft_ms + verify_ms) * rate / _NEXT_ACCEPTED
        return min(reach, _MOST_REACH)

    def _draft_ms(self, shape: TreeShape, steps: float) -> float:
        evidence = self.evidence
        return evidence.times.ms(shape.topk, evidence.sessions, steps, self._step_ms(0))

    def _step_ms(self, nodes: float) -> float:
        """Expected time of a verify step with so many nodes of each session."""
        return self.evidence.costs.ms(self.evidence.sessions * (1 + nodes))

    def _waited(self, *, overlaps: bool) -> float:
        """Share of the time to draft for which verify waits."""
        return 1.0 - self.evidence.hit_rate if overlaps else 1.0

    def _set(self, plan: Plan) -> None:
        before, self.current = self.current, plan
        if plan.shape is not None and (plan.shape, plan.least_reach) != (before.shape, before.least_reach):
            self.decisions["reshaped"] += plan.shape != before.shape
            self._apply(plan.shape, plan.least_reach)
        if plan.speculate != before.speculate:
            self.decisions["resumed" if plan.speculate else "paused"] += 1
        note_overlap(self.decisions, before, plan)


def note_overlap(decisions: Counter[str], before: Plan, now: Plan) -> None:
    """Counts a change of whether drafts overlap steps."""
    if (now.outcomes > 0) != (before.outcomes > 0):
        decisions["overlapped" if now.outcomes else "sequential"] += 1


def _first_chain(most: TreeShape) -> TreeShape:
    """A short one, which comes in time to tell something."""
    steps = min(most.num_steps, _TRIAL_STEPS)
    return TreeShape(steps, 1, steps + 1)


def shapes(most: TreeShape) -> list[TreeShape]:
    """Chains, and trees of as many branches as `most` has, no deeper than it and of no more nodes a step."""
    found = [TreeShape(steps, 1, steps + 1) for steps in range(1, min(most.num_steps, MAX_DEPTH) + 1)]
    if most.topk > 1:
        each = (most.num_draft_tokens - 1) / most.num_steps
        for steps in range(1, min(most.num_steps, MAX_DEPTH) + 1):
            nodes = max(most.topk, round(each * steps))
            found.append(TreeShape(steps, most.topk, min(nodes, most_nodes(steps, most.topk)) + 1))
    return found
