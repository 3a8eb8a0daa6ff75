"""Which sessions a step leaves out, so that verify does not stand idle while drafts are being made. Pure, by cost.

Two cases, both decided from the table of step times and from how long drafters take to answer:

- Some sessions' drafts are there and others' are not: the step runs with those that are ready, if that and a second
  step for the late ones take less than to wait and run all, and only where the first ends before the late ones have
  been waited for as long as is allowed: no stream's tokens come later for it than for a wait.
- All drafts are there, but drafters were waited for last time: the sessions part into two halves that take turns, if
  two half batches cost less than one whole and the wait. Whoever has not run for longest is in the half that runs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_ALPHA = 0.1
_MARGIN = 0.95  # a change that gains less is not worth what the estimates may err by
_WAITED_SHARE = 0.5  # of the steps: beyond, drafts are made after verdicts and not before them

StepMs = Callable[[int], float]
"""Expected milliseconds of a step by its rows."""


def leaving_out_pays(step_ms: StepMs, *, ready_rows: int, late_rows: int, wait_ms: float) -> bool:
    """Whether two steps, the second for those whose drafts come in `wait_ms`, end before one that waits for all."""
    apart_ms = max(step_ms(ready_rows), wait_ms) + step_ms(late_rows)
    return apart_ms < _MARGIN * (wait_ms + step_ms(ready_rows + late_rows))


def halves_pay(step_ms: StepMs, *, rows: int, reply_ms: float) -> bool:
    """Whether two halves of `rows` that take turns get round sooner than a whole that waits for its drafts."""
    first, second = step_ms(rows - rows // 2), step_ms(rows // 2)
    return max(first + second, first + reply_ms) < _MARGIN * (step_ms(rows) + reply_ms)


@dataclass(eq=False, slots=True)
class Part:
    """One session that could run. rows: of its root and draft; deadline_ns: until when it may be left out, if late."""

    session: int
    rows: int
    late: bool = False
    deadline_ns: int = 0


class Halves:
    """Says whom to leave out, step by step. Remembers who ran when, and how often drafters had to be waited for."""

    def __init__(self) -> None:
        self.num_parted = 0  # steps that left somebody out, for the metrics
        self._step = 0
        self._ran: OrderedDict[int, int] = OrderedDict()  # session -> step, in their order
        self._waited = 0.0  # share of steps in which somebody was late

    @property
    def expects_waits(self) -> bool:
        """Whether drafts come late as a rule, so that a step may leave out even sessions that have theirs."""
        return self._waited >= _WAITED_SHARE

    def leave_out(self, parts: Sequence[Part], step_ms: StepMs, *, reply_ms: float, now_ns: int) -> set[int]:
        """Sessions that the step now starting is better without; never all of them."""
        late = [part for part in parts if part.late]
        ready = [part for part in parts if not part.late]
        if not ready:
            return set()
        if late:
            rows, late_rows = (sum(part.rows for part in some) for some in (ready, late))
            left_ms = min(part.deadline_ns - now_ns for part in late) / 1e6
            if left_ms < step_ms(rows):  # the step would outlast what a late session may wait
                return set()
            wait_ms = min(reply_ms, left_ms)
            pays = leaving_out_pays(step_ms, ready_rows=rows, late_rows=late_rows, wait_ms=wait_ms)
            return {part.session for part in late} if pays else set()
        rows = sum(part.rows for part in ready)
        if len(ready) < 2 or not self.expects_waits or not halves_pay(step_ms, rows=rows, reply_ms=reply_ms):
            return set()
        in_turn = sorted(ready, key=lambda part: (self._ran.get(part.session, 0), part.session))
        return {part.session for part in in_turn[(len(in_turn) + 1) // 2 :]}

    def ran(self, sessions: Sequence[int], *, num_late: int, num_left_out: int) -> None:
        """Takes in a step: who ran, and how many drafts were late when it was planned."""
        self._step += 1
        self.num_parted += num_left_out > 0
        self._waited += _ALPHA * ((num_late > 0) - self._waited)
        for session in sessions:
            self._ran[session] = self._step
            self._ran.move_to_end(session)
        while self._step - next(iter(self._ran.values()), self._step) >= 1024:
            self._ran.popitem(last=False)
