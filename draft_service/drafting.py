"""What a drafter does with rounds: takes them in, drafts for whoever is due, and says what to send. No sockets."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any

from draft_service.calling import Call, Caller
from draft_service.copying import Copier
from draft_service.counting import DraftCounts
from draft_service.drafters.base import NO_DRAFT, AheadRequest, Draft, Drafter, DraftRequest, GivenUp
from draft_service.fetching import Lost
from draft_service.framing import framed
from draft_service.planning import FixedPlanner, Planner
from draft_service.session import Copied, Extension, Session
from draft_service.sessions import Changes, InVerification, SessionTable
from draft_service.tracing import record_drafts
from outrider.placement import Placement
from outrider.telemetry import get_logger
from outrider.tracing import Tracing
from outrider.v1 import verify_pb2
from outrider.wire import pack_scores_of

log = get_logger(__name__)

Send = Callable[[verify_pb2.SpeculateRequest], Awaitable[object]]

BRIEF_MS = 10.0  # in which the event loop may keep calls about the drafter waiting


class Drafting:
    """Feeds a drafter from any number of tables, as its planner says.

    Without a planner trees are as the flags have them, and nothing is drafted ahead of steps.
    What `copier` finds in a session's own text goes before the drafter's trees.
    A drafter whose calls may take long has `executor`, which must have a single thread. Trees that take no more than
    BRIEF_MS are drafted on the event loop all the same: a thread wakes up slowly.
    """

    def __init__(
        self, drafter: Drafter, planner: Planner | None = None, *, executor: Executor | None = None,
        copier: Copier | None = None,
    ) -> None:  # fmt: skip
        if executor is None and not drafter.inline:
            raise ValueError("a drafter that is not inline needs an executor")
        self.drafter = drafter
        self.counts = DraftCounts()
        self.tracing: Tracing | None = None  # set by who wants traces
        self.planner = planner or FixedPlanner()
        self.placement = Placement(None)
        self._caller = Caller(executor)
        self.copier = copier
        self._last_ms = math.inf  # that trees took which were drafted last, early ones apart
        self._given_up: dict[int, GivenUp] = {}  # by uid, until the session's own stream is told

    async def serve(
        self, table: SessionTable, rounds: Sequence[verify_pb2.Round], send: Send, lost: Sequence[Lost] = ()
    ) -> None:
        """Applies rounds, oldest first, and sends what there is to say: releases, trees, and then trees drafted early.

        Where sending fails, sessions that the rounds closed are forgotten all the same.
        lost: sessions whose feature rows cannot be had; they are given up.
        """
        changes = table.apply(rounds)
        for gone in lost:
            session = table.get(gone.session, gone.generation)
            if session is not None:
                table.release(session, verify_pb2.RELEASE_REASON_FEATURES, gone.detail, changes)
        try:
            await self._serve(table, changes, send)
            table.rows_were_taken()
        finally:  # the stream may break before the drafter was told, and the table does not know them any more
            await self.forget(changes.closed)

    async def _serve(self, table: SessionTable, changes: Changes, send: Send) -> None:
        extended, due = changes.extended, table.take_due()
        plan = self.planner.meet(len(due))
        having = [session for session in due if table.has_tree(session)]
        fresh = [session for session in due if session not in having] if having else due
        early = plan.outcomes > 0 and table.max_assumed > 0
        known = [tree for session in having if early and (tree := table.in_verification(session))]
        copied_for: list[Session] = []
        if self.copier is not None:
            copies, fresh = self.copier.drafts(table, fresh, extended, is_asked=plan.speculate)
            if copies:
                copied_for += copies
                frame = verify_pb2.SpeculateRequest()
                known += self._propose(frame, table, copied_for, list(copies.values()), 0)
                await _say(send, table, [], frame)
        # Whoever is not drafted for is declined, so that verify does not wait.
        left_out = [] if plan.speculate else [session for session in fresh if not session.wishes.has_any]
        fresh = [session for session in fresh if session not in left_out] if left_out else fresh
        if fresh or left_out or not (early and known):
            drafts, took_ms = await self._take_in(table, changes, fresh)
            frame = verify_pb2.SpeculateRequest()
            drafted = self._propose(frame, table, fresh, drafts, _us_each(took_ms, len(fresh)))
            if left_out:
                self._propose(frame, table, left_out, [NO_DRAFT] * len(left_out), 0)
            await _say(send, table, changes.releases, frame)
            if fresh:
                self._account(fresh, drafts, took_ms, extended)
            changes = Changes()
            known = [*drafted, *(tree for tree in known if tree.session in table)]
        if early and known:
            if self.copier is not None:
                ahead, known = self.copier.drafts_ahead(table, known)
                frame = verify_pb2.SpeculateRequest()
                self._write(frame, table, ahead, 0)
                await _say(send, table, [], frame)
                copied_for += [session for session, _ in ahead]
            frame = await self._draft_ahead(table, changes, known)
            await _say(send, table, changes.releases, frame)
            changes = Changes()
        self.planner.plan(extended)  # for the next round: this one's trees are waited for
        if copied_for:
            await self._read_copies(table, changes, copied_for)
            await _say(send, table, changes.releases)

    async def _read_copies(self, table: SessionTable, changes: Changes, sessions: Iterable[Session]) -> None:
        """Has the drafter read, now and then, what was committed of copies."""
        assert self.copier is not None
        behind = [session for session in self.copier.take_behind(sessions) if session in table]
        if behind:
            requests = [DraftRequest(session, 0) for session in behind]
            await self._visit(table, changes, Call(behind, self.drafter.draft, requests))

    def _account(
        self, fresh: Sequence[Session], drafts: Sequence[Draft], took_ms: float, extended: Sequence[Extension]
    ) -> None:
        """Counts a call for trees; the planner learns from those that follow its plan, and read no more than usual."""
        self.counts.took("tree", took_ms)
        self.placement.step(len(fresh), drafts=True)
        made = list({id(draft.grown): draft.grown for draft in drafts if draft.grown is not None}.values())
        self.counts.steps += sum(grown.num_steps for grown in made)
        copied = {extension.session.uid for extension in extended if extension.copied}
        if not any(session.wishes.has_any or session.uid in copied for session in fresh):
            self.planner.drafted(made, len(fresh), took_ms)

    async def forget(self, sessions: Sequence[Session]) -> None:
        """Takes sessions away from the drafter."""
        for session in sessions:
            self._given_up.pop(session.uid, None)
        if not sessions:
            return
        if self.copier is not None:
            self.copier.forget(sessions)
        try:
            await self._caller.call(self.drafter.close, sessions)
        except Exception as error:
            log.error("the drafter failed to close sessions", sessions=len(sessions), exc_info=error)

    async def _take_in(
        self, table: SessionTable, changes: Changes, fresh: Sequence[Session]
    ) -> tuple[Sequence[Draft], float]:
        """Tells the drafter what changed, and has it draft for `fresh`; drafts, and the milliseconds that it took."""
        requests = [DraftRequest(session, self._num_nodes(table, session)) for session in fresh]
        start_ns = time.perf_counter_ns()
        here = self._is_brief(changes, fresh)
        drafts = await self._visit(table, changes, Call(fresh, self.drafter.draft, requests), here=here)
        took_ms = _ms_since(start_ns)
        if fresh:
            self._last_ms = took_ms
            if self.tracing is not None:
                drafted = zip(fresh, ([draft] for draft in drafts or []), strict=False)
                record_drafts(self.tracing, "draft", start_ns, drafted)
        return drafts or [], took_ms

    def _is_brief(self, changes: Changes, fresh: Sequence[Session]) -> bool:
        """Whether the event loop can do without for as long as trees for `fresh` will take."""
        if self._caller.num_away or changes.opened or changes.features or changes.closed:
            return False
        return self._last_ms <= BRIEF_MS and self.drafter.is_brief(fresh)

    async def _visit(self, table: SessionTable, changes: Changes, call: Call, *, here: bool = False) -> Any:
        """Tells the drafter what changed, and makes a call; its result, or None where it failed or is for nobody.

        All in one visit to the drafter's thread, unless sessions are closed: each visit costs its waking up and ours.
        here: on this thread.
        """
        news = []
        if changes.opened:
            news.append(Call(changes.opened, self.drafter.open, changes.opened))
        if changes.features:
            sessions = [session for session, _ in changes.features]
            news.append(Call(sessions, self.drafter.add_features, changes.features))
        if changes.extended:
            sessions = [extension.session for extension in changes.extended]
            news.append(Call(sessions, self.drafter.extend, changes.extended))
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

    def _propose(
        self, frame: verify_pb2.SpeculateRequest, table: SessionTable, sessions: Sequence[Session],
        drafts: Sequence[Draft], draft_us: int,
    ) -> list[InVerification]:  # fmt: skip
        """Adds proposals at the committed states; of those the trees that a waiting verify service takes at once."""
        said: list[tuple[Session, Draft]] = []
        taken: list[InVerification] = []
        early = self.planner.current.outcomes > 0
        for session, draft in zip(sessions, drafts, strict=False):
            if session not in table:
                continue  # given up
            if len(draft) == 0:
                if len(session.tokens) in (session.prompt_len, session.declined_len):
                    continue  # nothing is verified below a prompt, and once is enough
                session.declined_len = len(session.tokens)
            said.append((session, draft))
            if early and len(draft) and session.following.kind == verify_pb2.NEXT_KIND_WAITING:
                taken.append(InVerification.whole(session, draft.tree, draft.probabilities, draft.memo))
        self._write(frame, table, said, draft_us)
        return taken

    async def _draft_ahead(
        self, table: SessionTable, changes: Changes, verifying: Sequence[InVerification]
    ) -> verify_pb2.SpeculateRequest:
        """Tells the drafter what changed, and has it draft below the likely outcomes of what is being verified."""
        requests = [
            AheadRequest(
                item, self._num_nodes(table, item.session), table.max_assumed, self.planner.current.outcomes,
                left=partial(table.news.leaves, item.session),
            )
            for item in verifying
        ]  # fmt: skip
        sessions = [item.session for item in verifying]
        start_ns = time.perf_counter_ns()
        outcomes: list[list[Draft]] = (
            await self._visit(table, changes, Call(sessions, self.drafter.draft_ahead, requests)) or []
        )
        took_ms = _ms_since(start_ns)
        if verifying:
            self.counts.took("early", took_ms)
        if self.tracing is not None:
            record_drafts(self.tracing, "draft early", start_ns, zip(sessions, outcomes, strict=False))
        draft_us = _us_each(took_ms, sum(map(len, outcomes)))
        found = [
            (session, draft)
            for session, drafts in zip(sessions, outcomes, strict=False)
            if session in table
            for draft in drafts
        ]
        frame = verify_pb2.SpeculateRequest()
        self._write(frame, table, found, draft_us)
        return frame

    def _write(
        self, frame: verify_pb2.SpeculateRequest, table: SessionTable, drafts: Sequence[tuple[Session, Draft]],
        draft_us: int,
    ) -> None:  # fmt: skip
        """Adds proposals, noted as sent."""
        # A model's is for drafting ahead, and large: kept for nothing, it would drive all else out of the caches.
        early = self.planner.current.outcomes > 0
        scores = pack_scores_of([draft.probabilities for _, draft in drafts])
        for (session, draft), packed in zip(drafts, scores, strict=True):
            table.propose(
                frame.proposals.proposals.add(), session, draft.tokens, draft.parents, packed, draft.assumed,
                draft.from_prediction, draft_us, draft.memo if early or isinstance(draft.memo, Copied) else None,
                draft.grown,
            )  # fmt: skip

    def _num_nodes(self, table: SessionTable, session: Session) -> int:
        return min(table.node_limit(session), self.drafter.num_nodes(session.wishes))

    def _release_given_up(self, table: SessionTable, changes: Changes) -> None:
        """Tells verify of sessions that the drafter gave up; those of other streams wait for their own."""
        for uid, given in list(self._given_up.items()):
            if given.session in table:
                table.release(given.session, given.reason, given.detail, changes)
                del self._given_up[uid]
                if self.copier is not None:
                    self.copier.forget([given.session])

    async def _guarded(
        self, table: SessionTable, changes: Changes, calls: Sequence[Call], *, here: bool = False
    ) -> list[Any]:
        """The calls' results, in order; None, with the sessions released, for a call that fails, or is for nobody."""
        outcomes = await self._caller.attempt(calls, here=here)
        for given in self.drafter.take_given_up():
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


async def _say(
    send: Send, table: SessionTable, releases: Sequence[verify_pb2.Release],
    said: verify_pb2.SpeculateRequest | None = None,
) -> None:  # fmt: skip
    for frame in framed(table, releases, said):
        await send(frame)


def _ms_since(start_ns: int) -> float:
    return (time.perf_counter_ns() - start_ns) / 1e6


def _us_each(ms: float, count: int) -> int:
    return int(1000 * ms / max(1, count))
