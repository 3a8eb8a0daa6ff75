"""Both ends of the session protocol, verify's loop and the drafter's table, with a bad wire between them."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from draft_service.drafters.base import Draft as Made
from draft_service.session import Session as Drafted
from draft_service.sessions import Changes, SessionTable
from outrider.errors import Unavailable
from outrider.sampling import SamplingParams
from outrider.tree import TokenTree
from outrider.v1 import common_pb2, verify_pb2
from outrider.wire import pack_scores
from tests.drafter_view import Draft
from tests.fake_drafters import Truth, random_draft
from tests.fakes import ToyModel
from tests.verify_service.rig import (
    MAX_ASSUMED,
    MAX_KEPT,
    MAX_NODES,
    MAX_PROPOSAL_NODES,
    Rig,
    Sim,
    build_rig,
    request,
    taken,
)
from verify_service.commands import Released, Stop
from verify_service.session import Session
from verify_service.work import Work

Frame = list[verify_pb2.Proposal] | list[verify_pb2.Release]
VOCAB = 8
MODEL = ToyModel(vocab_size=VOCAB, order=3)


@dataclass
class Client:
    """One answer, across as many verify processes as it takes."""

    prompt: list[int]
    params: SamplingParams
    output: list[int]  # what it will be
    rig: Rig  # the process that it asked last
    session: Session
    choice: int = 0
    held: list[int] = field(default_factory=list)  # from processes that are gone
    cancelled: bool = False

    @property
    def received(self) -> list[int]:
        """All that it has been given."""
        return self.held + self.rig.tokens[self.session.session_id]

    @property
    def has_finished(self) -> bool:
        """Whether it was told of its answer's end."""
        return self.session.session_id in self.rig.finishes


@dataclass(eq=False)
class Peer:
    """A drafter's end of a stream, with what it has said and verify has not heard yet.

    deaf: verify has ended the stream, or nothing comes through any more, and the drafter has not noticed.
    """

    sim: Sim
    table: SessionTable
    said: deque[Frame] = field(default_factory=deque)
    last: list[verify_pb2.Proposal] = field(default_factory=list)  # the proposals that it said last
    deaf: bool = False


