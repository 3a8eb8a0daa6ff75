"""One session in one drafter's hands: what it was told, what it has answered, what is prepared for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider.row_ring import Rows
from outrider.v1 import verify_pb2
from verify_service.brake import SessionBrake
from verify_service.hindsight import Hindsight
from verify_service.proposals import Match, ProposalBook
from verify_service.session import Session

if TYPE_CHECKING:
    from verify_service.drafter import Drafter

# Lengths of a session whose answers are timed at once.
MAX_UNANSWERED = 8


@dataclass(slots=True)
class Untold:
    """Steps of a silenced session that its drafter has not been told of; their tokens are the session's newest."""

    base_len: int
    steps: int = 0
    verify_us: int = 0
    batch_tokens: int = 0

    def add(self, step_us: int, batch_tokens: int) -> None:
        """Adds a step."""
        self.steps += 1
        self.verify_us += step_us
        self.batch_tokens += batch_tokens


@dataclass(slots=True)
class RowsWanted:
    """Feature rows of a message: their slots in the plane, and what the host has of a device's, once it has it."""

    first_pos: int
    slots: list[int]
    fetched: Rows | None = None


@dataclass(slots=True, eq=False)
class Assignment:
    """One session in one drafter's hands, for one generation."""

    session: Session
    drafter: Drafter
    generation: int
    book: ProposalBook
    brake: SessionBrake
    hindsight: Hindsight = field(default_factory=Hindsight)
    features_sent: int = 0  # positions whose rows were sent, announced, or noted for the verdict
    match: Match | None = None  # verified in the step under way
    verdict: verify_pb2.Verdict | None = None  # committed, not yet told
    rows: RowsWanted | None = None  # of the target's states, which that verdict is to carry
    untold: Untold | None = None  # committed before that, while it is silenced: no verdict is made of each step
    is_silenced: bool = False  # so it was told last
    asked_ns: dict[int, int] = field(default_factory=dict)  # when it was told of lengths that it has not answered yet
    waited_len: int = -1  # committed length for which a wait has run out
    forgiven_len: int = 0  # the largest length for which a proposal was kept that took refusals off
    has_answered: bool = False  # with a tree; before that it reads the prompt, for as long as that takes
    unheard_steps: int = 0  # in which it did

    @property
    def told_len(self) -> int:
        """Committed length that the drafter knows of, or will by the verdict that is being completed."""
        return self.session.committed_len if self.untold is None else self.untold.base_len

    @property
    def is_unheard(self) -> bool:
        """Whether a tree is still hoped for, which would be its first."""
        hopes = not (self.has_answered or self.is_silenced or self.brake.fixed)
        return hopes and self.session.table_row >= 0

    def note_untold(self, base_len: int, step_us: int, batch_tokens: int) -> None:
        """Notes a step that a silenced drafter is not told of."""
        self.untold = self.untold or Untold(base_len)
        self.untold.add(step_us, batch_tokens)

    def take_untold(self) -> verify_pb2.Verdict:
        """The verdict of all steps that the drafter was not told of."""
        untold, self.untold = self.untold, None
        assert untold is not None
        tokens = self.session.tokens[untold.base_len : self.session.committed_len].tolist()
        return self.verdict_of(untold.base_len, tokens, untold.verify_us, untold.batch_tokens, untold.steps)

    def verdict_of(
        self, base_len: int, tokens: list[int], verify_us: int, batch_tokens: int, steps: int = 1
    ) -> verify_pb2.Verdict:
        """The verdict of one step, or of several. Field by field: by keywords it takes twice as long."""
        verdict = verify_pb2.Verdict()
        verdict.session, verdict.generation = self.session.session_id, self.generation
        verdict.base_len = base_len
        verdict.tokens.extend(tokens)
        verdict.verify_us, verdict.batch_tokens, verdict.steps = verify_us, batch_tokens, steps
        return verdict

    def tell_last(self, verdict: verify_pb2.Verdict) -> None:
        """Has the drafter told of a verdict that no step follows."""
        verdict.next.kind, verdict.next.base_len = verify_pb2.NEXT_KIND_NONE, self.session.committed_len
        self.drafter.outbox.verdict(verdict)

    def asked(self, committed_len: int, now_ns: int) -> None:
        """Notes that the drafter is told of a length."""
        self.asked_ns[committed_len] = now_ns
        if len(self.asked_ns) > MAX_UNANSWERED:
            del self.asked_ns[next(iter(self.asked_ns))]

    def due_ms(self, reply_ms: float, now_ns: int) -> float:
        """Milliseconds until the newest length is answered, if that takes reply_ms; below 0 when it is late."""
        return reply_ms - (now_ns - self.asked_ns.get(self.session.committed_len, now_ns)) / 1e6

    def answered(self, tree_len: int, now_ns: int, *, drafted: bool) -> None:
        """Takes in how long the answer to a length took, also where a step no longer waited for it.

        drafted: it has nodes; who reads a prompt has none to give yet.
        """
        asked_ns, is_first = self.asked_ns.get(tree_len), not self.has_answered
        self.has_answered = self.has_answered or drafted
        if asked_ns is None:
            return
        self.drafter.answers.append((now_ns - asked_ns, is_first))
        if len(self.asked_ns) == 1:
            self.asked_ns.clear()
        else:
            self.asked_ns = {length: ns for length, ns in self.asked_ns.items() if length > tree_len}
