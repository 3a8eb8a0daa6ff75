"""Which sessions get a drafter before a step, lose theirs, or go over to another. Knows no device and no client."""

from __future__ import annotations

from outrider.cost_table import CostTable
from outrider.v1 import verify_pb2
from verify_service.drafters import Drafters
from verify_service.planner import Planner
from verify_service.scheduler import Scheduler
from verify_service.session import Session
from verify_service.telling import Teller
from verify_service.weighing import Weigher

_MOVE_EVERY = 8  # steps, after which a session that another drafter might gain is looked for
_DRAFT_ROW = 0.05  # of a plain step: what a row of a prompt takes a draft model on the same cores, about


class Assigner:
    """Decides before each step which sessions drafters have. Owned by the engine."""

    def __init__(
        self, scheduler: Scheduler, drafters: Drafters, planner: Planner, weigher: Weigher, teller: Teller,
        costs: CostTable,
    ) -> None:  # fmt: skip
        self._scheduler = scheduler
        self._drafters = drafters
        self._planner = planner
        self._weigher = weigher
        self._teller = teller
        self._costs = costs
        self._steps_to_look = 0  # for a session that another drafter might gain

    def assign(self) -> None:
        """Opens running sessions that have no drafter to one that fits, or takes them back where drafts do not pay."""
        if not len(self._drafters):
            return
        count = len(self._scheduler.running)
        paused = self._weigher.begin(count)
        without: list[Session] = []
        for session in self._scheduler.running:
            has_drafter = self._drafters.of(session) is not None
            if (has_drafter and not paused) or not session.speculation.enabled:
                continue
            if not has_drafter:
                without.append(session)
            elif not self._planner.is_fixed(session):
                self._drafters.close(session, verify_pb2.CLOSE_REASON_REASSIGNED)
        if without:
            self._open(without, self._weigher.room(count))
        if len(self._drafters) > 1 and not paused:
            self._move_misplaced(count)

    def _open(self, sessions: list[Session], room: int) -> None:
        """Gives sessions drafters: those whose users fixed their trees, and `room` others.

        Where that is not all of them, those with the shortest texts: reading one is most of what a trial costs.
        """
        if 0 < room < len(sessions):
            sessions = sorted(sessions, key=lambda session: session.committed_len)
        opened = False
        for session in sessions:
            fixed = self._planner.is_fixed(session)
            if fixed or room:
                row_ms = None if fixed else _DRAFT_ROW * self._costs.ms(1)
                assignment = self._drafters.assign(session, row_ms=row_ms)
                self._teller.opened(assignment)
                if assignment is not None and not fixed:
                    room, opened = room - 1, True
        if opened:
            self._weigher.opened()

    def _move_misplaced(self, count: int) -> None:
        """Now and then has a session go over from a drafter that gains nothing, where another may be given one more."""
        self._steps_to_look -= 1
        if self._steps_to_look > 0:
            return
        self._steps_to_look = _MOVE_EVERY
        session = self._drafters.misplaced()
        if session is not None and (self._planner.is_fixed(session) or self._weigher.room(count)):
            self._teller.opened(self._drafters.move(session))