class Wire(RuleBasedStateMachine):
    """Frames are read and heard late, twice or never; streams are lost with and without a word; processes restart.

    The answers stay what they are, and nothing is left of any session on either side.
    """

    @initialize(
        seed=st.integers(0, 2**32), pages=st.integers(48, 120), budget=st.booleans(),
        outbox_bytes=st.sampled_from([2**20, 1000]),
    )  # fmt: skip
    def start(self, seed: int, pages: int, budget: bool, outbox_bytes: int) -> None:
        self.rng = random.Random(seed)
        self.outbox_bytes = outbox_bytes
        self.lost: list[Peer] = []  # their drafters know, verify does not
        self.pages, self.brake = pages, budget
        self.truth = Truth()
        self.clients: list[Client] = []
        self.peers: list[Peer] = []
        self.eager = 0.5
        # By session and committed length: where a step fails, its length is verified once more.
        self.verified: dict[tuple[int, int], list[TokenTree]] = defaultdict(list)
        self.rig = self.new_rig()

    def new_rig(self) -> Rig:
        rig = build_rig(
            MODEL,
            pages=self.pages,
            context=48,
            chunk=6,
            max_running=4,
            brake=self.brake,
            wait_ms=0.1,
            outbox_bytes=self.outbox_bytes,
        )
        rig.inbox._act = self.act
        plan = rig.loop._planner.plan

        def watched_plan(without: Collection[int] = ()) -> list[Work]:
            works = plan(without)
            for work in works:
                if work.match is not None:
                    self.verified[work.session.session_id, work.session.committed_len].append(work.match.tree)
            return works

        rig.loop._planner.plan = watched_plan
        return rig

    # ---- clients

    @rule(
        prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12),
        temperature=st.sampled_from([0.0, 1.0]),
        seed=st.integers(0, 99),
        stop=st.integers(0, VOCAB - 1),
        choices=st.sampled_from([1, 1, 3]),
    )
    def ask(self, prompt: list[int], temperature: float, seed: int, stop: int, choices: int) -> None:
        if len(self.clients) < 12:
            stop_ids = (stop,) if seed % 2 else ()
            params = SamplingParams(
                temperature=temperature, seed=seed, max_tokens=30, min_tokens=4, stop_token_ids=stop_ids
            )
            for choice, session in enumerate(self.rig.submit(request(prompt, params, choices=choices))):
                output = MODEL.decode(prompt, params, seed=seed, choice=choice, stop_ids=stop_ids, max_len=48)
                self.truth.texts.append(prompt + output)
                self.clients.append(Client(prompt, params, output, self.rig, session, choice))

    @rule(which=st.integers(0, 13))
    def hang_up(self, which: int) -> None:
        if which < len(self.clients):
            client = self.clients[which]
            client.cancelled = True
            client.rig.cancel(client.session)

    # ---- verify

    @rule(eager=st.sampled_from([0.0, 0.5, 1.0]), count=st.integers(1, 4))
    def step(self, eager: float, count: int) -> None:
        self.eager = eager
        for _ in range(count):
            if not self.rig.is_idle or self.rig.inbox.num_waiting:
                self.rig.step()
            self.note_expelled()

    @rule()
    def a_step_fails(self) -> None:
        """Has the next step fail once."""
        runner = self.rig.runner

        def fail() -> None:
            runner.on_forward = lambda: None
            raise RuntimeError("a step failed")

        runner.on_forward = fail

    @rule()
    def shut_down(self) -> None:
        """Verify stops before its sessions have ended; another one takes them over."""
        self.rig.inbox.put(Stop(Unavailable("shutting down")))
        self.rig.loop.run()
        self.rig.check_whole()
        self.restart()

    @rule()
    def restart(self) -> None:
        """Verify dies: streams and sessions go, and clients come again with what they have."""
        for peer in [*self.peers, *self.lost]:
            self.forget(peer)
        self.peers, self.lost = [], []
        self.verified.clear()
        self.rig = self.new_rig()
        for client in self.clients:
            if not client.cancelled and not client.has_finished:
                client.held, client.rig = client.received, self.rig
                resumed = request(client.prompt, client.params, resumed=client.held)
                resumed.first_choice_index = client.choice
                (client.session,) = self.rig.submit(resumed)
        self.join()

    # ---- drafters

    @rule(name=st.sampled_from(["", "", "one", "two"]))
    def join(self, name: str = "") -> None:
        """A drafter comes, or comes again under its name: it does not get what it gave up."""
        if len(self.peers) < 3:
            limits = verify_pb2.DrafterLimits(
                max_proposal_nodes=MAX_PROPOSAL_NODES,
                max_assumed_tokens=MAX_ASSUMED,
                max_proposals_per_session=MAX_KEPT,
                max_verify_nodes=MAX_NODES,
            )
            target = common_pb2.ModelInfo(vocab_size=VOCAB, context_length=48)
            sim = self.rig.join(name=name or str(self.rng.random()), reads=lambda: False)
            self.peers.append(
                Peer(sim, SessionTable(verify_pb2.Enlisted(limits=limits, target=target), max_sessions=3))
            )

    @rule(which=st.integers(0, 2), told=st.sampled_from(["both", "verify", "drafter"]))
    def stream_ends(self, which: int, told: str) -> None:
        """Both know, or one goes on for a while as if nothing were."""
        if which >= len(self.peers):
            return
        peer = self.peers[which]
        if told != "drafter":
            if not peer.deaf:
                self.rig.leave(peer.sim)
            peer.deaf = True
        if told != "verify":
            self.peers.remove(peer)
            self.forget(peer)
            if not peer.deaf:
                self.lost.append(peer)

    @rule()
    def verify_notices(self) -> None:
        """Keepalive has found out about a stream whose drafter is gone."""
        if self.lost:
            self.rig.leave(self.lost.pop().sim)

    @rule(which=st.integers(0, 2))
    def drafter_repeats(self, which: int) -> None:
        """Has a drafter send its last proposals once more, or those of a stream that is gone."""
        if which < len(self.peers):
            peer = self.peers[which]
            old = self.rng.choice([other.last for other in (*self.peers, *self.lost)])
            if old:
                peer.said.append(old)

    @rule(which=st.integers(0, 2))
    def drafter_drains(self, which: int) -> None:
        if which < len(self.peers):
            peer = self.peers[which]
            peer.table.draining = True
            self.say_releases(peer, peer.table.release_all(verify_pb2.RELEASE_REASON_DRAINING, "bye"))

    @rule(which=st.integers(0, 2))
    def drafter_reads(self, which: int) -> None:
        if which < len(self.peers):
            self.read(self.peers[which])

    @rule(which=st.integers(0, 2))
    def verify_hears(self, which: int) -> None:
        if which < len(self.peers):
            self.hear(self.peers[which])

    @rule(which=st.integers(0, 2))
    def drafter_gives_up(self, which: int) -> None:
        if which < len(self.peers):
            peer = self.peers[which]
            changes = peer.table.release_all(verify_pb2.RELEASE_REASON_ERROR, "too much")
            self.say_releases(peer, changes)

    def forget(self, peer: Peer) -> None:
        """The drafter knows that its stream has ended: no session of it stays."""
        peer.table.release_all(verify_pb2.RELEASE_REASON_UNSPECIFIED, "the stream ended")
        assert len(peer.table) == 0
        assert not peer.table.take_due()
        peer.said.clear()

    def note_expelled(self) -> None:
        """Streams that verify has ended for slow reading."""
        for peer in self.peers:
            if peer.sim.ended is not None and not peer.deaf:
                assert self.outbox_bytes < 2**20
                peer.deaf = True
                self.rig.leave(peer.sim)
        self.lost = [peer for peer in self.lost if peer.sim.ended is None or self.rig.leave(peer.sim)]

    def act(self) -> None:
        """What happens while the engine looks into its inbox."""
        for peer in self.peers:
            if self.rng.random() < self.eager:
                self.read(peer)
                self.hear(peer)

    def read(self, peer: Peer) -> None:
        if peer.deaf or peer.sim.ended is not None:
            return
        frame = taken(peer.sim.drafter.outbox)
        if frame is None:
            return
        changes = peer.table.apply([frame])
        assert len(frame.opened) <= len(changes.opened) + len(changes.releases)  # none was said again
        for session in [*changes.opened, *(extension.session for extension in changes.extended)]:
            self.check_known(session)
            self.check_hint(peer, session)
        self.say_releases(peer, changes)
        proposals = [
            self.propose(peer, session) for session in peer.table.take_due() for _ in range(self.rng.randint(0, 3))
        ]
        if proposals:
            peer.last = proposals
            peer.said.append(proposals)

    def say_releases(self, peer: Peer, changes: Changes) -> None:
        if changes.releases:
            # Verify sends nothing that would make a drafter give up, but for want of room or by its own wish.
            reasons = {release.reason for release in changes.releases}
            own = verify_pb2.RELEASE_REASON_ERROR, verify_pb2.RELEASE_REASON_DRAINING
            assert reasons <= {verify_pb2.RELEASE_REASON_CAPACITY, *own}
            peer.said.append(changes.releases)

    def propose(self, peer: Peer, session: Drafted) -> verify_pb2.Proposal:
        coming = self.truth.after(session.tokens.tolist(), 20)
        ahead = self.rng.choice([0, 0, 1, 2, 3])
        draft = random_draft(coming[ahead:], VOCAB, self.rng, peer.table.node_limit(session))
        assumed = coming[:ahead]
        if assumed and self.rng.random() < 0.3:
            assumed[-1] = self.rng.randrange(VOCAB)
        made = Made(
            np.array(draft.tokens, np.int32), np.array(draft.parents, np.int32), assumed=np.array(assumed, np.int32)
        )  # fmt: skip
        scores = pack_scores(np.exp(-np.array(draft.scores or [0] * len(draft.tokens)) / 16.0))
        proposal = verify_pb2.Proposal()
        peer.table.propose(proposal, session, made, scores, 1, keeps_memo=False)
        return proposal

    def hear(self, peer: Peer) -> None:
        if peer.deaf:
            peer.said.clear()
        while peer.said:
            frame = peer.said.popleft()
            if isinstance(frame[0], verify_pb2.Release):
                self.rig.inbox.put(Released(peer.sim.drafter, frame))  # type: ignore[arg-type]
            else:
                self.rig.send(peer.sim, *frame)  # type: ignore[arg-type]

    # ---- what must hold

    def check_known(self, session: Drafted) -> None:
        """Checks that no token is lost, repeated or out of order on its way to a drafter."""
        tokens = session.tokens.tolist()
        assert any(text[: len(tokens)] == tokens for text in self.truth.texts)

    def check_hint(self, peer: Peer, session: Drafted) -> None:
        """Checks that the hint tells the drafter which nodes of its proposal are verified, none other and none less.

        Where verify waits it only hopes: what is on its way may come too late, or be trimmed.
        """
        seen = peer.table.in_verification(session)
        if seen is not None and session.following.kind == verify_pb2.NEXT_KIND_PROPOSAL:
            trees = self.verified[session.session_id, len(session.tokens)]
            told = seen.tree.tokens.tolist(), seen.tree.parents.tolist()
            assert told in [(tree.tokens.tolist(), tree.parents.tolist()) for tree in trees]

    @invariant()
    def clients_have_the_beginning_of_their_answers(self) -> None:
        for client in self.clients:
            assert client.session.session_id not in client.rig.errors
            assert client.received == client.output[: len(client.received)]
            assert not client.has_finished or client.received == client.output

    def teardown(self) -> None:
        self.eager = 1.0
        self.rig.run() if not self.rig.is_idle or self.rig.inbox.num_waiting else None
        for client in self.clients:
            assert client.cancelled or client.has_finished
        self.rig.check_whole()
        drafters = self.rig.loop.drafters
        for left in (drafters._generations, drafters._barred, drafters._by_session):
            assert not left
        for peer in self.peers:
            self.read(peer)
            assert peer.deaf or len(peer.table) == 0
            self.forget(peer)


TestWire = Wire.TestCase
TestWire.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


def test_the_commonest_exchange() -> None:
    """A chain is proposed for each length and accepted; every step commits it and a bonus."""
    rig, truth = build_rig(MODEL), Truth()
    sim = rig.join(lambda seen: [Draft(truth.after(seen.tokens, 3))] if len(seen.tokens) > seen.prompt_len else [])
    (session,) = rig.submit(request([1, 2], SamplingParams(temperature=0.0, max_tokens=9)))
    output = MODEL.greedy([1, 2], 9)
    truth.texts.append([1, 2, *output])
    rig.run()
    responses = [list(response.tokens) for response in rig.responses[session.session_id]]
    assert responses == [output[:1], output[1:5], output[5:9]]
    assert (sim.view.num_credits, sim.view.num_accepted) == (2, 6)
