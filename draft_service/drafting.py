"""What a drafter does with rounds: takes them in, drafts for whoever is due, and says what to send. No sockets."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial

from draft_service.calling import Call
from draft_service.copying import Copier
from draft_service.counting import DraftCounts
from draft_service.drafters.base import NO_DRAFT, AheadRequest, Draft, Drafter, DraftRequest
from draft_service.fetching import Lost
from draft_service.framing import framed
from draft_service.planning import FixedPlanner, Plan, Planner
from draft_service.session import Copied, Extension, Session
from draft_service.sessions import Changes, InVerification, SessionTable
from draft_service.tracing import record_drafts
from draft_service.visits import Visits
from outrider.placement import Placement
from outrider.spared import Spared
from outrider.telemetry import get_logger
from outrider.tracing import Tracing
from outrider.v1 import verify_pb2
from outrider.wire import pack_scores_of

log = get_logger(__name__)

Send = Callable[[verify_pb2.SpeculateRequest], Awaitable[object]]

BRIEF_MS = 10.0  # in which the event loop may keep calls about the drafter waiting


@dataclass(slots=True, eq=False)
class _Turn:
    """What one call of `serve` has come to."""

    table: SessionTable
    send: Send
    plan: Plan
    is_early: bool  # trees are drafted ahead of steps
    fresh: list[Session]  # wait for a tree
    changes: Changes  # of which the drafter was not told
    extended: list[Extension]
    verifying: list[InVerification] = field(default_factory=list)
    copied_for: list[Session] = field(default_factory=list)

    async def say(self, frame: verify_pb2.SpeculateRequest) -> None:
        """Sends proposals."""
        for each in framed(self.table, (), frame):
            await self.send(each)

    async def say_told(self, frame: verify_pb2.SpeculateRequest | None = None) -> None:
        """Sends releases and proposals, once the drafter was told what changed."""
        for each in framed(self.table, self.changes.releases, frame):
            await self.send(each)
        self.changes = Changes()


class Drafting:
    """Feeds a drafter from any number of tables, as its planner says.

    Without a planner trees are as the flags have them, and nothing is drafted ahead of steps.
    What `copier` finds in a session's own text goes before the drafter's trees.
    A drafter whose calls may take long has `executor`, which must have a single thread. Trees that take no more than
    BRIEF_MS are drafted on the event loop all the same: a thread wakes up slowly.
    """

    def __init__(
        self, drafter: Drafter, planner: Planner | None = None, *, executor: Executor | None = None,
        copier: Copier | None = None, tracing: Tracing | None = None, placement: Placement | None = None,
    ) -> None:  # fmt: skip
        if executor is None and not drafter.inline:
            raise ValueError("a drafter that is not inline needs an executor")
        self.drafter = drafter
        self.counts = DraftCounts()
        self.planner = planner or FixedPlanner()
        self.copier = copier
        self.tracing = tracing
        self._placement = placement or Placement(None)
        self._visits = Visits(drafter, executor, copier)
        self._spared = Spared(log, "the planner failed, which is said once; trees stay as they were planned")
        self._last_ms = math.inf  # that trees took which were drafted last, early ones apart

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
            await self._visits.forget(changes.closed)

    async def _serve(self, table: SessionTable, changes: Changes, send: Send) -> None:
        turn = self._begin(table, changes, send)
        if self.copier is not None:
            await self._send_copies(turn, self.copier)
        await self._send_fresh(turn)
        if turn.is_early and turn.verifying:
            await self._send_early(turn)
        with self._spared:
            self.planner.plan(turn.extended)  # for the next round: this one's trees are waited for
        if turn.copied_for and self.copier is not None:
            await self._read_copies(turn, self.copier)

    def _begin(self, table: SessionTable, changes: Changes, send: Send) -> _Turn:
        due = table.take_due()
        with self._spared:
            self.planner.meet(len(due))
        plan = self.planner.current
        having = [session for session in due if table.has_tree(session)]
        fresh = [session for session in due if session not in having] if having else due
        is_early = plan.outcomes > 0 and table.max_assumed > 0
        turn = _Turn(table, send, plan, is_early, fresh, changes, changes.extended)
        if is_early and having:
            turn.verifying += [tree for session in having if (tree := table.in_verification(session))]
        return turn

    async def _send_copies(self, turn: _Turn, copier: Copier) -> None:
        """Sends copies, in place of trees of the draft model."""
        copies, turn.fresh = copier.drafts(turn.table, turn.fresh, turn.extended, is_asked=turn.plan.speculate)
        if copies:
            turn.copied_for += copies
            frame = verify_pb2.SpeculateRequest()
            turn.verifying += self._propose(frame, turn.table, turn.copied_for, list(copies.values()), 0)
            await turn.say(frame)

    async def _send_fresh(self, turn: _Turn) -> None:
        """Sends trees; whoever is not drafted for is declined, so that verify does not wait."""
        table, fresh = turn.table, turn.fresh
        left_out = [] if turn.plan.speculate else [session for session in fresh if not session.wishes.has_any]
        fresh = [session for session in fresh if session not in left_out] if left_out else fresh
        if not (fresh or left_out) and turn.is_early and turn.verifying:
            return  # the drafter is told what changed when it drafts ahead
        drafts, took_ms = await self._take_in(turn, fresh)
        frame = verify_pb2.SpeculateRequest()
        drafted = self._propose(frame, table, fresh, drafts, _us_each(took_ms, len(fresh)))
        if left_out:
            self._propose(frame, table, left_out, [NO_DRAFT] * len(left_out), 0)
        await turn.say_told(frame)
        if fresh:
            self._account(fresh, drafts, took_ms, turn.extended)
        turn.verifying = [*drafted, *(tree for tree in turn.verifying if tree.session in table)]

    async def _send_early(self, turn: _Turn) -> None:
        """Sends what is drafted, or copied, below the likely outcomes of what is being verified."""
        if self.copier is not None:
            ahead, turn.verifying = self.copier.drafts_ahead(turn.table, turn.verifying)
            frame = verify_pb2.SpeculateRequest()
            self._write(frame, turn.table, ahead, 0)
            await turn.say(frame)
            turn.copied_for += [session for session, _ in ahead]
        await turn.say_told(await self._draft_ahead(turn))

    async def _read_copies(self, turn: _Turn, copier: Copier) -> None:
        """Has the drafter read, now and then, what was committed of copies."""
        behind = [session for session in copier.take_behind(turn.copied_for) if session in turn.table]
        if behind:
            requests = [DraftRequest(session, 0) for session in behind]
            await self._visits.visit(turn.table, turn.changes, Call(behind, self.drafter.draft, requests))
            await turn.say_told()

    def _account(
        self, fresh: Sequence[Session], drafts: Sequence[Draft], took_ms: float, extended: Sequence[Extension]
    ) -> None:
        """Counts a call for trees; the planner learns from those that follow its plan, and read no more than usual."""
        self.counts.took("tree", took_ms)
        self._placement.step(len(fresh), drafts=True)
        made = list({id(draft.grown): draft.grown for draft in drafts if draft.grown is not None}.values())
        self.counts.steps += sum(grown.num_steps for grown in made)
        copied = {extension.session.uid for extension in extended if extension.copied}
        if not any(session.wishes.has_any or session.uid in copied for session in fresh):
            with self._spared:
                self.planner.drafted(made, len(fresh), took_ms)

    async def forget(self, sessions: Sequence[Session]) -> None:
        """Takes sessions away from the drafter."""
        await self._visits.forget(sessions)

    async def _take_in(self, turn: _Turn, fresh: Sequence[Session]) -> tuple[Sequence[Draft], float]:
        """Tells the drafter what changed, and has it draft for `fresh`; drafts, and the milliseconds that it took."""
        table, changes = turn.table, turn.changes
        requests = [DraftRequest(session, self._num_nodes(table, session)) for session in fresh]
        start_ns = time.perf_counter_ns()
        here = self._is_brief(changes, fresh)
        drafts = await self._visits.visit(table, changes, Call(fresh, self.drafter.draft, requests), here=here)
        took_ms = _ms_since(start_ns)
        if fresh:
            self._last_ms = took_ms
            if self.tracing is not None:
                drafted = zip(fresh, ([draft] for draft in drafts or []), strict=False)
                record_drafts(self.tracing, "draft", start_ns, drafted)
        return drafts or [], took_ms

    def _is_brief(self, changes: Changes, fresh: Sequence[Session]) -> bool:
        """Whether the event loop can do without for as long as trees for `fresh` will take."""
        if self._visits.num_away or changes.opened or changes.features or changes.closed:
            return False
        return self._last_ms <= BRIEF_MS and self.drafter.is_brief(fresh)

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

    async def _draft_ahead(self, turn: _Turn) -> verify_pb2.SpeculateRequest:
        """Tells the drafter what changed, and has it draft below the likely outcomes of what is being verified."""
        table, verifying = turn.table, turn.verifying
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
            await self._visits.visit(table, turn.changes, Call(sessions, self.drafter.draft_ahead, requests)) or []
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
            proposal, keeps_memo = frame.proposals.proposals.add(), early or isinstance(draft.memo, Copied)
            table.propose(proposal, session, draft, packed, draft_us, keeps_memo=keeps_memo)

    def _num_nodes(self, table: SessionTable, session: Session) -> int:
        return min(table.node_limit(session), self.drafter.num_nodes(session.wishes))


def _ms_since(start_ns: int) -> float:
    return (time.perf_counter_ns() - start_ns) / 1e6


def _us_each(ms: float, count: int) -> int:
    return int(1000 * ms / max(1, count))
