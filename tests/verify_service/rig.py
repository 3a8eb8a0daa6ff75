"""The true engine over a fake runner, stepped by hand on the test's own thread, with drafters that answer at once.

Drafters act when the loop looks into its inbox: at a step's start, and while it waits for drafts.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from engine.batch import Segment
from engine.config import ModelConfig
from engine.pages import PagePool
from engine.radix_cache import RadixCache
from outrider.cost_table import CostTable
from outrider.placement import Placement
from outrider.sampling import SamplingParams
from outrider.v1 import common_pb2, verify_pb2
from outrider.wire import pack_ids
from tests.drafter_view import Policy, Seen, View
from tests.fake_drafters import silent
from tests.fakes import FakeRunner, ToyModel
from verify_service.commands import (
    Cancel,
    Command,
    DrafterJoined,
    DrafterLeft,
    Inbox,
    ProposalsArrived,
    Released,
    Submit,
)
from verify_service.drafter import Drafter
from verify_service.drafters import Drafters
from verify_service.grammar_compiler import GrammarCompiler
from verify_service.outbox import RoundOutbox
from verify_service.parsing import parse_proposals
from verify_service.requests import RequestBounds, SessionFactory
from verify_service.sampler import Sampler
from verify_service.scheduler import Scheduler
from verify_service.session import Session
from verify_service.session_pages import SessionPages
from verify_service.step_loop import StepLoop
from verify_service.turns import Compute, Pause
from verify_service.unsent import Responses

MAX_NODES, MAX_PROPOSAL_NODES, MAX_ASSUMED, MAX_KEPT, MAX_CHOICES = 8, 32, 8, 4, 8


class ActingInbox(Inbox):
    """Lets others act whenever the engine takes.

    Blocks only while the engine `expects` something of a thread: one with nothing to do is an error.
    """

    def __init__(self, act: Callable[[], object], expects: Callable[[], object]) -> None:
        super().__init__()
        self._act, self._expects = act, expects

    def take(self) -> list[Command]:
        """Lets the others act; returns all commands that are there then."""
        self._act()
        return super().take()

    def look(self, pause: Pause) -> list[Command]:
        """What the engine gets where it paused."""
        if isinstance(pause, Compute):
            return []
        commands = self.take()
        while pause.until_ns is None and not commands and self._expects():
            self.wait(None)
            commands = self.take()
        if pause.until_ns is None and not commands:
            raise AssertionError("the engine waits, and nothing will come")
        return commands


@dataclass(eq=False)
class Sim:
    """A drafter without a stream. `reads`: whether it reads and answers when its turn comes."""

    drafter: Drafter
    view: View
    policy: Policy
    reads: Callable[[], bool]
    ended: str | None = None


@dataclass(eq=False)
class Rig:
    """A step loop, what it has sent, and its drafters."""

    runner: FakeRunner
    loop: StepLoop
    factory: SessionFactory
    inbox: ActingInbox
    clock: StepClock | None  # None: true time
    sims: list[Sim] = field(default_factory=list)
    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    finishes: dict[int, verify_pb2.GenerateFinish] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)
    responses: dict[int, list[verify_pb2.GenerateResponse]] = field(default_factory=lambda: defaultdict(list))

    def submit(self, request: verify_pb2.GenerateRequest) -> list[Session]:
        """Submits a request; returns its sessions."""
        sessions = self.factory.build(request)
        self.inbox.put(Submit(sessions))
        return sessions

    def cancel(self, *sessions: Session) -> None:
        """Cancels sessions, as the servicer does when a call ends early."""
        self.inbox.put(Cancel(list(sessions)))

    def join(
        self,
        policy: Policy = silent,
        *,
        name: str = "sim",
        needs_features: bool = False,
        max_sessions: int = 64,
        algorithm: common_pb2.Algorithm = common_pb2.ALGORITHM_NGRAM,
        reads: Callable[[], bool] = lambda: True,
    ) -> Sim:
        """Enlists a drafter."""

        def end(reason: str) -> None:
            sim.ended = reason

        drafter = Drafter(
            drafter_id=name,
            algorithm=algorithm,
            draft_model="sim",
            max_sessions=max_sessions,
            needs_features=needs_features,
            wake=lambda: None,
            end=end,
            taken=lambda: None,
        )
        sim = Sim(drafter, View(needs_features=needs_features, max_sessions=max_sessions), policy, reads)
        self.sims.append(sim)
        self.inbox.put(DrafterJoined(drafter))
        return sim

    def leave(self, sim: Sim) -> None:
        """Ends a drafter's stream."""
        self.sims.remove(sim)
        self.inbox.put(DrafterLeft(sim.drafter))

    def send(self, sim: Sim, *proposals: verify_pb2.Proposal) -> None:
        """Hands over one frame of proposals, as the stream's reader does."""
        vocab_size = self.runner.model.vocab_size
        arrived = parse_proposals(proposals, vocab_size=vocab_size, max_nodes=MAX_PROPOSAL_NODES)
        read = None if sim.view.ring is None else sim.view.ring.last
        self.inbox.put(ProposalsArrived(sim.drafter, arrived, read))

    def release(self, sim: Sim, seen: Seen) -> None:
        """Has a drafter give a session up."""
        release = verify_pb2.Release(session=seen.session, generation=seen.generation)
        self.inbox.put(Released(sim.drafter, [release]))

    def act(self) -> None:
        """Lets every drafter read what is there for it and answer."""
        for sim in list(self.sims):
            if sim.reads():
                self.read(sim)

    def read(self, sim: Sim) -> list[Seen]:
        """Lets one drafter read and answer; returns what it was told."""
        frame = taken(sim.drafter.outbox)
        if frame is None:
            return []
        told = sim.view.apply(frame)
        proposals = [sim.view.propose(seen, draft) for seen in told for draft in sim.policy(seen)]
        if proposals:
            self.send(sim, *proposals)
        return told

    def deliver(self, responses: Responses) -> None:
        """Takes a step's responses."""
        for session, response in responses:
            number = session.session_id
            assert number not in self.finishes
            assert number not in self.errors
            if isinstance(response, Exception):
                self.errors[number] = response
                continue
            self.responses[number].append(response)
            self.tokens[number] += response.tokens
            if response.HasField("finish"):
                self.finishes[number] = response.finish

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs or waits."""
        return not any(self.loop.scheduler.sessions())

    def step(self) -> None:
        """Runs one step of the loop; clients get what it committed."""
        self.take_step()
        self.loop.flush()
        self.check()

    def take_step(self) -> None:
        """Runs one step of the loop, whatever it waits for."""
        steps = self.loop.step()
        with contextlib.suppress(StopIteration):
            pause = next(steps)
            while True:
                pause = steps.send(self.inbox.look(pause))

    def run(self, most_steps: int = 5000) -> None:
        """Steps until all that was submitted has ended; drafters hear the end."""
        self.take_step()
        self.loop.flush()
        for _ in range(most_steps):
            if self.is_idle:
                self.act()
                return
            self.step()
        raise AssertionError(f"still busy after {most_steps} steps")

    def check(self) -> None:
        """Checks that no page is in two hands and none is lost."""
        scheduler = self.loop.scheduler
        scheduler.pages.pool.check()
        held = scheduler.pages.cache.num_pages if scheduler.pages.cache is not None else 0
        for session in scheduler.running:
            held += len(session.pages) - (len(session.prefix.pages) if session.prefix is not None else 0)
        assert held + scheduler.pages.pool.num_free == scheduler.pages.pool.num_pages
        if scheduler.pages.cache is not None:
            scheduler.pages.cache.check()

    def check_whole(self) -> None:
        """Checks, after all has ended, that every page can be had again."""
        scheduler = self.loop.scheduler
        assert self.is_idle
        assert scheduler.pages.num_available == scheduler.pages.pool.num_pages
        if scheduler.pages.cache is not None:
            scheduler.pages.cache.clear()
        assert scheduler.pages.pool.num_free == scheduler.pages.pool.num_pages
        scheduler.pages.pool.check()
        for drafter in self.loop.drafters:
            assert not drafter.assignments

    def output(self, session: Session) -> list[int]:
        """What a session's client has, resumed tokens included."""
        resumed = session.tokens[session.prompt_len : session.prompt_len + session.resumed_len].tolist()
        return resumed + self.tokens[session.session_id]


