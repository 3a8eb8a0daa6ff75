"""The engine's one loop: take commands, admit, match proposals, forward, accept, commit, tell.

Runs on a thread of its own, owns the device and every session's state, and never awaits. It hears through an Inbox and
speaks through two callbacks: responses to clients, and the drafters' outboxes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import Segment
from kernels.acceptance import Accepted
from outrider.errors import Internal, OutriderError, Unavailable
from outrider.telemetry import get_logger
from outrider.v1 import verify_pb2
from verify_service.brake import CostTable
from verify_service.commands import (
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
from verify_service.drafters import Assignment, Drafters
from verify_service.features import read_rows
from verify_service.intake import take_proposals, take_releases
from verify_service.planner import Planner, Work, ms_since
from verify_service.sampler import Sampler
from verify_service.scheduler import Scheduler
from verify_service.session import Session, Stats
from verify_service.telling import Teller

log = get_logger(__name__)

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


@dataclass(slots=True)
class Counters:
    """Totals since start, read by the event loop for server info."""

    steps: int = 0
    output_tokens: int = 0
    tokens_per_s: float = 0.0  # over about the last second of work
    _window_ns: int = 0
    _window_tokens: int = 0

    def count(self, tokens: int, elapsed_ns: int) -> None:
        """Counts one step that sent `tokens`."""
        self.steps += 1
        self.output_tokens += tokens
        self._window_ns += elapsed_ns
        self._window_tokens += tokens
        if self._window_ns >= 1_000_000_000:
            self.tokens_per_s = self._window_tokens * 1e9 / self._window_ns
            self._window_ns = self._window_tokens = 0


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
    ) -> None:
        self.scheduler = scheduler
        self.drafters = drafters
        self.inbox = inbox
        self.stats = Stats()
        self.counters = Counters()
        self._runner = runner
        self._deliver = deliver
        self._costs = costs
        self._planner = Planner(
            scheduler, drafters, costs, max_nodes=max_verify_nodes, max_wait_ms=max_draft_wait_ms, brake=brake
        )
        self._sampler = Sampler()
        self._teller = Teller(drafters, runner)
        self._responses: Responses = []
        self._committer = Committer(scheduler, drafters, runner, self.stats, self._responses)
        self._stopped_by: Stop | None = None

    def run(self) -> None:
        """Steps until a Stop command; an error of the loop itself ends every session with it, and is raised."""
        try:
            while self._stopped_by is None:
                self.step()
            self._end_all(self._stopped_by.error)
        except Exception as error:
            log.error("the engine failed", exc_info=error)
            self._end_all(Internal("the engine failed; the server's log has it"))
            raise

    def step(self) -> None:
        """One step; waits for a command when there is nothing to run.

        Clients get a step's tokens once the drafters are told of it: the next step waits for a drafter, not for them.
        """
        self._obey(self.inbox.take(0 if self.scheduler.running or self.scheduler.waiting else None))
        for session in self.scheduler.admit():
            session.started_ns = session.started_ns or time.monotonic_ns()
        self._assign()
        waited_ms, late = self._gather()
        works = self._planner.plan()
        self._teller.tell(works)
        self.flush()
        if works:
            self._run(works, waited_ms, late)
        if not (self.scheduler.running or self.scheduler.waiting):
            self.flush()

    def _run(self, works: list[Work], waited_ms: float, late: list[Assignment]) -> None:
        start_ns = time.monotonic_ns()
        logits = self._runner.forward([work.segment() for work in works])
        outcomes = self._sampler.accept(works, logits)
        step_ms = ms_since(start_ns)
        rows = sum(work.num_rows for work in works)
        if all(work.session.needs_prefill == 1 for work in works):
            self._costs.observe(rows, step_ms)
            self._weigh(works, outcomes, waited_ms, late)
        self._committer.commit(works, outcomes, step_us=int(step_ms * 1000), batch_tokens=rows)
        sent = sum(len(response.tokens) for _, response in self._responses if not isinstance(response, Exception))
        self.counters.count(sent, time.monotonic_ns() - start_ns)

    def _gather(self) -> tuple[float, list[Assignment]]:
        """Matches proposals and waits for late ones as long as that pays: the time waited, and for whom."""
        late = self._planner.match()
        if not late:
            return 0.0, []
        waited_for, start_ns = late, time.monotonic_ns()
        deadline_ns = start_ns + int(self._planner.wait_ms(late) * 1e6)
        self._teller.tell_waiting(late)
        self.flush()
        while late and self._stopped_by is None:
            commands = self.inbox.take(deadline_ns)
            if not commands:
                break
            self._obey(commands)
            late = self._planner.match()
        for assignment in late:
            assignment.waited_len = assignment.session.committed_len
        for drafter in {assignment.drafter for assignment in late}:
            drafter.missed_in_a_row += 1
        return ms_since(start_ns), waited_for

    def _weigh(
        self, works: list[Work], outcomes: list[Accepted | None], waited_ms: float, late: list[Assignment]
    ) -> None:
        """Tells each session's brake what its drafts saved and cost in this step."""
        decoding = [work for work in works if work.samples]
        nodes = sum(work.num_rows - 1 for work in decoding if work.match is not None)
        rows = sum(work.num_rows for work in works)
        plain_ms = float(self._costs.ms(max(1, rows - nodes)))
        node_ms = max(0.0, float(self._costs.ms(rows)) - plain_ms) / max(1, nodes)
        value_ms = plain_ms / max(1, len(decoding))
        wait_ms = waited_ms / max(1, len(late))
        for work, outcome in zip(works, outcomes, strict=True):
            assignment = work.assignment
            if assignment is None or not work.samples:
                continue
            brake = assignment.brake
            drafted = work.num_rows - 1 if work.match is not None else 0
            accepted = len(outcome.nodes) if outcome is not None else 0
            if work.match is not None:
                hit = np.zeros(drafted, np.bool_)
                hit[outcome.nodes if outcome is not None else []] = True
                brake.verified(work.match.scores, hit)
            elif assignment not in late:
                brake.plain_step()
                continue
            if not self._planner.is_fixed(work.session):
                brake.round_done(
                    nodes=drafted,
                    accepted=accepted,
                    gain_ms=accepted * value_ms,
                    loss_ms=drafted * node_ms + (wait_ms if assignment in late else 0.0),
                    step_ms=value_ms,
                )

    def _assign(self) -> None:
        """Opens running sessions that have no drafter to one that fits."""
        if not len(self.drafters):
            return
        for session in self.scheduler.running:
            if session.speculation.enabled and self.drafters.of(session) is None:
                self._teller.opened(self.drafters.assign(session))

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
