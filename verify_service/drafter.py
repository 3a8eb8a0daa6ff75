"""One enlisted drafter: what it has, what it has shown, and what an operator lets it have. Owned by the engine."""

from __future__ import annotations

import collections
import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from outrider.row_ring import RowRing
from outrider.telemetry import get_logger
from outrider.v1 import common_pb2, verify_pb2
from outrider.wire import MAX_DETAIL_CHARS
from verify_service.assignment import Assignment
from verify_service.counting import DraftTotals
from verify_service.drafter_record import DrafterRecord
from verify_service.outbox import RoundOutbox
from verify_service.proposals import Refusal, Refused
from verify_service.replies import ReplyTimes
from verify_service.session import Session

log = get_logger(__name__)

# A drafter that let this many waits run out is not waited for until it answers.
MAX_MISSED_IN_A_ROW = 2
# Proposals of a stream that went stale, after which no more are explained.
MAX_EXPLAINED = 8


class Mode(enum.Enum):
    """What an operator lets a drafter have."""

    ENABLED = "enabled"
    DRAINING = "draining"  # no new sessions
    DISABLED = "disabled"  # none


@dataclass(slots=True, eq=False)
class Drafter:
    """One enlisted process."""

    drafter_id: str
    algorithm: common_pb2.Algorithm
    draft_model: str
    max_sessions: int
    needs_features: bool
    wake: Callable[[], object]  # tells the event loop that the outbox has something
    end: Callable[[str], object]  # asks the event loop to end the stream, for the reason given
    taken: Callable[[], object]  # tells the event loop that a frame was handled
    outbox: RoundOutbox = field(default_factory=RoundOutbox)
    assignments: dict[int, Assignment] = field(default_factory=dict)  # by session id
    record: DrafterRecord = field(default_factory=DrafterRecord)
    replies: ReplyTimes = field(default_factory=ReplyTimes)
    answers: list[tuple[int, bool]] = field(default_factory=list)  # ns that each took, and whether it was a first one
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    totals: DraftTotals = field(default_factory=DraftTotals)  # its algorithm's, once it is enlisted
    mode: Mode = Mode.ENABLED
    refusals: int = 0
    missed_in_a_row: int = 0  # waits that ran out since its last answer
    ring: RowRing | None = None  # for feature rows, where it seems to run on this host
    _mistakes: set[str] = field(default_factory=set)  # that were logged

    @property
    def stalled(self) -> bool:
        """Whether it is not waited for any more, until it answers again."""
        return self.missed_in_a_row >= MAX_MISSED_IN_A_ROW

    def may_open(self, session: Session, row_ms: float) -> bool:
        """Whether a session may be opened to it; pays for that where its sessions gain nothing. row_ms: of a row."""
        reads_text = self.algorithm != common_pb2.ALGORITHM_NGRAM  # a model that runs all the text first
        return self.record.may_open(row_ms * session.committed_len * reads_text)

    def look_back(self) -> None:
        """Takes in how long its answers took since the last call; no step waits for that."""
        answers, self.answers = self.answers, []
        self.replies.observe([took_ns / 1e6 for took_ns, is_first in answers if not is_first])
        for took_ns, _ in answers:
            self.totals.ages.observe(took_ns / 1e9)

    def find(self, session: int, generation: int) -> Assignment | None:
        """The assignment that a message from this drafter is about."""
        assignment = self.assignments.get(session)
        return assignment if assignment is not None and assignment.generation == generation else None

    @property
    def is_told_why(self) -> bool:
        """Whether it is told in words why a proposal is stale: whoever errs in positions sees it by the first few."""
        return self.counts[Refusal.STALE.value] < MAX_EXPLAINED

    def prove(self, nonce: bytes) -> None:
        """The drafter has sent what it found in the ring's header."""
        if self.ring is not None and not self.ring.prove(nonce):
            self.log_mistake("shared_memory_nonce is not what the ring's header begins with")

    def has_read(self, row: int) -> None:
        """The drafter has read the ring as far as this row."""
        if self.ring is not None and not self.ring.read(row):
            self.log_mistake("consumed_slot_seq is above the last row that was written")

    def log_mistake(self, what: str) -> None:
        """Logs a mistake that the drafter is not told of, once for its stream. Any thread may."""
        if what not in self._mistakes:
            self._mistakes.add(what)
            log.warning(what, drafter=self.drafter_id)

    def refuse(self, session: int, generation: int, refused: Refused) -> None:
        """Counts a refused proposal and tells the drafter."""
        self.counts[refused.why.value] += 1
        self.refusals += 1
        self.outbox.reject(
            verify_pb2.Rejected(
                session=session,
                generation=generation,
                proposal_id=refused.proposal_id,
                reason=f"REJECT_REASON_{refused.why.name}",
                detail=refused.detail[:MAX_DETAIL_CHARS],
            )
        )
