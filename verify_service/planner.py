"""What the next step does: which trees are verified, whether to wait for late drafts, which rows go in.

Decisions are by cost, in tokens per millisecond, from times that verify measured itself (brake.py).
"""

from __future__ import annotations

import time
from collections.abc import Collection

from outrider.cost_table import CostTable
from verify_service.assignment import Assignment
from verify_service.brake import choose_nodes
from verify_service.drafters import Drafters
from verify_service.hindsight import Judged
from verify_service.scheduler import Scheduler
from verify_service.session import Session
from verify_service.work import Work

_NS_PER_MS = 1e6
_FEW_NODES = 4


class Planner:
    """Chooses what a step runs and verifies; notes it in the assignments, and takes the step's pages.

    It also tells brakes which nodes of the trees that are followed came true.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        drafters: Drafters,
        costs: CostTable,
        *,
        max_nodes: int,
        max_wait_ms: float,
        brake: bool,
    ) -> None:
        self._scheduler = scheduler
        self._drafters = drafters
        self._costs = costs
        self._max_nodes = max_nodes
        self._max_wait_ms = max_wait_ms
        self._brake = brake
        self._judged: list[tuple[Assignment, Judged]] = []  # not taken into account yet

    def is_fixed(self, session: Session) -> bool:
        """Whether the user fixed the tree, so that it is not trimmed."""
        return not self._brake or session.speculation.num_draft_tokens is not None

    def match(self) -> list[Assignment]:
        """Sets each decoding session's match, trimmed to what pays; returns the assignments still waited for."""
        late: list[Assignment] = []
        free: list[Assignment] = []  # matched, and may be trimmed
        for session in self._scheduler.running:
            assignment = self._drafters.of(session)
            if assignment is None:
                continue
            assignment.match = None
            if assignment.is_silenced and not len(assignment.book):
                continue  # of many silent sessions each costs every step
            assignment.brake.fixed = self.is_fixed(session)
            remaining, speculation = session.remaining, session.speculation
            if session.num_uncomputed != 1 or session.output_len == 0 or remaining <= 1:
                continue
            found = assignment.book.match()
            if found is not None:
                if session.grammar is not None:
                    found = found.allowed_by(session.grammar)
                limit = min(self._max_nodes, (speculation.num_draft_tokens or self._max_nodes + 1) - 1)
                depth = min(remaining - 1, speculation.num_steps or remaining)
                assignment.match = match = found.kept(limit, depth)
                self._follow(assignment)
                assignment.hindsight.watch(match, session.committed_len)
                if not assignment.brake.fixed:
                    free.append(assignment)
            elif self._may_wait(assignment):
                late.append(assignment)
        if free:
            self._trim(free)
        return late

    def look_back(self) -> None:
        """Takes in what drafters took for their answers, and which nodes of earlier trees came true.

        No step waits for it.
        """
        for drafter in self._drafters:
            drafter.look_back()
        for session in self._scheduler.running:
            assignment = self._drafters.of(session)
            if assignment is not None:
                self._follow(assignment)
        if not self._judged:
            return
        value_ms, node_ms = self._worths()
        for assignment, judged in self._judged:
            depths = judged.tree.depths
            assignment.brake.judged(judged.scores, depths, judged.true, value_ms=value_ms, node_ms=node_ms)
        self._judged.clear()

    def _follow(self, assignment: Assignment) -> None:
        """Notes what became of the tree that is followed, if that is known now."""
        if assignment.hindsight.is_watching and (judged := assignment.hindsight.follow(assignment.session.committed)):
            self._judged.append((assignment, judged))

    def bound_ms(self, assignment: Assignment) -> float:
        """The longest that the assignment's drafter is waited for."""
        return min(assignment.drafter.replies.bound_ms, self._max_wait_ms)

    def wait_ms(self, late: list[Assignment]) -> float:
        """How long waiting for late drafts pays, against running what is ready with the late ones plainly.

        As long as it may be where all trees are fixed; else nobody waits for those that are.
        """
        bound = due_ms = nodes = accepted = 0.0
        now_ns, all_fixed = time.monotonic_ns(), all(map(self.is_fixed, self._scheduler.running))
        for assignment in late:
            if not all_fixed and assignment.brake.fixed:
                continue
            bound = max(bound, self.bound_ms(assignment))
            due_ms = max(due_ms, assignment.due_ms(assignment.drafter.replies.least_ms, now_ns))
            nodes += assignment.brake.expected_nodes
            accepted += assignment.brake.hoped_accepted
        if all_fixed:
            return bound
        rows, tokens = self._ready()
        # The wait at which both come to as many tokens per ms; one too short for any answer is for nothing.
        break_even = (tokens + accepted) * self._costs.ms(rows) / tokens - self._costs.ms(rows + round(nodes))
        return min(bound, break_even) if due_ms < break_even else 0.0

    def plan(self, without: Collection[int] = ()) -> list[Work]:
        """Takes pages and lays the step out, oldest session first; drafts only get pages that nobody else needs.

        without: ids of sessions that the step leaves out.
        """
        budget = self._scheduler.chunk
        kept: int | None = None
        works: list[Work] = []
        for session in list(self._scheduler.running):
            if session.session_id in without or session.table_row < 0:
                continue  # the latter: preempted by an older one just now
            uncomputed = count = session.num_uncomputed
            if count > 1:
                if kept is None:
                    kept = self._kept_for_short(without)
                if count <= kept:
                    kept -= count
                else:
                    count = min(count, budget - kept)
                budget -= count
            if count == 0:
                continue
            slots = self._scheduler.take_slots(session, count)
            if slots is None:
                continue
            assignment = self._drafters.of(session)
            samples = count == uncomputed
            works.append(Work(session, slots, samples, decodes=samples and count == 1, assignment=assignment))
        for work in works:
            match = work.assignment.match if work.assignment is not None else None
            if match is None or not work.samples or work.num_rows != 1:
                continue
            spare = self._scheduler.pages.take_spare_slots(work.session, 1, len(match.tree))
            match = match.kept(len(spare), work.session.remaining)
            if len(match.tree):
                work.verify(match, spare[: len(match.tree)])
        return works

    def _kept_for_short(self, without: Collection[int]) -> int:
        """Rows of the chunk for prompts that end with it: up to half, lest they wait for all long ones before them."""
        kept = 0
        for session in self._scheduler.running:
            count = session.num_uncomputed
            if count > 1 and session.session_id not in without and kept + count <= self._scheduler.chunk // 2:
                kept += count
        return kept

    def _may_wait(self, assignment: Assignment) -> bool:
        session = assignment.session
        return (
            assignment.brake.listens
            and not assignment.drafter.stalled
            and assignment.waited_len != session.committed_len
            and not assignment.book.declined()
        )

    def _worths(self) -> tuple[float, float]:
        """What a token is worth in milliseconds of a plain step, and about what a row more costs."""
        sessions = max(1, sum(session.num_uncomputed == 1 for session in self._scheduler.running))
        plain_ms = self._costs.ms(sessions)
        return plain_ms / sessions, (self._costs.ms(sessions + _FEW_NODES) - plain_ms) / _FEW_NODES

    def _trim(self, matched: list[Assignment]) -> None:
        likely: list[list[float]] = []
        for assignment in matched:
            assert assignment.match is not None
            probabilities = assignment.brake.probabilities(assignment.match.scores, assignment.match.tree.depths)
            likely.append(sorted(probabilities, reverse=True))
        rows, tokens = self._ready(without=set(matched))
        for assignment, count in zip(matched, choose_nodes(self._costs, rows, tokens, likely), strict=True):
            assert assignment.match is not None
            assignment.match = assignment.match.kept(count, assignment.session.remaining)

    def _ready(self, without: Collection[Assignment] = ()) -> tuple[int, float]:
        """Rows, and tokens to be expected, of a step that starts now; `without` the drafts of those."""
        rows, tokens = 0, 0.0
        for session in self._scheduler.running:
            rows += min(session.num_uncomputed, self._scheduler.chunk)
            tokens += 1.0
            assignment = self._drafters.of(session)
            if assignment is not None and (match := assignment.match) is not None and assignment not in without:
                rows += len(match.tree)
                tokens += sum(assignment.brake.probabilities(match.scores, match.tree.depths))
        return max(rows, 1), max(tokens, 1.0)


def ms_since(start_ns: int) -> float:
    """Milliseconds since a monotonic time."""
    return (time.monotonic_ns() - start_ns) / _NS_PER_MS
