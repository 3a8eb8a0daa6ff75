"""Visits to a drafter: it is told what rounds changed, and called; whom it fails or gives up is released.

Knows neither what is called nor what comes of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any

from draft_service.calling import Call, Caller
from draft_service.copying import Copier
from draft_service.drafters.base import Drafter, GivenUp
from draft_service.session import Session
from draft_service.sessions import Changes, SessionTable
from outrider.telemetry import get_logger
from outrider.v1 import verify_pb2

log = get_logger(__name__)


class Visits:
    """Visits a drafter on behalf of any number of tables. executor: see Caller; `copier` forgets sessions with it."""

    def __init__(self, drafter: Drafter, executor: Executor | None, copier: Copier | None) -> None:
        self._drafter = drafter
        self._caller = Caller(executor)
        self._copier = copier
        self._given_up: dict[int, GivenUp] = {}  # by uid, until the session's own stream is told

    @property
    def num_away(self) -> int:
        """Visits that are under way on the drafter's thread."""
        return self._caller.num_away

    async def visit(self, table: SessionTable, changes: Changes, call: Call, *, here: bool = False) -> Any:
        """Tells the drafter what changed, and makes a call; its result, or None where it failed or is for nobody.

        All in one visit to the drafter's thread, unless sessions are closed: each visit costs its waking up and ours.
        here: on this thread.
        """
        news = []
        if changes.opened:
            news.append(Call(changes.opened, self._drafter.open, changes.opened))
        if changes.features:
            sessions = [session for session, _ in changes.features]
            news.append(Call(sessions, self._drafter.add_features, changes.features))
        if changes.extended:
            sessions = [extension.session for extension in changes.extended]
            news.append(Call(sessions, self._drafter.extend, changes.extended))
        if changes.closed:
            if news:
                await self._guarded(table, changes, news)
            closed, changes.closed = changes.closed, []  # told once
            await self.forget(closed)
            news = []
        result = None
        if news or call.argument:
            *_, result = await self._guarded(table, changes, [*news, call], here=here)
        if self._given_up:
            self._release_given_up(table, changes)
        return result

    async def forget(self, sessions: Sequence[Session]) -> None:
        """Takes sessions away from the drafter."""
        for session in sessions:
            self._given_up.pop(session.uid, None)
        if not sessions:
            return
        if self._copier is not None:
            self._copier.forget(sessions)
        try:
            await self._caller.call(self._drafter.close, sessions)
        except Exception as error:
            log.error("the drafter failed to close sessions", sessions=len(sessions), exc_info=error)

    def _release_given_up(self, table: SessionTable, changes: Changes) -> None:
        """Tells verify of sessions that the drafter gave up; those of other streams wait for their own."""
        for uid, given in list(self._given_up.items()):
            if given.session in table:
                table.release(given.session, given.reason, given.detail, changes)
                del self._given_up[uid]
                if self._copier is not None:
                    self._copier.forget([given.session])

    async def _guarded(
        self, table: SessionTable, changes: Changes, calls: Sequence[Call], *, here: bool = False
    ) -> list[Any]:
        """The calls' results, in order; None, with the sessions released, for a call that fails, or is for nobody."""
        outcomes = await self._caller.attempt(calls, here=here)
        for given in self._drafter.take_given_up():
            self._given_up[given.session.uid] = given
        gone: Changes | None = None
        for index, outcome in enumerate(outcomes):
            if not isinstance(outcome, Exception):
                continue
            call, outcomes[index] = calls[index], None
            gone = gone or Changes(releases=changes.releases)
            log.error("the drafter failed", call=call.run.__name__, sessions=len(call.argument), exc_info=outcome)
            for session in call.sessions:
                if session in table:
                    detail = "the drafter failed; its log says why"
                    table.release(session, verify_pb2.RELEASE_REASON_ERROR, detail, gone)
        if gone is not None and gone.closed:
            await self.forget(gone.closed)
        return outcomes
