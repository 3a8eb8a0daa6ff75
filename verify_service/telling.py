"""What drafters are told between steps: verdicts, with what the step now starting verifies for each session."""

from __future__ import annotations

import time

from outrider.v1 import verify_pb2
from verify_service.assignment import Assignment
from verify_service.drafter import Drafter
from verify_service.drafters import Drafters
from verify_service.features import FeatureSender
from verify_service.proposals import Match
from verify_service.work import Work


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
        """Tells late drafters that they are waited for; no second notice follows for this length."""
        self._features.fill_verdicts(late)
        for assignment in late:
            self._tell(assignment, verify_pb2.NEXT_KIND_WAITING)
        for drafter in {assignment.drafter for assignment in late}:
            drafter.wake()

    def tell(self, works: list[Work]) -> bool:
        """Tells all other verdicts, now that the step is known; matched proposals are being verified from here on.

        Returns whether there were any.
        """
        working = {work.assignment: work for work in works}
        told: list[Drafter] = []
        for drafter in self._drafters:
            own: list[Assignment] = []
            for assignment in drafter.assignments.values():
                work = working.get(assignment)
                if work is not None and work.match is not None:
                    assignment.book.begin(work.match)
                # Only a session that decodes has the rows of all that was not told: a preempted one makes them anew.
                if assignment.untold is not None and work is not None and work.decodes and assignment.brake.asks:
                    self._take_untold(assignment)
                if assignment.verdict is not None:
                    own.append(assignment)
            if own:
                self._features.fill_verdicts(own)
                for assignment in own:
                    self._tell_next(assignment, working.get(assignment))
                told.append(drafter)
            # A ring may be full of slots that no message names any more: they would stay taken.
            if drafter.ring is not None and drafter.ring.was_full:
                drafter.ring.was_full = False
                drafter.outbox.name_no_slots_before(drafter.ring.end)
        for drafter in told:
            drafter.wake()
        self._drafters.bound_outboxes()
        return bool(told)

    def _take_untold(self, assignment: Assignment) -> None:
        """Prepares a verdict of all that was not told."""
        assignment.verdict = verdict = assignment.take_untold()
        self._features.send(assignment, verdict.base_len - 1)
        self._features.prepare([assignment])

    def _tell_next(self, assignment: Assignment, work: Work | None) -> None:
        if work is None or not work.samples:
            self._tell(assignment, verify_pb2.NEXT_KIND_NONE)
        elif work.match is None:
            self._tell(assignment, verify_pb2.NEXT_KIND_PLAIN)
        else:
            self._tell(assignment, verify_pb2.NEXT_KIND_PROPOSAL, work.match)

    def _tell(self, assignment: Assignment, kind: verify_pb2.NextKind, match: Match | None = None) -> None:
        verdict = assignment.verdict
        if verdict is None:
            return
        following = verdict.next  # in place: a message that is copied takes several times as long
        following.kind, following.base_len = kind, assignment.session.committed_len
        if match is not None:
            following.proposal_id, following.root_node = match.proposal.proposal_id, match.root_node
            following.nodes_kept = len(match.tree)
        asks = assignment.brake.tell()
        if not asks:
            verdict.node_budget = 0
        assignment.drafter.outbox.verdict(verdict)
        assignment.verdict = None
        assignment.is_silenced = not asks
        if asks:
            assignment.asked(assignment.session.committed_len, time.monotonic_ns())
