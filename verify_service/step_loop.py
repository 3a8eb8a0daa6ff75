"""The engine's one loop: take commands, admit, match proposals, forward, accept, commit, tell.

Runs on a thread of its own, owns the device and every session's state, and never awaits. It hears through an Inbox and
speaks through two callbacks: responses to clients, and the drafters' outboxes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import Segment
from outrider.cost_table import CostTable
from outrider.errors import ENGINE_FAILED, Internal, OutriderError, Unavailable
from outrider.telemetry import get_logger
from outrider.v1 import verify_pb2
from verify_service.commands import (
    Administer,
    Cancel,
    Command,
    DrafterJoined,
    DrafterLeft,
    FlushCache,
    Inbox,
    ProposalsArrived,
    ReadFeatures,
    Released,
    Stop,
    Submit,
)  # fmt: skip
from verify_service.committing import Committer
from verify_service.counting import COMMIT, FORWARD, IDLE, PLAN, TELL, WAIT, Counters, DecodeLog
from verify_service.drafters import Assignment, Drafters
from verify_service.features import read_rows
from verify_service.halves import Halves, Part
from verify_service.intake import take_proposals, take_releases
from verify_service.mishaps import MAX_FAILED_STEPS, ends_the_engine, undo_prompt_rows
from verify_service.planner import Planner, Work, ms_since
from verify_service.sampler import Sampler
from verify_service.scheduler import Scheduler
from verify_service.session import Session, Stats
from verify_service.telling import Teller
from verify_service.weighing import Weigher

log = get_logger(__name__)

_DRAFT_ROW = 0.05  # of a plain step: what a row of a prompt takes a draft model on the same cores, about

Responses = list[tuple[Session, verify_pb2.GenerateResponse | Exception]]


class Runner(Protocol):
    """The forward pass (engine.runner.ModelRunner, or a fake of it)."""

    slot_table: NDArray[np.int32]

    @property
    def features(self) -> torch.Tensor | None:
        """The feature plane [num_slots, width]."""
        ...

    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        """Logits float32 [sum of num_logits, vocab]; KV and features go to the segments' slots."""
        ...


