"""The drafter's side of the session protocol: rounds in, state and releases out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from draft_service.drafters.base import Draft
from draft_service.framing import framed
from draft_service.session import Copied, Grown, Session
from draft_service.sessions import Changes, SessionTable
from outrider.row_ring import HEADER_BYTES, RowReader, RowRing
from outrider.tree import TokenTree
from outrider.v1 import common_pb2
from outrider.v1 import verify_pb2 as pb
from outrider.wire import pack_ids, pack_scores, unpack_ids

VOCAB = 100
NO_IDS = np.empty(0, np.int32)


def table(*, max_sessions: int = 8, **limits: int) -> SessionTable:
    bounds: dict[str, int] = {
        "max_proposal_nodes": 32, "max_assumed_tokens": 8, "max_proposals_per_session": 2, "max_verify_nodes": 16
    }  # fmt: skip
    enlisted = pb.Enlisted(
        boot_id="verify", target=common_pb2.ModelInfo(vocab_size=VOCAB, context_length=64),
        limits=pb.DrafterLimits(**(bounds | limits)),
    )  # fmt: skip
    return SessionTable(enlisted, max_sessions=max_sessions)


def opened(session: int = 1, generation: int = 1, tokens: list[int] | None = None, **more: Any) -> pb.Opened:
    tokens = [1, 2, 3] if tokens is None else tokens
    fields: dict[str, Any] = {"prompt_len": len(tokens), "remaining_tokens": 20, "remaining_context": 30} | more
    return pb.Opened(session=session, generation=generation, tokens=pack_ids(tokens), **fields)


def verdict(
    session: int = 1, generation: int = 1, base_len: int = 3, tokens: list[int] | None = None, **more: Any
) -> pb.Verdict:
    fields: dict[str, Any] = {"steps": 1, "tokens": [4] if tokens is None else tokens}
    return pb.Verdict(session=session, generation=generation, base_len=base_len, **(fields | more))


def open_one(sessions: SessionTable, **more: Any) -> Session:
    (session,) = sessions.apply([pb.Round(opened=[opened(**more)])]).opened
    return session


def send(
    sessions: SessionTable, session: Session, tree: TokenTree, scores: list[int] | None = None,
    assumed: list[int] | None = None,
) -> pb.Proposal:  # fmt: skip
    probabilities = np.exp(-np.array(scores if scores is not None else [0] * len(tree)) / 16.0)
    proposal = pb.Proposal()
    draft = Draft(tree.tokens, tree.parents, assumed=np.array(assumed or [], np.int32))
    sessions.propose(proposal, session, draft, pack_scores(probabilities), 5, keeps_memo=False)
    return proposal


def reasons(changes: Changes) -> list[tuple[int, int, int]]:
    return [(release.session, release.generation, release.reason) for release in changes.releases]


def test_the_order_within_a_round() -> None:
    sessions = table()
    rows = pb.SessionFeatures(session=1, generation=1, rows=common_pb2.FeatureRows(first_pos=0, count=3))
    changes = sessions.apply([
        pb.Round(
            opened=[opened()], features=[rows], verdicts=[verdict(tokens=[4, 5])],
            closed=[pb.Closed(session=1, generation=1)],
            rejected=[pb.Rejected(session=1, generation=1, proposal_id=1, reason=pb.REJECT_REASON_STALE)],
        )
    ])  # fmt: skip
    (session,) = changes.opened
    assert changes.features == [(session, rows.rows)]
    assert [(e.session, e.base_len) for e in changes.extended] == [(session, 3)]
    assert changes.closed == [session]
    assert session.tokens.tolist() == [1, 2, 3, 4, 5]
    assert len(sessions) == 0
    assert sessions.take_due() == []
    assert sessions.counters["rejected_stale"] == 1


def test_an_opened_session_has_all_that_was_said() -> None:
    session = open_one(
        table(), tokens=[1, 2, 3, 4], prompt_len=3, remaining_tokens=9, remaining_context=7, corpus_scope="tenant",
        prediction_tokens=pack_ids([7, 8]),
        speculative=common_pb2.SpeculativeParams(num_steps=3, topk=2, num_draft_tokens=5),
    )  # fmt: skip
    assert session.tokens.tolist() == [1, 2, 3, 4]
    assert (session.prompt_len, session.remaining, session.corpus_scope) == (3, 7, "tenant")
    assert session.prediction.tolist() == [7, 8]
    assert (session.wishes.num_steps, session.wishes.topk, session.wishes.num_draft_tokens) == (3, 2, 5)
    assert session.max_depth() == 3
    assert session.max_depth(5) == 1
    assert session.max_depth(7) == 0


def test_a_late_session_is_due_at_once_and_views_of_its_tokens_stay() -> None:
    sessions = table()
    session = open_one(sessions, tokens=[1, 2, 3, 4], prompt_len=3)
    assert sessions.take_due() == [session]
    before = session.tokens
    for base_len in range(4, 20):
        sessions.apply([pb.Round(verdicts=[verdict(base_len=base_len, tokens=[base_len])])])
    assert before.tolist() == [1, 2, 3, 4]
    assert session.tokens.tolist() == [1, 2, 3, 4, *range(4, 20)]
    assert session.remaining == 4


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"tokens": [1, 2, 100]}, "99"),
        ({"tokens": [1, -1]}, "-1"),
        ({"tokens": []}, "prompt_len"),
        ({"prompt_len": 0}, "prompt_len"),
        ({"prompt_len": 4}, "prompt_len"),
        ({"generation": 0}, "generation"),
        ({"tokens": [1] * 65}, "context"),
        ({"prediction_tokens": b"abc"}, "prediction_tokens"),
        ({"prediction_tokens": pack_ids([100])}, "prediction_tokens"),
    ],
)
def test_a_nonsensical_session_is_released(fields: dict[str, Any], word: str) -> None:
    sessions = table()
    changes = sessions.apply([pb.Round(opened=[opened(**fields)])])
    assert [release.reason for release in changes.releases] == [pb.RELEASE_REASON_OUT_OF_SYNC]
    assert word in changes.releases[0].detail
    assert len(sessions) == 0


def test_broken_bytes_are_released() -> None:
    sessions = table()
    changes = sessions.apply([pb.Round(opened=[pb.Opened(session=1, generation=1, tokens=b"\0\0\0", prompt_len=1)])])
    assert reasons(changes) == [(1, 1, pb.RELEASE_REASON_OUT_OF_SYNC)]


def test_capacity_and_draining_release_what_is_opened() -> None:
    sessions = table(max_sessions=1)
    open_one(sessions)
    changes = sessions.apply([pb.Round(opened=[opened(session=2)])])
    assert reasons(changes) == [(2, 1, pb.RELEASE_REASON_CAPACITY)]
    sessions.draining = True
    changes = sessions.apply([pb.Round(opened=[opened(session=3)])])
    assert reasons(changes) == [(3, 1, pb.RELEASE_REASON_DRAINING)]
    assert reasons(sessions.release_all(pb.RELEASE_REASON_DRAINING, "bye")) == [(1, 1, pb.RELEASE_REASON_DRAINING)]
    assert len(sessions) == 0


def test_a_newer_generation_takes_the_session_over_and_an_older_one_is_dropped() -> None:
    sessions = table()
    first = open_one(sessions)
    changes = sessions.apply([pb.Round(opened=[opened(generation=2, tokens=[5, 6])])])
    assert changes.closed == [first]
    (second,) = changes.opened
    assert second.uid != first.uid
    changes = sessions.apply([pb.Round(opened=[opened(generation=1), opened(generation=2)])])
    assert changes == Changes()
    sessions.apply([pb.Round(verdicts=[verdict(generation=1)], closed=[pb.Closed(session=1, generation=1)])])
    assert second.tokens.tolist() == [5, 6]


@pytest.mark.parametrize("wrong", [{"base_len": 2}, {"base_len": 4}, {"tokens": [100]}, {"tokens": [2**32 - 1]}])
def test_a_verdict_that_does_not_fit_releases_the_session(wrong: dict[str, Any]) -> None:
    sessions = table()
    session = open_one(sessions)
    changes = sessions.apply([pb.Round(verdicts=[verdict(**wrong)])])
    assert reasons(changes) == [(1, 1, pb.RELEASE_REASON_OUT_OF_SYNC)]
    assert changes.closed == [session]
    assert sessions.take_due() == []
    changes = sessions.apply([pb.Round(verdicts=[verdict()])])
    assert changes == Changes()


def test_coalesced_verdicts_commit_all_tokens_and_credits() -> None:
    sessions = table()
    session = open_one(sessions)
    credits = [
        pb.Credit(proposal_id=1, root_node=-1, nodes_verified=4, accepted_nodes=[0, 2]),
        pb.Credit(proposal_id=2, root_node=-1, nodes_verified=3, accepted_nodes=[1]),
    ]
    sessions.apply([pb.Round(verdicts=[verdict(tokens=[4, 5, 6, 7, 8], steps=3, credits=credits)])])
    assert session.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert sessions.counters["nodes_verified"] == 7
    assert sessions.counters["nodes_accepted"] == 3
    assert sessions.counters["tokens_committed"] == 5


def test_a_budget_of_zero_is_silence_until_the_next_verdict() -> None:
    sessions = table()
    session = open_one(sessions)
    sessions.take_due()
    sessions.apply([pb.Round(verdicts=[verdict(node_budget=0)])])
    assert sessions.take_due() == []
    sessions.apply([pb.Round(verdicts=[verdict(base_len=4, tokens=[5], node_budget=3)])])
    assert sessions.take_due() == [session]
    assert sessions.node_limit(session) == 3
    sessions.apply([pb.Round(verdicts=[verdict(base_len=5, tokens=[6])])])
    assert sessions.node_limit(session) == 16


def test_node_limits_are_the_least_of_all() -> None:
    assert table(max_verify_nodes=0).node_limit(open_one(table())) == 32
    assert table(max_proposal_nodes=5).node_limit(open_one(table())) == 5
    wish = common_pb2.SpeculativeParams(num_draft_tokens=4)
    assert table().node_limit(open_one(table(), speculative=wish)) == 3


def test_proposal_ids_grow_and_the_oldest_are_forgotten() -> None:
    sessions = table()
    session = open_one(sessions)
    sent = [send(sessions, session, TokenTree.chain(np.array([7, 8], np.int32))) for _ in range(5)]
    assert [proposal.proposal_id for proposal in sent] == [1, 2, 3, 4, 5]
    assert sorted(session.sent) == [3, 4, 5]
    first = sent[0]
    assert (first.session, first.generation, first.base_len, first.draft_us) == (1, 1, 3, 5)
    assert unpack_ids(first.tokens, field="t").tolist() == [7, 8]
    assert unpack_ids(first.parents, field="p").tolist() == [-1, 0]
    assert first.scores == b"\0\0"
    assert first.from_prediction == b""
    sessions.apply([pb.Round(rejected=[pb.Rejected(session=1, generation=1, proposal_id=4, reason=99)])])  # type: ignore[arg-type]
    assert sorted(session.sent) == [3, 5]
    assert sessions.counters["rejected_unknown"] == 1


def test_prediction_bits_are_packed_least_significant_first() -> None:
    sessions = table()
    session = open_one(sessions)
    bits = np.zeros(9, np.bool_)
    bits[[0, 2, 8]] = True
    tree = TokenTree.chain(np.arange(9, dtype=np.int32))
    proposal = pb.Proposal()
    draft = Draft(tree.tokens, tree.parents, from_prediction=bits)
    sessions.propose(proposal, session, draft, bytes(9), 0, keeps_memo=False)
    assert proposal.from_prediction == b"\x05\x01"


def test_the_tree_in_verification_is_what_next_names() -> None:
    sessions = table()
    session = open_one(sessions)
    #  -1 -> 0:10 (s 0) -> 1:20 (s 16), 2:21 (s 4) ; 1 -> 3:30 (s 18) ; 2 -> 4:31 (s 6)
    tree = TokenTree(np.array([10, 20, 21, 30, 31], np.int32), np.array([-1, 0, 0, 1, 2], np.int32))
    sent = send(sessions, session, tree, [0, 16, 4, 18, 6])
    following = pb.Next(kind=pb.NEXT_KIND_PROPOSAL, base_len=4, proposal_id=sent.proposal_id, root_node=0, nodes_kept=3)
    sessions.apply([pb.Round(verdicts=[verdict(tokens=[10], next=following)])])
    verifying = sessions.in_verification(session)
    assert verifying is not None
    assert verifying.tree.tokens.tolist() == [20, 21, 31]
    assert verifying.tree.parents.tolist() == [-1, -1, 1]
    assert verifying.probabilities.tolist() == pytest.approx(np.exp([-1, -4 / 16, -6 / 16]).tolist())


def test_what_is_deeper_than_the_answer_can_go_is_not_in_verification() -> None:
    sessions = table()
    session = open_one(sessions, remaining_tokens=4)
    tree = TokenTree(np.array([4, 5, 2, 1], np.int32), np.array([-1, 0, 1, -1], np.int32))
    sent = send(sessions, session, tree)
    following = pb.Next(
        kind=pb.NEXT_KIND_PROPOSAL, base_len=4, proposal_id=sent.proposal_id, root_node=-1, nodes_kept=3
    )
    sessions.apply([pb.Round(verdicts=[verdict(tokens=[7], next=following)])])
    verifying = sessions.in_verification(session)
    assert verifying is not None
    assert verifying.tree.tokens.tolist() == [4, 5, 1]  # of three tokens that are left the last is the bonus


@pytest.mark.parametrize(
    "wrong", [{"proposal_id": 9}, {"base_len": 3}, {"root_node": 5}, {"root_node": -2}, {"kind": pb.NEXT_KIND_WAITING}]
)
def test_nothing_is_in_verification_when_next_does_not_fit(wrong: dict[str, Any]) -> None:
    sessions = table()
    session = open_one(sessions)
    send(sessions, session, TokenTree.chain(np.array([10, 20], np.int32)))
    fields = {"kind": pb.NEXT_KIND_PROPOSAL, "base_len": 4, "proposal_id": 1, "root_node": 0, "nodes_kept": 3}
    sessions.apply([pb.Round(verdicts=[verdict(tokens=[10], next=pb.Next(**(fields | wrong)))])])
    assert sessions.in_verification(session) is None


@pytest.mark.parametrize(("assumed", "kind", "coming"), [
    ([4, 5], pb.NEXT_KIND_WAITING, True),
    ([4, 6], pb.NEXT_KIND_WAITING, False),
    ([4], pb.NEXT_KIND_WAITING, False),
    ([4, 5], pb.NEXT_KIND_PLAIN, False),
])  # fmt: skip
def test_an_early_proposal_on_its_way_is_what_a_waiting_verify_takes(
    assumed: list[int], kind: pb.NextKind, coming: bool
) -> None:
    sessions = table()
    session = open_one(sessions)
    send(sessions, session, TokenTree.chain(np.array([10, 20], np.int32)), [0, 16], assumed)
    sessions.apply([pb.Round(verdicts=[verdict(tokens=[4, 5], next=pb.Next(kind=kind, base_len=5))])])
    assert sessions.has_tree(session) is coming
    verifying = sessions.in_verification(session)
    assert (verifying is not None) is coming
    if verifying is not None:
        assert verifying.tree.tokens.tolist() == [10, 20]
        assert verifying.probabilities.tolist() == pytest.approx(np.exp([0, -1]).tolist())


def test_what_a_draft_model_keeps_for_a_tree_is_held_as_long_as_the_tree_can_be_verified() -> None:
    sessions = table()
    session = open_one(sessions)
    tokens, chain, fan = np.array([7, 8], np.int32), np.array([-1, 0], np.int32), np.array([-1, -1], np.int32)
    for draft in (
        Draft(tokens, chain, assumed=np.array([6], np.int32), memo="early"),
        Draft(tokens, fan, memo="flat", grown=Grown(topk=2, num_steps=1)),
        Draft(tokens, chain, memo=Copied(3)),
    ):
        sessions.propose(pb.Proposal(), session, draft, bytes(2), 0, keeps_memo=True)
    held: list[list[object]] = []
    for base_len in range(3, 6):
        held.append([sent.memo for sent in session.sent.values()])
        sessions.apply([pb.Round(verdicts=[verdict(base_len=base_len, node_budget=0)])])
    held.append([sent.memo for sent in session.sent.values()])
    assert held == [["early", "flat", (3,)], ["early", None, (3,)], ["early", None, (3,)], [None, None, (3,)]]


def test_a_prefix_is_shared_only_with_a_session_that_is_open() -> None:
    sessions = table()
    changes = sessions.apply([
        pb.Round(opened=[opened(1), opened(2, shares_prefix_with=1), opened(3, shares_prefix_with=9)])
    ])  # fmt: skip
    assert [session.shares_prefix for session in changes.opened] == [False, True, False]


class SessionsMachine(RuleBasedStateMachine):
    """A verify service that mostly tells the truth; the table must agree with it or have released the session."""

    @initialize(max_sessions=st.integers(1, 4))
    def start(self, max_sessions: int) -> None:
        self.max_sessions = max_sessions
        self.table = table(max_sessions=max_sessions)
        self.known: dict[int, tuple[int, list[int], int]] = {}  # session -> generation, tokens, remaining
        self.generations: dict[int, int] = {}
        self.silent: set[int] = set()
        self.due: set[int] = set()
        self.proposals: dict[tuple[int, int], int] = {}
        self.waiting: list[pb.Round] = []
        self.expected_releases: list[tuple[int, int, int]] = []

    @rule(session=st.integers(1, 5), text=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6))
    def open(self, session: int, text: list[int]) -> None:
        generation = self.generations[session] = self.generations.get(session, 0) + 1
        self.waiting.append(pb.Round(opened=[opened(session, generation, text)]))
        self._forget(session)
        if len(self.known) >= self.max_sessions:
            self.expected_releases.append((session, generation, pb.RELEASE_REASON_CAPACITY))
            return
        self.known[session] = (generation, list(text), 20)
        self.due.add(session)

    @precondition(lambda self: self.known)
    @rule(
        data=st.data(), tokens=st.lists(st.integers(0, VOCAB - 1), max_size=5),
        off=st.sampled_from([0, 0, 0, 0, -1, 1]), budget=st.sampled_from([None, 0, 5]), steps=st.integers(1, 3),
    )  # fmt: skip
    def commit(self, data: st.DataObject, tokens: list[int], off: int, budget: int | None, steps: int) -> None:
        session = data.draw(st.sampled_from(sorted(self.known)))
        generation, text, remaining = self.known[session]
        message = verdict(session, generation, len(text) + off, tokens, steps=steps)
        if budget is not None:
            message.node_budget = budget
        self.waiting.append(pb.Round(verdicts=[message]))
        if off:
            self.expected_releases.append((session, generation, pb.RELEASE_REASON_OUT_OF_SYNC))
            self._forget(session)
            return
        self.known[session] = (generation, text + tokens, max(0, remaining - len(tokens)))
        (self.silent.add if budget == 0 else self.silent.discard)(session)
        self.due.add(session)

    @rule(session=st.integers(1, 5), generation=st.integers(0, 3), kind=st.sampled_from(["verdicts", "closed"]))
    def say_something_foreign(self, session: int, generation: int, kind: str) -> None:
        if session in self.known and self.known[session][0] == generation:
            return
        if kind == "verdicts":
            self.waiting.append(pb.Round(verdicts=[verdict(session, generation)]))
        else:
            self.waiting.append(pb.Round(closed=[pb.Closed(session=session, generation=generation)]))

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(sorted(self.known)))
        self.waiting.append(pb.Round(closed=[pb.Closed(session=session, generation=self.known[session][0])]))
        self._forget(session)

    @rule()
    def deliver(self) -> None:
        """The drafter reads all that waits, however much that is."""
        changes = self.table.apply(self.waiting)
        self.waiting = []
        assert reasons(changes) == self.expected_releases
        self.expected_releases = []
        assert {session: self._view(session) for session in self.known} == self.known
        assert len(self.table) == len(self.known)
        still_open = [s for s in changes.opened if s not in changes.closed]
        assert all(self.table.get(*session.key) is session for session in still_open)
        due = self.table.take_due()
        assert sorted(session.session_id for session in due) == sorted(self.due - self.silent)
        self.due.clear()
        for session in due:
            proposal = send(self.table, session, TokenTree.empty())
            assert proposal.proposal_id == self.proposals.get(session.key, 0) + 1
            assert proposal.base_len == len(self.known[proposal.session][1])
            self.proposals[session.key] = proposal.proposal_id

    @invariant()
    def bounded(self) -> None:
        if hasattr(self, "table"):
            assert len(self.table) <= self.max_sessions

    def _view(self, session: int) -> tuple[int, list[int], int] | None:
        found = self.table.get(session, self.known[session][0])
        return None if found is None else (found.generation, found.tokens.tolist(), found.remaining)

    def _forget(self, session: int) -> None:
        self.known.pop(session, None)
        self.due.discard(session)
        self.silent.discard(session)


TestSessionsMachine = SessionsMachine.TestCase
TestSessionsMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_slots_that_no_message_names_are_consumed_once_the_rows_that_came_with_that_were_taken() -> None:
    ring = RowRing(4, 8)
    reader = RowReader(ring.name, num_slots=8, slot_bytes=4, header_bytes=HEADER_BYTES, dtype=common_pb2.DTYPE_FLOAT32)
    ring.prove(reader.nonce)
    sessions = SessionTable(pb.Enlisted(), max_sessions=1, ring=reader)
    sessions.apply([pb.Round(opened=[opened()], slot_seq_end=5), pb.Round()])
    said = pb.SpeculateRequest(proposals=pb.Proposals(proposals=[pb.Proposal()]))
    assert not framed(sessions, [], said)[0].proposals.HasField("consumed_slot_seq")
    sessions.rows_were_taken()
    assert framed(sessions, [], said)[0].proposals.consumed_slot_seq == 4
    reader.rows(6, 1)
    sessions.rows_were_taken()
    assert framed(sessions, [], said)[0].proposals.consumed_slot_seq == 6
