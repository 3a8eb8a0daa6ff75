"""What drafters are told between steps: verdicts, with what the step now starting verifies for each session."""

from __future__ import annotations

import time

from outrider.v1 import verify_pb2
from verify_service.assignment import Assignment
from verify_service.drafters import Drafters
from verify_service.features import FeatureSender
from verify_service.planner import Work


class Teller:
    """Completes prepared verdicts and puts them in the drafters' outboxes."""

    def __init__(self, drafters: Drafters, features: FeatureSender) -> None:
        self._drafters = drafters
        self._features = features

    def opened(self, assignment: Assignment | None) -> None:
        """Gives a drafter that joins late the feature rows that the pool holds."""
        if assignment is not None:
            session = assignment.session
            self._features.send(assignment, min(session.kv_len, session.committed_len - 1))

    def tell_waiting(self, late: list[Assignment]) -> None:
        """The late ones are waited for; no second notice follows for this length."""
        self._features.fill_verdicts(late)
        for assignment in late:
            base_len = assignment.session.committed_len
            self._tell(assignment, verify_pb2.Next(kind=verify_pb2.NEXT_KIND_WAITING, base_len=base_len))
        self._wake(late)

    def tell(self, works: list[Work]) -> bool:
        """All other verdicts, now that the step is known; matched proposals are being verified from here on.

        Returns whether there were any.
        """
        working = {work.session.session_id: work for work in works}
        told: list[Assignment] = []
        for drafter in self._drafters:
            own: list[tuple[Assignment, Work | None]] = []
            for assignment in drafter.assignments.values():
                work = working.get(assignment.session.session_id)
                if work is not None and work.match is not None:
                    assignment.book.begin(work.match)
                # Only a session that decodes has the rows of all that was not told: a preempted one makes them anew.
                if assignment.untold is not None and work is not None and work.decodes and assignment.brake.asks:
                    self._take_untold(assignment)
                if assignment.verdict is not None:
                    own.append((assignment, work))
            self._features.fill_verdicts([assignment for assignment, _ in own])
            for assignment, work in own:
                self._tell(assignment, _next(assignment, work))
                told.append(assignment)
            # A ring may be full of slots that no message names any more: they would stay taken.
            if drafter.ring is not None and drafter.ring.was_full:
                drafter.ring.was_full = False
                drafter.outbox.name_no_slots_before(drafter.ring.end)
        self._wake(told)
        self._drafters.bound_outboxes()
        return bool(told)

    def _take_untold(self, assignment: Assignment) -> None:
        """Prepares a verdict of all that was not told."""
        assignment.verdict = verdict = assignment.take_untold()
        self._features.send(assignment, verdict.base_len - 1)
        self._features.prepare([assignment])

    def _tell(self, assignment: Assignment, following: verify_pb2.Next) -> None:
        verdict = assignment.verdict
        if verdict is None:
            return
        verdict.next.CopyFrom(following)
        asks = assignment.brake.tell()
        if not asks:
            verdict.node_budget = 0
        assignment.drafter.outbox.verdict(verdict)
        assignment.verdict = None
        assignment.is_silenced = not asks
        if asks:
            assignment.asked(assignment.session.committed_len, time.monotonic_ns())

    @staticmethod
    def _wake(assignments: list[Assignment]) -> None:
        for drafter in {assignment.drafter for assignment in assignments}:
            drafter.wake()


def _next(assignment: Assignment, work: Work | None) -> verify_pb2.Next:
    base_len = assignment.session.committed_len
    if work is not None and (match := work.match) is not None:
        return verify_pb2.Next(
            kind=verify_pb2.NEXT_KIND_PROPOSAL, base_len=base_len, proposal_id=match.proposal.proposal_id,
            root_node=match.root_node, nodes_kept=len(match.tree),
        )  # fmt: skip
    plain = work is not None and work.samples
    return verify_pb2.Next(kind=verify_pb2.NEXT_KIND_PLAIN if plain else verify_pb2.NEXT_KIND_NONE, base_len=base_len)
