"""The engine's one loop: take commands, admit, match proposals, forward, accept, commit, tell.

Owns the device and every session's state, and never awaits; one thread at a time runs it (turns.py). It hears through
an Inbox and speaks through two callbacks: responses to clients, and the drafters' outboxes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future

from kernels.acceptance import Accepted
from outrider.cost_table import CostTable
from outrider.errors import ENGINE_FAILED, OutriderError, Unavailable
from outrider.placement import Placement
from outrider.spared import Spared
from outrider.speculation_count import SpeculationCount
from outrider.telemetry import get_logger
from outrider.v1 import verify_pb2
from verify_service.assigning import Assigner
from verify_service.assignment import Assignment
from verify_service.commands import (
    Ask,
    Cancel,
    Command,
    DrafterJoined,
    DrafterLeft,
    Inbox,
    ProposalsArrived,
    Released,
    Renewed,
    Stop,
    Submit,
)
from verify_service.committing import Committer
from verify_service.counting import COMMIT, FORWARD, IDLE, PLAN, TELL, Counters, DecodeLog
from verify_service.drafters import Drafters
from verify_service.features import FeatureSender
from verify_service.gathering import BREATH_S, Gatherer
from verify_service.intake import hear
from verify_service.planner import Planner
from verify_service.runner import Runner
from verify_service.sampler import Sampler
from verify_service.scheduler import Scheduler
from verify_service.session import Session
from verify_service.step_failures import StepFailures, ends_the_engine
from verify_service.telling import Teller
from verify_service.turns import Compute, Lending, Steps, Turns, Wait
from verify_service.unsent import Responses, Unsent, responses_of
from verify_service.weighing import Seen, Weigher
from verify_service.work import Work

log = get_logger(__name__)

_IDLE = Wait(None)
_MANY = 8  # sessions of a step, whose trees it pays to have linked by the clerk


class StepLoop:
    """Runs steps: takes commands, has a step planned, computed and committed, and tells drafters and clients.

    deliver: is called with each step's responses. greedy_for_ngram: sessions that an n-gram drafter may draft for take
    the likeliest tokens. clerk: does what can wait while the device computes, a thread of its own; None: the engine
    itself, before that. lending: see Turns. clock: nanoseconds, by which it is judged whether drafts pay.
    """

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
        brake: bool,
        greedy_for_ngram: bool,
        decode_log_interval: int,
        clerk: Executor | None,
        lending: Lending | None,
        placement: Placement,
        sampler: Sampler,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.scheduler = scheduler
        self.drafters = drafters
        self.inbox = inbox
        self.stats = SpeculationCount()
        self.counters = Counters()
        self.features = FeatureSender(runner)
        self._runner = runner
        self._deliver = deliver
        self._planner = Planner(
            scheduler, drafters, costs, max_nodes=max_verify_nodes, max_wait_ms=max_draft_wait_ms, brake=brake
        )
        self._costs = costs
        self._greedy_for_ngram = greedy_for_ngram
        self._sampler = sampler
        self._weigher = Weigher(drafters, costs, self.counters, clock)
        self._teller = Teller(drafters, self.features)
        self._responses: list[tuple[Session, Unsent]] = []
        self._clerk = clerk
        self._placement = placement
        self._busy: Future[None] | None = None  # the clerk's work
        self._account: Callable[[], object] | None = None  # of the last step, yet to be done
        self._assigner = Assigner(scheduler, drafters, self._planner, self._weigher, self._teller, costs)
        self._gatherer = Gatherer(
            scheduler, drafters, self._planner, self._teller, costs=costs, counters=self.counters, obey=self._obey,
            rest=self.flush,
        )  # fmt: skip
        self.halves = self._gatherer.halves
        self._committer = Committer(
            scheduler, drafters, self.features, self.stats, self._responses, by_algorithm=self.counters.by_algorithm,
            renewed=inbox.put,
        )  # fmt: skip
        self._decode_log = DecodeLog(decode_log_interval, self.counters, self.stats, log.info)
        self._stopped_by: Stop | None = None
        self.turns = Turns(self._steps(), inbox, lending)
        self._failures = StepFailures(self._outcomes, scheduler.pages, self._committer)
        self._spared = Spared(log, "a step cannot be accounted for, which is said once")

    def run(self) -> None:
        """Steps until a Stop command; an error of the loop itself ends every session with it, and is raised."""
        self._placement.roam()
        try:
            self.turns.run()
        finally:
            self.counters.is_idle = True

    def _steps(self) -> Steps:
        try:
            while self._stopped_by is None:
                yield from self.step()
            self._end_all(self._stopped_by.error)
        except Exception as error:
            log.error("the engine failed", exc_info=error)
            self._end_all(Unavailable("the engine failed; the server's log has it", code=ENGINE_FAILED))
            raise

    def step(self) -> Steps:
        """One step; waits for a command when there is nothing to run.

        Drafters are told of a step before all else: the next one waits for them, not for clients or accounts.
        """
        self.counters.is_idle = is_idle = not (self.scheduler.running or self.scheduler.waiting)
        commands = (yield _IDLE) if is_idle else self.inbox.take()
        self.counters.is_idle = False
        self.counters.lap(IDLE)
        self._obey(commands)
        for session in self.scheduler.admit():
            if not session.started_ns:  # else it was preempted
                self._begin(session)
        self._assigner.assign()
        waited_ms, late = yield from self._gatherer.gather()
        works = self._planner.plan(self._gatherer.left_out)
        self.counters.lap(PLAN)
        told = self._teller.tell(works)
        self._gatherer.ran(works, len(late))
        if works and self._clerk is not None and (self._responses or self._account or len(works) >= _MANY):
            self._busy = self._clerk.submit(self.flush, works, BREATH_S if told else 0.0)
        else:
            self.flush()
        self.counters.lap(TELL)
        if works:
            # Drafts of those that are left out may come meanwhile; and what was told is to be sent meanwhile.
            rows = sum([work.num_rows for work in works])
            yield Compute(math.inf if self._gatherer.left_out or told else self._costs.ms(rows))
            self._run(works, rows, waited_ms, late)
        if not (self.scheduler.running or self.scheduler.waiting):
            self.flush()

    def _begin(self, session: Session) -> None:
        session.started_ns = time.monotonic_ns()
        if self._greedy_for_ngram and self.drafters.may_draft_by_ngrams(session):
            session.sampler.be_greedy()

    def _run(self, works: list[Work], rows: int, waited_ms: float, late: list[Assignment]) -> None:
        start_ns = time.monotonic_ns()
        try:
            outcomes = self._outcomes(works)
        except Exception as error:
            self._await_clerk()
            sent = self._failures.run_apart(works, error)
            self._weigher.ended(works)  # whose time tells nothing of drafts
            self._count(sent, self.counters.lap(FORWARD) - start_ns)
            return
        self._await_clerk()
        self._failures.in_a_row = 0
        step_ms = (self.counters.lap(FORWARD) - start_ns) / 1e6
        wall_ms, told = self._weigher.ended(works)
        running = {session.session_id for session in self.scheduler.running}
        sent = self._committer.commit(works, outcomes, step_us=int(step_ms * 1000), batch_tokens=rows)
        elapsed_ns = self.counters.lap(COMMIT) - start_ns

        def account() -> None:
            seen = Seen(works, outcomes, step_ms, waited_ms, wall_ms, late, running, told)
            (self.counters.decode_s if seen.decodes else self.counters.prefill_s).observe(step_ms / 1000)
            self._planner.look_back()
            self._weigher.weigh(seen)
            self._placement.step(len(running), drafts=any([work.match is not None for work in works]))
            self._count(sent, elapsed_ns)

        self._account = account

    def _outcomes(self, works: list[Work]) -> list[Accepted | None]:
        logits = self._runner.forward([work.segment() for work in works])
        return self._sampler.accept(works, logits, self._runner.likeliest)

    def _await_clerk(self) -> None:
        if self._busy is not None:
            busy, self._busy = self._busy, None
            busy.result()

    def _count(self, sent: int, elapsed_ns: int) -> None:
        self.counters.count(sent, elapsed_ns)
        pages = self.scheduler.pages
        self._decode_log.step(
            running=len(self.scheduler.running), waiting=len(self.scheduler.waiting),
            tokens=(pages.pool.num_pages - pages.num_available) * pages.page_size,
            pool_tokens=pages.pool.num_pages * pages.page_size,
        )  # fmt: skip

    def _obey(self, commands: list[Command]) -> bool:
        """Does what commands say; returns whether the loop goes on."""
        for command in commands:
            match command:
                case ProposalsArrived() | Released():
                    hear(self.drafters, command)
                case Submit(sessions):
                    self._submit(sessions)
                case Cancel(sessions):
                    for session in sessions:
                        self._committer.end(session, verify_pb2.CLOSE_REASON_CANCELLED)
                case DrafterJoined(drafter):
                    self.drafters.enlist(drafter)
                case DrafterLeft(drafter):
                    self.drafters.leave(drafter)
                case Renewed():
                    self._committer.renewed(command)
                case Ask():
                    self._answer(command)
                case Stop():
                    self._stopped_by = command
        return self._stopped_by is None

    def _answer(self, ask: Ask) -> None:
        try:
            ask.run()
        except Exception as error:
            ask.answer.fail(error)
            if ends_the_engine(error):
                raise
            log.error("what was asked of the engine failed", exc_info=error)

    def _submit(self, sessions: list[Session]) -> None:
        try:
            self.scheduler.submit(sessions)
        except OutriderError as error:
            self._responses.extend((session, error) for session in sessions)
        else:
            self._committer.finish_resumed(sessions)

    def _end_all(self, error: OutriderError) -> None:
        for command in self.inbox.end(error):
            if isinstance(command, Submit):
                self._responses.extend((session, error) for session in command.sessions)
        for session in list(self.scheduler.sessions()):
            self._committer.end(session, verify_pb2.CLOSE_REASON_ERROR)
            self._responses.append((session, error))
        self.flush()

    def flush(self, works: Sequence[Work] = (), breath_s: float = 0.0) -> None:
        """Does what could wait: for clients, for the accounts, and for the end of the step of `works`."""
        if breath_s:  # in which the event loop, which needs the interpreter for it, sends what drafters were told
            time.sleep(breath_s)
        self.scheduler.pages.settle()
        self._committer.count()
        if self._responses:
            responses = responses_of(self._responses)
            self._responses.clear()
            self._deliver(responses)
        self._settle_account()
        self._sampler.prepare(works)

    def _settle_account(self) -> None:
        """Accounts for the last step. No answer depends on that: what fails there may cost speed, and no session."""
        account, self._account = self._account, None
        if account is None:
            return
        with self._spared:
            account()