def taken(outbox: RoundOutbox) -> verify_pb2.Round | None:
    """What is pending for a drafter, if anything is."""
    frame = verify_pb2.Round()
    return frame if outbox.take(frame) else None


class FixedCosts(CostTable):
    """A machine whose step times never vary."""

    def observe(self, rows: int, ms: float) -> None:
        """Learns nothing."""


class StepClock:
    """Nanoseconds that go by in a runner's steps, as long as `costs` says that each takes, and where they are spent."""

    def __init__(self, runner: FakeRunner, costs: CostTable) -> None:
        self._now_ns = 0
        forward = runner.forward

        def timed(segments: Sequence[Segment]) -> torch.Tensor:
            self.spend(costs.ms(sum(len(segment.tokens) for segment in segments)))
            return forward(segments)

        runner.forward = timed

    def spend(self, ms: float) -> None:
        """Lets so many milliseconds go by."""
        self._now_ns += int(1e6 * ms)

    def __call__(self) -> int:
        return self._now_ns


def build_rig(
    model: ToyModel | None = None,
    *,
    pages: int = 512,
    page_size: int = 1,
    cache: bool = True,
    context: int = 128,
    max_running: int = 8,
    max_queued: int = 64,
    chunk: int = 16,
    brake: bool = False,
    costs: CostTable | None = None,
    wait_ms: float = 20.0,
    outbox_bytes: int = 2**20,
    feature_width: int = 0,
    nan_tokens: frozenset[int] = frozenset(),
    longest_prefix_first: bool = False,
    greedy_for_ngram: bool = False,
) -> Rig:
    """A rig; time plays no part in what it does, or, with `brake` on, the time that steps take by `costs`."""
    runner = FakeRunner(
        model or ToyModel(),
        pages * page_size,
        max_running,
        min(context, pages * page_size),
        feature_width=feature_width,
        nan_tokens=nan_tokens,
    )
    pool = PagePool(pages, page_size)
    scheduler = Scheduler(
        SessionPages(pool, runner.slot_table, cache=RadixCache(pool) if cache else None, move=runner.move),
        max_running=max_running,
        max_queued=max_queued,
        chunk=chunk,
        longest_prefix_first=longest_prefix_first,
    )
    inbox = ActingInbox(lambda: rig.act(), lambda: rig.loop.scheduler.parked)
    clock = None if costs is None else StepClock(runner, costs)
    loop = StepLoop(
        runner,
        scheduler,
        Drafters(max_kept=MAX_KEPT, max_assumed=MAX_ASSUMED, outbox_bytes=outbox_bytes),
        costs=costs if costs is not None else CostTable({}),
        inbox=inbox,
        deliver=lambda responses: rig.deliver(responses),
        max_verify_nodes=MAX_NODES,
        max_draft_wait_ms=wait_ms,
        brake=brake,
        greedy_for_ngram=greedy_for_ngram,
        decode_log_interval=0,
        clerk=None,
        lending=None,
        placement=Placement(None),
        sampler=Sampler(),
        clock=clock or time.monotonic_ns,
    )
    factory = build_factory(runner.config)
    rig = Rig(runner, loop, factory, inbox, clock)
    return rig


