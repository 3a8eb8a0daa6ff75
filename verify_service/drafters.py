"""Enlisted drafters, and which of them serves which session. Owned by the engine."""

from __future__ import annotations

import collections
from collections.abc import Iterator

import numpy as np

from outrider.v1 import common_pb2, verify_pb2
from verify_service.assignment import Assignment
from verify_service.brake import SessionBrake
from verify_service.counting import DraftTotals
from verify_service.drafter import Drafter, Mode
from verify_service.drafter_record import DrafterRecord
from verify_service.proposals import ProposalBook
from verify_service.session import Session

# A drafter that gets this many proposals refused floods; its stream is ended. One kept for a longer length than
# any before takes some off.
MAX_REFUSALS = 4096
REFUSALS_FORGIVEN = 64
# Drafters, by name, of which it is kept what the operator set; the one set first is forgotten.
MAX_MODES = 1024
# Algorithms and models of drafters of which it is kept what they have shown; the one that left first is forgotten.
MAX_RECORDS = 64


class Drafters:
    """All enlisted drafters and the assignments of sessions to them."""

    def __init__(self, *, max_kept: int, max_assumed: int, outbox_bytes: int) -> None:
        self._max_kept = max_kept
        self._max_assumed = max_assumed
        self._outbox_bytes = outbox_bytes
        self.totals: collections.defaultdict[int, DraftTotals] = collections.defaultdict(DraftTotals)  # by algorithm
        self.disabled_algorithms: set[common_pb2.Algorithm] = set()  # by the operator
        # What the one that left last had shown: the next with its algorithm and model, by any name, begins from that.
        self._records: dict[tuple[common_pb2.Algorithm, str], DrafterRecord] = {}
        self._modes: dict[str, Mode] = {}  # by drafter id: what the operator set; one that comes back is no other
        self._drafters: list[Drafter] = []
        self._by_session: dict[int, Assignment] = {}
        self._generations: dict[int, int] = {}
        self._barred: dict[int, set[str]] = {}  # by session id: drafters (by id) that will not get it again
        self._moved: set[int] = set()  # ids of sessions that went over from a drafter that gains nothing

    def __iter__(self) -> Iterator[Drafter]:
        return iter(self._drafters)

    def __len__(self) -> int:
        return len(self._drafters)

    def enlist(self, drafter: Drafter) -> None:
        """Takes a drafter on."""
        drafter.totals = self.totals[drafter.algorithm]
        drafter.outbox.most_with_rows = self._outbox_bytes // 2
        if (record := self._records.get((drafter.algorithm, drafter.draft_model))) is not None:
            drafter.record = record.handed_on()
        drafter.mode = self._modes.get(drafter.drafter_id, Mode.ENABLED)
        self._drafters.append(drafter)

    def leave(self, drafter: Drafter) -> None:
        """Forgets a drafter whose stream ended."""
        if drafter not in self._drafters:
            return
        self._drafters.remove(drafter)
        drafter.totals.counts.update(drafter.counts)
        drafter.counts = drafter.totals.counts  # what the step under way still counts goes there
        key = drafter.algorithm, drafter.draft_model
        self._records.pop(key, None)
        self._records[key] = drafter.record
        if len(self._records) > MAX_RECORDS:
            del self._records[next(iter(self._records))]
        for assignment in drafter.assignments.values():
            del self._by_session[assignment.session.session_id]
        drafter.assignments.clear()

    def of(self, session: Session) -> Assignment | None:
        """The session's assignment now."""
        return self._by_session.get(session.session_id)

    def assign(self, session: Session, *, row_ms: float | None = None) -> Assignment | None:
        """Opens the session to the least busy drafter that matches what the request asks for.

        A drafter whose sessions gain nothing comes after those that gain, or may, but for a try now and then.

        row_ms: what a row of its text may cost a drafter with a model; while its sessions gain nothing, few are opened.
        None opens it whatever it costs.
        """
        fitting = [drafter for drafter in self._open() if self._fits(drafter, session)]
        drafter = self._choose(session, fitting, row_ms) if session.speculation.enabled and fitting else None
        if drafter is None:
            return None
        generation = self._generations.get(session.session_id, 0) + 1
        self._generations[session.session_id] = generation
        book = ProposalBook(prompt_len=session.prompt_len, max_kept=self._max_kept, max_assumed=self._max_assumed)
        assignment = Assignment(session, drafter, generation, book, SessionBrake.of(drafter.record))
        assignment.brake.told = True
        drafter.assignments[session.session_id] = assignment
        self._by_session[session.session_id] = assignment
        drafter.outbox.open(self._opened(assignment))
        drafter.wake()
        return assignment

    def misplaced(self) -> Session | None:
        """A session whose drafter gains nothing while another, which does or may, has room for it; none goes twice.

        A session that its drafter has as a try stays: it shows what that drafter is worth now.
        """
        poor = [drafter for drafter in self._drafters if drafter.record.gains_nothing]
        others = [drafter for drafter in self._open() if not drafter.record.gains_nothing] if poor else []
        if not others:
            return None
        for drafter in poor:
            for number, assignment in drafter.assignments.items():
                if number in self._moved or drafter.record.tries(number):
                    continue
                if any(self._fits(other, assignment.session) for other in others):
                    return assignment.session
        return None

    def move(self, session: Session) -> Assignment | None:
        """Opens a misplaced session to a drafter that gains, or may, in place of its own."""
        self._moved.add(session.session_id)
        self.close(session, verify_pb2.CLOSE_REASON_REASSIGNED)
        return self.assign(session)

    def _open(self) -> list[Drafter]:
        """The drafters that may be given sessions and have room for one more beside those that they know as theirs."""
        return [
            drafter
            for drafter in self._drafters
            if len(drafter.assignments) + drafter.outbox.num_unread_closed < drafter.max_sessions
            and drafter.mode is Mode.ENABLED
            and drafter.algorithm not in self.disabled_algorithms
        ]

    def _fits(self, drafter: Drafter, session: Session) -> bool:
        """Whether a drafter matches what the request asks for, and may have the session."""
        wanted = session.speculation.algorithm
        is_barred = drafter.drafter_id in self._barred.get(session.session_id, ())
        return wanted in (common_pb2.ALGORITHM_UNSPECIFIED, drafter.algorithm) and not is_barred

    def _choose(self, session: Session, fitting: list[Drafter], row_ms: float | None) -> Drafter | None:
        fitting = sorted(fitting, key=lambda drafter: len(drafter.assignments))
        poor = [drafter for drafter in fitting if drafter.record.gains_nothing]
        hopeful = next((drafter for drafter in fitting if not drafter.record.gains_nothing), None)
        if row_ms is None:
            return hopeful or fitting[0]
        if hopeful is None:
            return next((drafter for drafter in poor if drafter.may_open(session, row_ms)), None)
        for drafter in poor if session.session_id not in self._moved else ():
            if drafter.record.is_due_a_try and drafter.may_open(session, row_ms):
                drafter.record.tried = session.session_id, session.committed_len
                return drafter
        return hopeful

    def may_draft_by_ngrams(self, session: Session) -> bool:
        """Whether an n-gram drafter is there that the session may be assigned to, now or later."""
        wanted = session.speculation.algorithm
        return (
            session.speculation.enabled
            and wanted in (common_pb2.ALGORITHM_UNSPECIFIED, common_pb2.ALGORITHM_NGRAM)
            and any(drafter.algorithm == common_pb2.ALGORITHM_NGRAM for drafter in self._drafters)
        )

    def close(self, session: Session, reason: verify_pb2.CloseReason, *, bar: bool = False) -> None:
        """Takes the session from its drafter, if it has one; `bar`: that drafter will not get it again."""
        assignment = self._by_session.pop(session.session_id, None)
        if assignment is None:
            return
        drafter = assignment.drafter
        del drafter.assignments[session.session_id]
        drafter.record.end_try(session.session_id, session.committed_len)
        if bar:
            self._bar(session, drafter)
        if assignment.untold is not None:
            assignment.tell_last(assignment.take_untold())
        drafter.outbox.close(session.session_id, assignment.generation, reason)
        drafter.wake()

    def set_mode(self, drafter: Drafter, mode: Mode) -> int:
        """Lets a drafter, and later ones of its name, have what `mode` says; returns how many sessions it lost."""
        drafter.mode = mode
        self._modes.pop(drafter.drafter_id, None)
        if mode is not Mode.ENABLED:
            self._modes[drafter.drafter_id] = mode
            if len(self._modes) > MAX_MODES:
                del self._modes[next(iter(self._modes))]
        return self._take_back(drafter) if mode is Mode.DISABLED else 0

    def set_algorithm(self, algorithm: common_pb2.Algorithm, *, enabled: bool) -> int:
        """Switches an algorithm on or off; returns how many sessions were taken from its drafters."""
        if enabled:
            self.disabled_algorithms.discard(algorithm)
            return 0
        self.disabled_algorithms.add(algorithm)
        return sum(self._take_back(drafter) for drafter in self._drafters if drafter.algorithm == algorithm)

    def _take_back(self, drafter: Drafter) -> int:
        sessions = [assignment.session for assignment in drafter.assignments.values()]
        for session in sessions:
            self.close(session, verify_pb2.CLOSE_REASON_REASSIGNED)
        return len(sessions)

    def forget(self, session: Session) -> None:
        """Drops what is remembered of a session that ended."""
        self._generations.pop(session.session_id, None)
        self._barred.pop(session.session_id, None)
        self._moved.discard(session.session_id)

    def bound_outboxes(self) -> None:
        """Closes sessions to drafters that read too slowly, largest first; if that is not enough, their streams.

        Not enough: what is left is too much, or the bound is passed again before the first such notice was read.
        """
        for drafter in list(self._drafters):
            if drafter.outbox.num_bytes > self._outbox_bytes:
                self._bound_outbox(drafter)

    def expel(self, drafter: Drafter, reason: str) -> None:
        """Ends a drafter's stream; its sessions are free for others at once, even while it reads nothing."""
        if drafter in self._drafters:
            self.leave(drafter)
            drafter.end(reason)

    def _bound_outbox(self, drafter: Drafter) -> None:
        sessions = [] if drafter.outbox.has_unread_slow else drafter.outbox.sessions_by_size()
        for session_id, generation in sessions:
            assignment = drafter.find(session_id, generation)
            if assignment is None:
                drafter.outbox.drop(session_id, generation)
            else:
                drafter.outbox.close_slow(session_id, generation)
                del drafter.assignments[session_id], self._by_session[session_id]
                drafter.record.end_try(session_id, assignment.session.committed_len)
                self._bar(assignment.session, drafter)
            if drafter.outbox.num_bytes <= self._outbox_bytes // 2:
                drafter.wake()
                return
        self.expel(drafter, f"{drafter.outbox.num_bytes} bytes wait to be read; at most {self._outbox_bytes} may")

    def _bar(self, session: Session, drafter: Drafter) -> None:
        self._barred.setdefault(session.session_id, set()).add(drafter.drafter_id)

    def _opened(self, assignment: Assignment) -> verify_pb2.Opened:
        session = assignment.session
        shared = session.shares_prefix_with
        return verify_pb2.Opened(
            session=session.session_id,
            generation=assignment.generation,
            tokens=session.committed.astype(np.dtype("<i4")).tobytes(),
            prompt_len=session.prompt_len,
            speculative=session.speculation.wire,
            remaining_tokens=session.remaining,
            remaining_context=session.remaining,
            corpus_scope=session.corpus_scope,
            prediction_tokens=session.prediction,
            shares_prefix_with=shared if shared in assignment.drafter.assignments else None,
            traceparent=session.traceparent,
        )
