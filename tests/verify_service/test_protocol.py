"""Both ends of the session protocol, verify's loop and the drafter's table, with a bad wire between them."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from draft_service.session import Session as Drafted
from draft_service.sessions import Changes, SessionTable
from outrider.sampling import SamplingParams
from outrider.tree import TokenTree
from outrider.v1 import common_pb2, verify_pb2
from tests.drafter_view import Draft
from tests.fake_drafters import Truth, random_draft
from tests.fakes import ToyModel
from tests.verify_service.rig import MAX_ASSUMED, MAX_KEPT, MAX_NODES, MAX_PROPOSAL_NODES, Rig, Sim, build_rig, request
from verify_service.commands import Released
from verify_service.planner import Work
from verify_service.session import Session

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
    """A drafter's end of a stream, with what it has said and verify has not heard yet."""

    sim: Sim
    table: SessionTable
    said: deque[list[verify_pb2.Proposal] | list[verify_pb2.Release]] = field(default_factory=deque)


class Wire(RuleBasedStateMachine):
    """Frames are read and heard late, streams are lost, processes restart; the answers stay what they are."""

    @initialize(seed=st.integers(0, 2**32), pages=st.integers(48, 120), budget=st.booleans())
    def start(self, seed: int, pages: int, budget: bool) -> None:
        self.rng = random.Random(seed)
        self.pages, self.brake = pages, budget
        self.truth = Truth()
        self.clients: list[Client] = []
        self.peers: list[Peer] = []
        self.eager = 0.5
        self.verified: dict[tuple[int, int], TokenTree] = {}  # by session and committed length
        self.rig = self.new_rig()

    def new_rig(self) -> Rig:
        rig = build_rig(MODEL, pages=self.pages, context=48, chunk=6, max_running=4, brake=self.brake, wait_ms=0.1)
        rig.inbox._act = self.act
        plan = rig.loop._planner.plan

        def watched_plan() -> list[Work]:
            works = plan()
            for work in works:
                if work.match is not None:
                    self.verified[work.session.session_id, work.session.committed_len] = work.match.tree
            return works

        rig.loop._planner.plan = watched_plan
        return rig

    # ---- clients

    @rule(
        prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12),
        temperature=st.sampled_from([0.0, 1.0]),
        seed=st.integers(0, 99),
        stop=st.integers(0, VOCAB - 1),
    )
    def ask(self, prompt: list[int], temperature: float, seed: int, stop: int) -> None:
        if len(self.clients) < 12:
            stop_ids = (stop,) if seed % 2 else ()
            params = SamplingParams(
                temperature=temperature, seed=seed, max_tokens=30, min_tokens=4, stop_token_ids=stop_ids
            )
            output = MODEL.decode(prompt, params, seed=seed, stop_ids=stop_ids, max_len=48)
            self.truth.texts.append(prompt + output)
            (session,) = self.rig.submit(request(prompt, params))
            self.clients.append(Client(prompt, params, output, self.rig, session))

    @rule(which=st.integers(0, 11))
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
            if not self.rig.is_idle or not self.rig.inbox._queue.empty():
                self.rig.step()

    @rule()
    def restart(self) -> None:
        """Verify dies: streams and sessions go, and clients come again with what they have."""
        for peer in list(self.peers):
            self.lose(peer)
        self.verified.clear()
        self.rig = self.new_rig()
        for client in self.clients:
            if not client.cancelled and not client.has_finished:
                client.held, client.rig = client.received, self.rig
                (client.session,) = self.rig.submit(request(client.prompt, client.params, resumed=client.held))
        self.join()

    # ---- drafters

    @rule()
    def join(self) -> None:
        if len(self.peers) < 3:
            limits = verify_pb2.DrafterLimits(
                max_proposal_nodes=MAX_PROPOSAL_NODES,
                max_assumed_tokens=MAX_ASSUMED,
                max_proposals_per_session=MAX_KEPT,
                max_verify_nodes=MAX_NODES,
            )
            target = common_pb2.ModelInfo(vocab_size=VOCAB, context_length=48)
            sim = self.rig.join(name=str(self.rng.random()), reads=lambda: False)
            self.peers.append(
                Peer(sim, SessionTable(verify_pb2.Enlisted(limits=limits, target=target), max_sessions=3))
            )

    @rule(which=st.integers(0, 2))
    def stream_ends(self, which: int) -> None:
        if which < len(self.peers):
            self.lose(self.peers[which])

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

    def lose(self, peer: Peer) -> None:
        self.peers.remove(peer)
        self.rig.leave(peer.sim)

    def act(self) -> None:
        """What happens while the engine looks into its inbox."""
        for peer in self.peers:
            if self.rng.random() < self.eager:
                self.read(peer)
                self.hear(peer)

    def read(self, peer: Peer) -> None:
        frame = peer.sim.drafter.outbox.take()
        if frame is None:
            return
        changes = peer.table.apply([frame])
        assert peer.table.counters["replayed"] == 0
        for session in [*changes.opened, *(extension.session for extension in changes.extended)]:
            self.check_known(session)
            self.check_hint(peer, session)
        self.say_releases(peer, changes)
        proposals = [
            self.propose(peer, session) for session in peer.table.take_due() for _ in range(self.rng.randint(0, 3))
        ]
        if proposals:
            peer.said.append(proposals)

    def say_releases(self, peer: Peer, changes: Changes) -> None:
        if changes.releases:
            # Verify sends nothing that would make a drafter give up, but for want of room or by its own wish.
            reasons = {release.reason for release in changes.releases}
            assert reasons <= {verify_pb2.RELEASE_REASON_CAPACITY, verify_pb2.RELEASE_REASON_ERROR}
            peer.said.append(changes.releases)

    def propose(self, peer: Peer, session: Drafted) -> verify_pb2.Proposal:
        coming = self.truth.after(session.tokens.tolist(), 20)
        ahead = self.rng.choice([0, 0, 1, 2, 3])
        draft = random_draft(coming[ahead:], VOCAB, self.rng, peer.table.node_limit(session))
        assumed = coming[:ahead]
        if assumed and self.rng.random() < 0.3:
            assumed[-1] = self.rng.randrange(VOCAB)
        return peer.table.propose(
            session,
            np.array(draft.tokens, np.int32),
            np.array(draft.parents, np.int32),
            np.exp(-np.array(draft.scores or [0] * len(draft.tokens)) / 16.0),
            np.array(assumed, np.int32),
            np.zeros(len(draft.tokens), np.bool_),
            1,
        )

    def hear(self, peer: Peer) -> None:
        while peer.said:
            frame = peer.said.popleft()
            if isinstance(frame[0], verify_pb2.Release):
                self.rig.inbox.put(Released(peer.sim.drafter, frame))  # type: ignore[arg-type]
            else:
                self.rig.send(peer.sim, *frame)  # type: ignore[arg-type]

    # ---- what must hold

    def check_known(self, session: Drafted) -> None:
        """No token is lost, repeated or out of order on its way to a drafter."""
        tokens = session.tokens.tolist()
        assert any(text[: len(tokens)] == tokens for text in self.truth.texts)

    def check_hint(self, peer: Peer, session: Drafted) -> None:
        """From the hint the drafter knows which nodes of its proposal are verified, none other and none less."""
        seen = peer.table.in_verification(session)
        if seen is not None:
            tree = self.verified[session.session, len(session.tokens)]
            assert seen.tree.tokens.tolist() == tree.tokens.tolist()
            assert seen.tree.parents.tolist() == tree.parents.tolist()

    @invariant()
    def clients_have_the_beginning_of_their_answers(self) -> None:
        for client in self.clients:
            assert not client.rig.errors
            assert client.received == client.output[: len(client.received)]
            assert not client.has_finished or client.received == client.output

    def teardown(self) -> None:
        self.eager = 1.0
        self.rig.run() if not self.rig.is_idle or not self.rig.inbox._queue.empty() else None
        for client in self.clients:
            assert client.cancelled or client.has_finished
        self.rig.check_whole()
        for peer in self.peers:
            self.read(peer)
            assert len(peer.table) == 0


TestWire = Wire.TestCase
TestWire.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


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