def build_factory(config: ModelConfig) -> SessionFactory:
    """Makes sessions; there is no tokenizer, so none with a grammar."""
    compiler = GrammarCompiler(Path("/models/toy"), vocab_size=config.vocab_size, eos_token_ids=())
    return SessionFactory(config, RequestBounds(config.max_position, MAX_CHOICES, MAX_NODES), compiler)


def request(
    prompt: list[int],
    params: SamplingParams | None = None,
    *,
    resumed: list[int] | None = None,
    choices: int = 1,
    speculative: common_pb2.SpeculativeParams | None = None,
    include_trees: bool = False,
) -> verify_pb2.GenerateRequest:
    """A GenerateRequest; greedy by default."""
    return verify_pb2.GenerateRequest(
        prompt_tokens=pack_ids(prompt),
        sampling=(params or SamplingParams(temperature=0.0, max_tokens=20)).to_proto(),
        resumed_tokens=pack_ids(resumed or []),
        num_choices=choices,
        speculative=speculative,
        include_trees=include_trees,
    )


def expected(rig: Rig, session: Session) -> list[int]:
    """What plain decoding, one token at a time and without the engine, gives for a session."""
    return rig.runner.model.decode(
        session.tokens[: session.prompt_len].tolist(),
        session.params,
        seed=session.seed,
        choice=session.choice_index,
        stop_ids=tuple(session.stop_ids),
        max_len=session.max_len,
    )


def prompt_of(length: int, vocab_size: int, seed: int = 0) -> list[int]:
    """A prompt of random tokens."""
    return np.random.default_rng(seed).integers(0, vocab_size, length).tolist()
