"""What a drafter does with rounds: takes them in, drafts for whoever is due, and says what to send. No sockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from typing import TypeVar

from draft_service.drafters.base import AheadRequest, Draft, Drafter, DraftRequest, GivenUp
from draft_service.fetching import Lost
from draft_service.session import Session
from draft_service.sessions import Changes, InVerification, SessionTable
from outrider.telemetry import get_logger
from outrider.v1 import verify_pb2

log = get_logger(__name__)

MAX_OUTCOMES = 2  # drafted below ahead of each step: the likeliest one, and the next in case

A = TypeVar("A")
T = TypeVar("T")


class Drafting:
    """Feeds a drafter from any number of tables. `early`: draft for a step's likely outcomes while it runs.

    A drafter whose calls take long runs in `executor`, which must have a single thread.
    """

    def __init__(self, drafter: Drafter, *, early: bool, executor: Executor | None = None) -> None:
        if executor is None and not drafter.inline:
            raise ValueError("a drafter that is not inline needs an executor")
        self.drafter = drafter
        self._early = early
        self._executor = executor
        self._given_up: dict[int, GivenUp] = {}  # by uid, until the session's own stream is told

    async def frames(
        self, table: SessionTable, rounds: Sequence[verify_pb2.Round], lost: Sequence[Lost] = ()
    ) -> AsyncIterator[verify_pb2.SpeculateRequest]:
        """Applies rounds, oldest first, and gives the frames to send: releases, trees, and then trees drafted early.

        lost: sessions whose feature rows cannot be had; they are given up.
        """
        changes = table.apply(rounds)
        for gone in lost:
            session = table.get(gone.session, gone.generation)
            if session is not None:
                table.release(session, verify_pb2.RELEASE_REASON_FEATURES, gone.detail, changes)
        await self._take_in(table, changes)
        due = table.take_due()
        proposals, drafted = await self._draft(table, changes, [s for s in due if not _has_tree(s)])
        for frame in (released(changes), proposed(proposals)):
            if frame is not None:
                yield frame
        if not self._early or table.max_assumed < 1:
            return
        changes = Changes()
        verifying = drafted + [tree for s in due if _has_tree(s) and (tree := table.in_verification(s)) is not None]
        proposals = await self._draft_ahead(table, changes, verifying)
        for frame in (released(changes), proposed(proposals)):
            if frame is not None:
                yield frame

    async def forget(self, sessions: Sequence[Session]) -> None:
        """Takes sessions away from the drafter."""
        for session in sessions:
            self._given_up.pop(session.uid, None)
        if not sessions:
            return
        try:
            await self._call(self.drafter.close, sessions)
        except Exception as error:
            log.error("the drafter failed to close sessions", sessions=len(sessions), exc_info=error)

    async def _take_in(self, table: SessionTable, changes: Changes) -> None:
        await self._guarded(table, changes, changes.opened, self.drafter.open, changes.opened)
        with_rows = [session for session, _ in changes.features]
        await self._guarded(table, changes, with_rows, self.drafter.add_features, changes.features)
        extended = [extension.session for extension in changes.extended]
        await self._guarded(table, changes, extended, self.drafter.extend, changes.extended)
        await self.forget(changes.closed)
        self._release_given_up(table, changes)

    async def _draft(
        self, table: SessionTable, changes: Changes, sessions: Sequence[Session]
    ) -> tuple[list[verify_pb2.Proposal], list[InVerification]]:
        """Proposals at the committed states, and of those the trees that a waiting verify service takes at once."""
        requests = [DraftRequest(session, self._num_nodes(table, session)) for session in sessions]
        start_ns = time.perf_counter_ns()
        drafts = await self._guarded(table, changes, sessions, self.drafter.draft, requests) or []
        self._release_given_up(table, changes)
        draft_us = _us_each(start_ns, len(drafts))
        proposals: list[verify_pb2.Proposal] = []
        taken: list[InVerification] = []
        for session, draft in zip(sessions, drafts, strict=False):
            if table.get(*session.key) is not session:
                continue  # given up
            if len(draft) == 0:
                if len(session.tokens) in (session.prompt_len, session.declined_len):
                    continue  # nothing is verified below a prompt, and once is enough
                session.declined_len = len(session.tokens)
            proposals.append(_propose(table, session, draft, draft_us))
            if self._early and len(draft) and session.following.kind == verify_pb2.NEXT_KIND_WAITING:
                taken.append(InVerification(session, draft.tree, draft.probabilities))
        return proposals, taken

    async def _draft_ahead(
        self, table: SessionTable, changes: Changes, verifying: Sequence[InVerification]
    ) -> list[verify_pb2.Proposal]:
        requests = [
            AheadRequest(item, self._num_nodes(table, item.session), table.max_assumed, MAX_OUTCOMES)
            for item in verifying
        ]
        sessions = [item.session for item in verifying]
        start_ns = time.perf_counter_ns()
        outcomes = await self._guarded(table, changes, sessions, self.drafter.draft_ahead, requests) or []
        self._release_given_up(table, changes)
        draft_us = _us_each(start_ns, sum(map(len, outcomes)))
        return [
            _propose(table, session, draft, draft_us)
            for session, drafts in zip(sessions, outcomes, strict=False)
            if table.get(*session.key) is session
            for draft in drafts
        ]

    def _num_nodes(self, table: SessionTable, session: Session) -> int:
        return min(table.node_limit(session), self.drafter.num_nodes(session.wishes))

    def _release_given_up(self, table: SessionTable, changes: Changes) -> None:
        """Tells verify of sessions that the drafter gave up; those of other streams wait for their own."""
        for uid, given in list(self._given_up.items()):
            if table.get(*given.session.key) is given.session:
                table.release(given.session, given.reason, given.detail, changes)
                del self._given_up[uid]

    async def _guarded(
        self, table: SessionTable, changes: Changes, sessions: Sequence[Session], call: Callable[[A], T], argument: A
    ) -> T | None:
        """The call's result; or None, with the sessions released, when the drafter fails."""
        if not sessions:
            return None
        try:
            result = await self._call(call, argument)
            self._given_up |= {given.session.uid: given for given in self.drafter.take_given_up()}
            return result
        except Exception as error:
            log.error("the drafter failed", call=call.__name__, sessions=len(sessions), exc_info=error)
        gone = Changes(releases=changes.releases)
        for session in sessions:
            if table.get(*session.key) is session:
                table.release(session, verify_pb2.RELEASE_REASON_ERROR, "the drafter failed; its log says why", gone)
        await self.forget(gone.closed)
        return None

    async def _call(self, call: Callable[[A], T], argument: A) -> T:
        if self._executor is None:
            return call(argument)
        return await asyncio.get_running_loop().run_in_executor(self._executor, call, argument)


def released(changes: Changes) -> verify_pb2.SpeculateRequest | None:
    """The frame that gives sessions up, if there are any."""
    if not changes.releases:
        return None
    return verify_pb2.SpeculateRequest(releases=verify_pb2.Releases(releases=changes.releases))


def proposed(proposals: Sequence[verify_pb2.Proposal]) -> verify_pb2.SpeculateRequest | None:
    """The frame that carries proposals, if there are any."""
    if not proposals:
        return None
    return verify_pb2.SpeculateRequest(proposals=verify_pb2.Proposals(proposals=proposals))


def _has_tree(session: Session) -> bool:
    """Whether the step now starting verifies a tree for it already, so that one more at this length comes too late."""
    following = session.following
    return following.kind == verify_pb2.NEXT_KIND_PROPOSAL and following.base_len == len(session.tokens)


def _propose(table: SessionTable, session: Session, draft: Draft, draft_us: int) -> verify_pb2.Proposal:
    return table.propose(
        session, draft.tokens, draft.parents, draft.probabilities, draft.assumed, draft.from_prediction, draft_us
    )


def _us_each(start_ns: int, count: int) -> int:
    return (time.perf_counter_ns() - start_ns) // 1000 // max(1, count)
