"""Whom a model drafts for: sessions with their rows, and those that had to be given up.

Knows neither what the rows hold nor when they are run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from draft_service.drafters.base import GivenUp
from draft_service.drafters.kv import CacheRows, NoRoom
from draft_service.drafters.models import DraftModel, Tip
from draft_service.session import Session
from outrider.telemetry import get_logger
from outrider.v1 import verify_pb2

log = get_logger(__name__)


@dataclass(eq=False, slots=True)
class State:
    """A session as the model knows it. `tip`: of its newest row, when that is up to the newest committed token."""

    session: Session
    rows: CacheRows
    tip: Tip | None = field(default=None, kw_only=True)


StateT = TypeVar("StateT", bound=State)


class Roster(Generic[StateT]):
    """Keeps the states of sessions."""

    def __init__(self, model: DraftModel) -> None:
        self._model = model
        self._states: dict[int, StateT] = {}  # by uid
        self._given_up: list[GivenUp] = []
        self._refused: dict[int, GivenUp] = {}  # texts that are no session's, by uid: told to who proposed them

    def __contains__(self, session: Session) -> bool:
        return session.uid in self._states

    def __iter__(self) -> Iterator[StateT]:
        return iter(self._states.values())

    def get(self, session: Session) -> StateT | None:
        """The state of a session; None where it is not served, or not any more."""
        return self._states.get(session.uid)

    def admit(self, session: Session, new_state: Callable[[Session, CacheRows], StateT]) -> StateT | None:
        """Takes a session on, anew where it is there already; None where it had to be given up at once.

        new_state: makes the state of one none of whose rows were run.
        """
        self.forget(session)
        try:
            state = new_state(session, self._model.cache.open())
        except NoRoom as error:
            self.give_up(session, verify_pb2.RELEASE_REASON_CAPACITY, str(error))
            return None
        self._states[session.uid] = state
        self._model.limit_vocabulary(session.vocab_size)
        return state if self.can_read(state, 0) else None

    def can_read(self, state: StateT, first: int) -> bool:
        """Whether the model's embedding has the tokens from this one on; if not, the session is given up."""
        if state.session.vocab_size <= self._model.num_read:
            return True  # they were checked against the target's vocabulary
        highest = int(state.session.tokens[first:].max(initial=0))
        if highest < self._model.num_read:
            return True
        self.give_up(
            state.session, verify_pb2.RELEASE_REASON_ERROR,
            f"token {highest} is outside the draft model's vocabulary of {self._model.num_read}",
        )  # fmt: skip
        return False

    def give_up(self, session: Session, reason: verify_pb2.ReleaseReason, detail: str) -> None:
        """Forgets a session that cannot be served, and notes why."""
        log.warning("session given up", session=session.session_id, reason=detail)
        self.forget(session)
        given = GivenUp(session, reason, detail)
        if session.is_text:
            self._refused[session.uid] = given
        else:
            self._given_up.append(given)

    def forget(self, session: Session) -> None:
        """Gives its rows back, if there are any."""
        state = self._states.pop(session.uid, None)
        if state is not None:
            self._model.cache.close(state.rows)

    def clear(self) -> None:
        """Drops all, at the end of everything."""
        self._states.clear()

    def take_given_up(self) -> list[GivenUp]:
        """Sessions given up since the last call."""
        taken, self._given_up = self._given_up, []
        return taken

    def take_refused(self, text: Session) -> GivenUp | None:
        """Why a text was given up, if it was; `take_given_up` does not tell of those."""
        return self._refused.pop(text.uid, None)