class StepLoop:
    """See the module's text. `deliver` is called from the engine thread with each step's responses."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        drafters: Drafters,
        *,
        costs: CostTable,
        inbox: Inbox,
        deliver: Callable[[Responses], object],
        max_verify_nodes: int,
        max_draft_wait_ms: float,
        brake: bool = True,
        decode_log_interval: int = 0,
    ) -> None:
        self.scheduler = scheduler
        self.drafters = drafters
        self.inbox = inbox
        self.stats = Stats()
        self.counters = Counters()
        self._runner = runner
        self._deliver = deliver
        self._planner = Planner(
            scheduler, drafters, costs, max_nodes=max_verify_nodes, max_wait_ms=max_draft_wait_ms, brake=brake
        )
        self._costs = costs
        self._sampler = Sampler()
        self._weigher = Weigher(drafters, costs, self.counters)
        self._teller = Teller(drafters, runner)
        self._responses: Responses = []
        self._committer = Committer(
            scheduler, drafters, runner, self.stats, self._responses, by_algorithm=self.counters.by_algorithm
        )
        self._decode_log = DecodeLog(decode_log_interval, self.counters, self.stats, log.info)
        self._stopped_by: Stop | None = None
        self._halves = Halves()
        self._left_out: set[int] = set()  # ids of sessions, of the step under way
        self._failed_steps = 0  # in a row, of those that failed for every session

    def run(self) -> None:
        """Steps until a Stop command; an error of the loop itself ends every session with it, and is raised."""
        try:
            while self._stopped_by is None:
                self.step()
            self._end_all(self._stopped_by.error)
        except Exception as error:
            log.error("the engine failed", exc_info=error)
            self._end_all(Unavailable("the engine failed; the server's log has it", code=ENGINE_FAILED))
            raise

    def step(self) -> None:
        """One step; waits for a command when there is nothing to run.

        Clients get a step's tokens once the drafters are told of it: the next step waits for a drafter, not for them.
        """
        commands = self.inbox.take(0 if self.scheduler.running or self.scheduler.waiting else None)
        self.counters.lap(IDLE)
        self._obey(commands)
        for session in self.scheduler.admit():
            session.started_ns = session.started_ns or time.monotonic_ns()
        self._assign()
        waited_ms, late = self._gather()
        works = self._planner.plan(self._left_out)
        self.counters.lap(PLAN)
        self._teller.tell(works)
        self._halves.ran(
            [work.session.session_id for work in works], num_late=len(late), num_left_out=len(self._left_out)
        )
        self.flush()
        self.counters.lap(TELL)
        if works:
            self._run(works, waited_ms, late)
        if not (self.scheduler.running or self.scheduler.waiting):
            self.flush()

    def _run(self, works: list[Work], waited_ms: float, late: list[Assignment]) -> None:
        start_ns = time.monotonic_ns()
        try:
            logits = self._runner.forward([work.segment() for work in works])
            outcomes = self._sampler.accept(works, logits)
        except Exception as error:
            self._run_apart(works, error)
            return
        self._failed_steps = 0
        step_ms = ms_since(start_ns)
        self.counters.lap(FORWARD)
        rows = sum(work.num_rows for work in works)
        decoding = all(work.session.needs_prefill == 1 for work in works)
        (self.counters.decode_s if decoding else self.counters.prefill_s).observe(step_ms / 1000)
        running = {session.session_id for session in self.scheduler.running}
        self._weigher.weigh(works, outcomes, step_ms=step_ms, waited_ms=waited_ms, late=late, running=running)
        self._committer.commit(works, outcomes, step_us=int(step_ms * 1000), batch_tokens=rows)
        sent = sum(len(response.tokens) for _, response in self._responses if not isinstance(response, Exception))
        self.counters.count(sent, time.monotonic_ns() - start_ns)
        self.counters.lap(COMMIT)
        pool = self.scheduler.pool
        self._decode_log.step(
            running=len(self.scheduler.running), waiting=len(self.scheduler.waiting),
            tokens=(pool.num_pages - self.scheduler.num_available) * pool.page_size,
            pool_tokens=pool.num_pages * pool.page_size,
        )  # fmt: skip

    def _run_apart(self, works: list[Work], error: Exception) -> None:
        """After a step that failed: its sessions one by one, so that only those end which it fails for.

        Raises the error when the engine is at fault.
        """
        if ends_the_engine(error):
            raise error
        log.error("a step failed; its sessions are run one by one", sessions=len(works), exc_info=error)
        self._failed_steps += 1
        for work in works:
            undo_prompt_rows(work)
            start_ns = time.monotonic_ns()
            try:
                outcomes = self._sampler.accept([work], self._runner.forward([work.segment()]))
            except Exception as failure:
                if ends_the_engine(failure):
                    raise
                log.error("a step failed for one session", session=work.session.session_id, exc_info=failure)
                self.scheduler.keep(work.session, work.slots, [])
                self._committer.fail(
                    work.session, Internal("this request cannot be computed; the server's log says why")
                )
            else:
                self._failed_steps = 0
                step_us = int(ms_since(start_ns) * 1000)
                self._committer.commit([work], outcomes, step_us=step_us, batch_tokens=work.num_rows)
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise error

    def _gather(self) -> tuple[float, list[Assignment]]:
        """Matches proposals and waits for late ones as long as that pays: the time waited, and for whom.

        Whom the step is better without is in `_left_out`.
        """
        late = self._give_up_on(self._planner.match())
        self._left_out = set()
        if not late:
            self._left_out = self._leave_out(late)
            return 0.0, []
        self.counters.lap(PLAN)
        self.counters.waits += 1
        waited_for, start_ns = late, time.monotonic_ns()
        deadline_ns = start_ns + int(self._planner.wait_ms(late) * 1e6)
        self._teller.tell_waiting(late)
        self.flush()
        self._left_out = self._leave_out(late)
        while late and not self._left_out and self._stopped_by is None:
            commands = self.inbox.take(deadline_ns)
            if not commands:
                break
            self._obey(commands)
            late = self._planner.match()
            self._left_out = self._leave_out(late)
            if time.monotonic_ns() >= deadline_ns:  # whatever else keeps coming
                break
        if not self._left_out:
            self._missed(late)
        self.counters.lap(WAIT)
        return ms_since(start_ns), waited_for

    def _leave_out(self, late: list[Assignment]) -> set[int]:
        """Ids of sessions that the step is better without (halves.py)."""
        parts: list[Part] = []
        reply_ms, is_late = 0.0, set(map(id, late))
        for session in self.scheduler.running if late or self._halves.expects_waits else ():
            assignment = self.drafters.of(session)
            rows = session.needs_prefill
            if assignment is not None and id(assignment) in is_late:
                reply_ms = max(reply_ms, assignment.drafter.replies.mean_ms)
                rows += round(assignment.brake.expected_nodes)
                parts.append(Part(session.session_id, rows, late=True, deadline_ns=self._deadline_ns(assignment)))
            elif assignment is not None and assignment.match is not None:
                reply_ms = max(reply_ms, assignment.drafter.replies.mean_ms)
                parts.append(Part(session.session_id, rows + len(assignment.match.tree)))
            elif late:
                parts.append(Part(session.session_id, rows))
            else:
                return set()  # who decodes plainly runs in every step
        return self._halves.leave_out(
            parts, lambda rows: float(self._costs.ms(rows)), reply_ms=reply_ms, now_ns=time.monotonic_ns()
        )

    def _deadline_ns(self, assignment: Assignment) -> int:
        """Until when a draft for the newest length is worth waiting for, or leaving its session out."""
        asked_ns = assignment.asked_ns.get(assignment.session.committed_len, 0)
        return asked_ns + int(self._planner.bound_ms(assignment) * 1e6)

    def _give_up_on(self, late: list[Assignment]) -> list[Assignment]:
        """Those of `late` that are waited for still: who was left out until now has had its time."""
        now_ns = time.monotonic_ns()
        missed = [
            assignment for assignment in late
            if assignment.session.session_id in self._left_out and self._deadline_ns(assignment) <= now_ns
        ]  # fmt: skip
        self._missed(missed)
        return [assignment for assignment in late if assignment not in missed]

    def _missed(self, late: list[Assignment]) -> None:
        """Drafts that did not come while they were waited for: their sessions decode plainly."""
        self.counters.missing += len(late)
        for assignment in late:
            assignment.waited_len = assignment.session.committed_len
        for drafter in {assignment.drafter for assignment in late}:
            drafter.missed_in_a_row += 1

    def _assign(self) -> None:
        """Opens running sessions that have no drafter to one that fits."""
        if not len(self.drafters):
            return
        row_ms = _DRAFT_ROW * float(self._costs.ms(1))
        for session in self.scheduler.running:
            if session.speculation.enabled and self.drafters.of(session) is None:
                fixed = self._planner.is_fixed(session)
                self._teller.opened(self.drafters.assign(session, row_ms=None if fixed else row_ms))

    def _obey(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Submit(sessions):
                    self._submit(sessions)
                case Cancel(sessions):
                    for session in sessions:
                        self._end(session, verify_pb2.CLOSE_REASON_CANCELLED)
                case DrafterJoined(drafter):
                    self.drafters.enlist(drafter)
                case DrafterLeft(drafter):
                    self.drafters.leave(drafter)
                case ProposalsArrived(drafter, proposals):
                    take_proposals(self.drafters, drafter, proposals)
                case Released(drafter, releases):
                    take_releases(self.drafters, drafter, releases)
                case ReadFeatures():
                    self._read_features(command)
                case FlushCache(answer):
                    answer(*self.scheduler.flush_cache())
                case Administer(run):
                    run(self.drafters)
                case Stop():
                    self._stopped_by = command

    def _submit(self, sessions: list[Session]) -> None:
        try:
            self.scheduler.submit(sessions)
        except OutriderError as error:
            self._responses.extend((session, error) for session in sessions)
        else:
            self._committer.finish_resumed(sessions)

    def _end(self, session: Session, reason: verify_pb2.CloseReason) -> None:
        self.scheduler.remove(session)
        self.drafters.close(session, reason)
        self.drafters.forget(session)

    def _end_all(self, error: Exception) -> None:
        for command in self.inbox.take(0):
            if isinstance(command, Submit):
                self._responses.extend((session, error) for session in command.sessions)
        for session in list(self.scheduler.sessions()):
            self._end(session, verify_pb2.CLOSE_REASON_ERROR)
            self._responses.append((session, error if isinstance(error, OutriderError) else Unavailable(str(error))))
        self.flush()

    def _read_features(self, command: ReadFeatures) -> None:
        plane = self._runner.features
        for drafter in self.drafters:
            assignment = drafter.find(command.session, command.generation)
            if drafter.drafter_id != command.drafter_id or assignment is None or plane is None:
                continue
            session = assignment.session
            if command.first_pos + command.count <= session.kv_len:
                slots = self._runner.slot_table[session.table_row, command.first_pos :][: command.count]
                command.answer(read_rows(plane, slots))
                return
        command.answer(None)

    def flush(self) -> None:
        """Hands clients what was committed."""
        if self._responses:
            self._deliver(list(self._responses))
            self._responses.clear()
