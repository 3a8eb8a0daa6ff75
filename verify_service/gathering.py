"""What a step begins with: proposals matched, late ones waited for as long as that pays, sessions left out.

Between two steps nothing stands before the drafters: they are told first, and what can wait is done while they draft.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Sequence

from outrider.cost_table import CostTable
from verify_service.assignment import Assignment
from verify_service.commands import Command
from verify_service.counting import PLAN, WAIT, Counters
from verify_service.drafters import Drafters
from verify_service.halves import Halves, Part
from verify_service.planner import Planner, ms_since
from verify_service.scheduler import Scheduler
from verify_service.telling import Teller
from verify_service.turns import Pause, Settle, Wait
from verify_service.work import Work

# In which the event loop, which needs the interpreter for it, sends what drafters were just told.
BREATH_S = 0.0003


class Gatherer:
    """Matches proposals to sessions before a step, and waits for late ones. Owned by the engine.

    left_out: ids of sessions that the step under way is better without. obey: does what commands say; whether the loop
    goes on. rest: does what can wait.
    """

    def __init__(
        self, scheduler: Scheduler, drafters: Drafters, planner: Planner, teller: Teller, *,
        costs: CostTable, counters: Counters, obey: Callable[[list[Command]], bool], rest: Callable[[], object],
    ) -> None:  # fmt: skip
        self.halves = Halves()
        self.left_out: Collection[int] = ()
        self._scheduler = scheduler
        self._drafters = drafters
        self._planner = planner
        self._teller = teller
        self._costs = costs
        self._counters = counters
        self._obey = obey
        self._rest = rest

    def gather(self) -> Generator[Pause, list[Command], tuple[float, list[Assignment]]]:
        """Matches proposals and waits for late ones as long as that pays; returns the time waited, and for whom."""
        late = self._give_up_on(self._planner.match())
        if not late:
            self.left_out = self._leave_out(late)
            return 0.0, []
        wait_ms = self._planner.wait_ms(late)
        if wait_ms <= 0.0:
            self.left_out = self._leave_out(late) or self._leave_out_fixed(late)
            if self.left_out:
                self._teller.tell_waiting([one for one in late if one.session.session_id in self.left_out])
            return 0.0, []
        self._counters.lap(PLAN)
        self._counters.waits += 1
        waited_for, start_ns = late, time.monotonic_ns()
        deadline_ns = start_ns + int(wait_ms * 1e6)
        self._teller.tell_waiting(late)
        self.left_out = self._leave_out(late)
        goes_on = True
        if not self.left_out:
            if commands := (yield Settle(min(start_ns + int(BREATH_S * 1e9), deadline_ns), deadline_ns)):
                goes_on = self._obey(commands)
                late = self._planner.match()
            self._rest()
            self.left_out = self._leave_out(late)
        while goes_on and late and not self.left_out and time.monotonic_ns() < deadline_ns:
            commands = yield Wait(deadline_ns)
            if not commands:
                break
            goes_on = self._obey(commands)
            late = self._planner.match()
            self.left_out = self._leave_out(late)
        if late:
            self.left_out = self.left_out or self._leave_out_fixed(late)
            self._missed([one for one in late if one.session.session_id not in self.left_out])
        self._counters.lap(WAIT)
        return ms_since(start_ns), waited_for

    def ran(self, works: Sequence[Work], num_late: int) -> None:
        """Takes in which sessions the step runs; one alone takes turns with nobody."""
        if len(works) > 1 or self.left_out:
            sessions = [work.session.session_id for work in works]
            self.halves.ran(sessions, num_late=num_late, num_left_out=len(self.left_out))

    def _leave_out(self, late: list[Assignment]) -> Collection[int]:
        """Ids of sessions that the step is better without (halves.py)."""
        running = self._scheduler.running
        if len(running) < 2 or len(late) == len(running) or not (late or self.halves.expects_waits):
            return ()
        parts: list[Part] = []
        reply_ms, waits_for, now_ns = 0.0, set(late), time.monotonic_ns()
        for session in running:
            assignment = self._drafters.of(session)
            rows = session.num_uncomputed
            if assignment is not None and assignment in waits_for:
                reply_ms = max(reply_ms, assignment.due_ms(assignment.drafter.replies.mean_ms, now_ns))
                rows += round(assignment.brake.expected_nodes)
                parts.append(Part(session.session_id, rows, late=True, deadline_ns=self._deadline_ns(assignment)))
            elif assignment is not None and assignment.match is not None:
                reply_ms = reply_ms if late else max(reply_ms, assignment.drafter.replies.mean_ms)
                parts.append(Part(session.session_id, rows + len(assignment.match.tree)))
            elif late:
                parts.append(Part(session.session_id, rows))
            else:
                return ()  # who decodes plainly runs in every step
        return self.halves.leave_out(parts, self._costs.ms, reply_ms=reply_ms, now_ns=now_ns)

    def _leave_out_fixed(self, late: list[Assignment]) -> Collection[int]:
        """Ids of late sessions whose users fixed their trees: others do not wait for them, and they keep their drafts.

        Without those for whom the step of the others would outlast what they may wait.
        """
        fixed = {one.session.session_id: one for one in late if one.brake.fixed}
        running = self._scheduler.running
        if not fixed or len(fixed) == len(running):
            return ()
        rows = 0
        for session in running:
            if session.session_id not in fixed:
                assignment = self._drafters.of(session)
                match = assignment.match if assignment is not None else None
                rows += min(session.num_uncomputed, self._scheduler.chunk) + (0 if match is None else len(match.tree))
        now_ns = time.monotonic_ns()
        ends_ns = now_ns + int(self._costs.ms(rows) * 1e6)
        # Who is left out is told of the step before now; one without a verdict was opened late, and is not waited for.
        untold_ns = {number: now_ns if one.verdict is not None else 0 for number, one in fixed.items()}
        return {number for number, one in fixed.items() if self._deadline_ns(one, untold_ns[number]) >= ends_ns}

    def _deadline_ns(self, assignment: Assignment, untold_ns: int = 0) -> int:
        """Until when a draft for the newest length is worth waiting for, or leaving its session out.

        untold_ns: when the drafter is told of it, if it was not yet.
        """
        asked_ns = assignment.asked_ns.get(assignment.session.committed_len, untold_ns)
        return asked_ns + int(self._planner.bound_ms(assignment) * 1e6)

    def _give_up_on(self, late: list[Assignment]) -> list[Assignment]:
        """`late`, less the sessions that were left out and whose deadline has passed: they decode plainly now."""
        if not late or not self.left_out:
            return late
        now_ns = time.monotonic_ns()
        missed = [
            assignment for assignment in late
            if assignment.session.session_id in self.left_out and self._deadline_ns(assignment) <= now_ns
        ]  # fmt: skip
        self._missed(missed)
        return [assignment for assignment in late if assignment not in missed]

    def _missed(self, late: list[Assignment]) -> None:
        """Has sessions decode plainly whose drafts did not come while they were waited for."""
        self._counters.missing += len(late)
        for assignment in late:
            assignment.waited_len = assignment.session.committed_len
        for drafter in {assignment.drafter for assignment in late}:
            drafter.missed_in_a_row += 1
