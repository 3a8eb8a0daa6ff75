"""What one verify service has told this drafter about its sessions: a state machine without sockets.

Everything is keyed by (session, generation). A Round is applied in the order opened, features, verdicts, closed,
rejected; what does not fit is dropped, and a session whose length differs is released, never guessed at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from draft_service.news import News
from draft_service.session import Copied, Extension, Sent, Session
from outrider.errors import InvalidArgument
from outrider.row_ring import RowReader
from outrider.tree import ROOT, TokenTree
from outrider.v1 import common_pb2, verify_pb2
from outrider.wire import INT31_MAX, MAX_DETAIL_CHARS, Ids, check_token_ids, pack_ids

if TYPE_CHECKING:  # it imports this module
    from draft_service.drafters.base import Draft

_REASONS = {number: name.removeprefix("REJECT_REASON_").lower() for name, number in verify_pb2.RejectReason.items()}
_uids = count(1)


@dataclass(slots=True)
class Changes:
    """What rounds changed, for the drafter and the stream; each list in order of arrival."""

    opened: list[Session] = field(default_factory=list)
    features: list[tuple[Session, common_pb2.FeatureRows]] = field(default_factory=list)
    extended: list[Extension] = field(default_factory=list)
    closed: list[Session] = field(default_factory=list)  # by verify, or released to it
    releases: list[verify_pb2.Release] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class InVerification:
    """A tree that the step now starting verifies, and the path probabilities of its nodes, float64 [n].

    memo: what came with the draft that it is of; nodes: int32 [n], the nodes' indices in that draft; root: its root's.
    """

    session: Session
    tree: TokenTree
    probabilities: NDArray[np.float64]
    memo: object = None
    nodes: Ids = field(default_factory=lambda: np.empty(0, np.int32))
    root: int = ROOT

    @classmethod
    def whole(
        cls, session: Session, tree: TokenTree, probabilities: NDArray[np.float64], memo: object
    ) -> InVerification:
        """The whole tree of a draft, in verification."""
        return cls(session, tree, probabilities, memo, np.arange(len(tree), dtype=np.int32))


class SessionTable:
    """All sessions of one stream. Counters: rejections by reason, credits' sums."""

    def __init__(
        self, enlisted: verify_pb2.Enlisted, *, max_sessions: int, counters: Counter[str] | None = None,
        ring: RowReader | None = None,
    ) -> None:  # fmt: skip
        limits = enlisted.limits
        self.ring = ring
        self._slot_seq_end = 0  # rows before it are named in rounds that were applied, or never
        self.target = enlisted.target
        self.max_sessions = max_sessions
        self.max_assumed = limits.max_assumed_tokens
        self.draining = False
        self.news = News()
        self.counters: Counter[str] = Counter() if counters is None else counters
        self._max_nodes = min(limits.max_proposal_nodes or INT31_MAX, limits.max_verify_nodes or INT31_MAX)
        self._max_kept = limits.max_proposals_per_session + 1
        self._sessions: dict[int, Session] = {}
        self._due: dict[int, Session] = {}  # told of something since their last proposal

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, session: Session) -> bool:
        return self._sessions.get(session.session_id) is session

    def get(self, session: int, generation: int) -> Session | None:
        """The open session of that key."""
        found = self._sessions.get(session)
        return found if found is not None and found.generation == generation else None

    def apply(self, rounds: Sequence[verify_pb2.Round]) -> Changes:
        """Takes rounds in, oldest first."""
        self.news.taken(rounds)
        changes = Changes()
        for round in rounds:
            for opened in round.opened:
                self._open(opened, changes)
            for rows in round.features:
                session = self.get(rows.session, rows.generation)
                if session is not None:
                    changes.features.append((session, rows.rows))
                    # Rows that come late may be what a tree waited for.
                    if not rows.rows.announced and len(session.tokens) > session.prompt_len:
                        self._due[session.uid] = session
            for verdict in round.verdicts:
                self._extend(verdict, changes)
            for closed in round.closed:
                session = self.get(closed.session, closed.generation)
                if session is not None:
                    self._forget(session, changes)
            for rejected in round.rejected:
                self._reject(rejected)
            self._slot_seq_end = max(self._slot_seq_end, round.slot_seq_end)
        return changes

    def rows_were_taken(self) -> None:
        """Whatever rows the rounds applied so far have named were copied, or are of no use."""
        if self.ring is not None and self._slot_seq_end:
            self.ring.skip(self._slot_seq_end)
            self._slot_seq_end = 0

    def release(self, session: Session, reason: verify_pb2.ReleaseReason, detail: str, changes: Changes) -> None:
        """Gives an open session up."""
        self._refuse(session.session_id, session.generation, reason, detail, changes)
        self._forget(session, changes)

    def release_all(self, reason: verify_pb2.ReleaseReason, detail: str) -> Changes:
        """Gives every session up."""
        changes = Changes()
        for session in list(self._sessions.values()):
            self.release(session, reason, detail, changes)
        return changes

    def take_due(self) -> list[Session]:
        """Sessions that were told of something since the last call and may be drafted for."""
        due = [session for session in self._due.values() if self.node_limit(session) > 0]
        self._due.clear()
        return due

    def node_limit(self, session: Session) -> int:
        """Most nodes of its next proposal; 0: stay silent."""
        budget = INT31_MAX if session.node_budget is None else session.node_budget
        return min(budget, self._max_nodes, (session.wishes.num_draft_tokens or INT31_MAX) - 1)

    def has_tree(self, session: Session) -> bool:
        """Whether verify has a tree for the step now starting, or one that it waits for is on its way.

        One more at this length would come too late, or be drafted twice.
        """
        following = session.following
        return following.base_len == len(session.tokens) and (
            following.kind == verify_pb2.NEXT_KIND_PROPOSAL or self._on_its_way(session) is not None
        )

    def in_verification(self, session: Session) -> InVerification | None:
        """The tree that the step now starting verifies, as far as it is still known here.

        It is what `next` of the session's last verdict names, or the one on its way that it waits for.
        """
        following = session.following
        if following.base_len != len(session.tokens):
            return None
        coming = self._on_its_way(session)
        if coming is not None:
            return InVerification.whole(session, coming.tree, np.exp(coming.raised_scores / -16.0), coming.memo)
        sent = session.sent.get(following.proposal_id)
        if (
            following.kind != verify_pb2.NEXT_KIND_PROPOSAL
            or sent is None
            or not -1 <= following.root_node < len(sent.tokens)
        ):
            return None
        below, nodes = sent.tree.subtree(following.root_node)
        scores = sent.raised_scores
        tree, kept = below.trimmed(scores[nodes], following.nodes_kept, session.remaining - 1)  # the last is the bonus
        above = float(scores[following.root_node]) if following.root_node >= 0 else 0.0
        probabilities = np.exp((above - scores[nodes[kept]]) / 16.0)
        return InVerification(session, tree, probabilities, sent.memo, nodes[kept], following.root_node)

    def _on_its_way(self, session: Session) -> Sent | None:
        """The early proposal that has come true, where verify waits: it did not have it when it said so."""
        tokens = session.tokens
        if session.hoped_len < len(tokens) or session.following.kind != verify_pb2.NEXT_KIND_WAITING:
            return None
        for sent in reversed(session.sent.values()):
            if not len(sent.assumed):
                continue
            hopes = sent.base_len + len(sent.assumed) == len(tokens) and len(sent.tokens) > 0
            if hopes and np.array_equal(tokens[sent.base_len :], sent.assumed):
                return sent
        return None

    def propose(
        self, proposal: verify_pb2.Proposal, session: Session, draft: Draft, scores: bytes, draft_us: int, *,
        keeps_memo: bool,
    ) -> None:  # fmt: skip
        """Writes the next proposal of an open session: its id is drawn, and it is remembered as sent. scores: packed.

        proposal: empty, where it goes out from: a copy takes as long as all of this.
        """
        tokens, parents, assumed, from_prediction = draft.tokens, draft.parents, draft.assumed, draft.from_prediction
        memo = draft.memo if keeps_memo else None
        session.last_proposal_id = number = session.last_proposal_id + 1
        base_len, sent = len(session.tokens), session.sent
        sent[number] = Sent(number, base_len, assumed, tokens, parents, scores, memo, draft.grown)
        while len(sent) > self._max_kept:
            del sent[next(iter(sent))]
        proposal.session, proposal.generation = session.session_id, session.generation
        proposal.proposal_id, proposal.base_len, proposal.draft_us = number, base_len, draft_us
        proposal.tokens, proposal.parents, proposal.scores = pack_ids(tokens), pack_ids(parents), scores
        if len(assumed):
            proposal.assumed = pack_ids(assumed)
            session.hoped_len = max(session.hoped_len, base_len + len(assumed))
        if len(from_prediction) and from_prediction.any():
            proposal.from_prediction = np.packbits(from_prediction, bitorder="little").tobytes()

    def _open(self, opened: verify_pb2.Opened, changes: Changes) -> None:
        present = self._sessions.get(opened.session)
        if present is not None and opened.generation <= present.generation:
            return  # said again
        if present is not None:
            self._forget(present, changes)
        try:
            session = Session.from_opened(
                opened, uid=next(_uids), vocabulary=self.target.vocab_fingerprint,
                vocab_size=self.target.vocab_size, context_length=self.target.context_length,
            )  # fmt: skip
        except InvalidArgument as error:
            self._refuse(
                opened.session, opened.generation, verify_pb2.RELEASE_REASON_OUT_OF_SYNC, error.message, changes
            )
            return
        if self.draining or len(self._sessions) >= self.max_sessions:
            reason = verify_pb2.RELEASE_REASON_DRAINING if self.draining else verify_pb2.RELEASE_REASON_CAPACITY
            self._refuse(*session.key, reason, f"{len(self._sessions)} of {self.max_sessions} sessions", changes)
            return
        session.shares_prefix = opened.HasField("shares_prefix_with") and opened.shares_prefix_with in self._sessions
        session.ring = self.ring
        self._sessions[session.session_id] = session
        self._due[session.uid] = session
        changes.opened.append(session)

    def _extend(self, verdict: verify_pb2.Verdict, changes: Changes) -> None:
        session = self.get(verdict.session, verdict.generation)
        if session is None:
            return
        base_len = len(session.tokens)
        try:
            if verdict.base_len != base_len:
                raise InvalidArgument(f"a verdict's base_len is {verdict.base_len}; {base_len} tokens are known here")
            tokens = verdict.tokens[:]
            if max(tokens, default=0) >= session.vocab_size:
                check_token_ids(np.array(tokens), vocab_size=session.vocab_size, field="verdict.tokens")
        except InvalidArgument as error:
            self.release(session, verify_pb2.RELEASE_REASON_OUT_OF_SYNC, error.message, changes)
            return
        session.commit(tokens)
        session.node_budget = verdict.node_budget if verdict.HasField("node_budget") else None
        session.following.CopyFrom(verdict.next)  # the message itself would keep its whole frame alive
        copied = False
        for credit in verdict.credits:
            sent = session.sent.get(credit.proposal_id)
            copied = copied or (sent is not None and isinstance(sent.memo, Copied))
            self.counters["nodes_verified"] += credit.nodes_verified
            self.counters["nodes_accepted"] += len(credit.accepted_nodes)
        self.counters["tokens_committed"] += len(tokens)
        self._due[session.uid] = session
        changes.extended.append(Extension(session, base_len, verdict, copied))

    def _reject(self, rejected: verify_pb2.Rejected) -> None:
        self.counters[f"rejected_{_REASONS.get(rejected.reason, 'unknown')}"] += 1
        session = self.get(rejected.session, rejected.generation)
        if session is not None:
            session.sent.pop(rejected.proposal_id, None)

    def _refuse(
        self, session: int, generation: int, reason: verify_pb2.ReleaseReason, detail: str, changes: Changes
    ) -> None:
        changes.releases.append(
            verify_pb2.Release(session=session, generation=generation, reason=reason, detail=detail[:MAX_DETAIL_CHARS])
        )

    def _forget(self, session: Session, changes: Changes) -> None:
        del self._sessions[session.session_id]
        self._due.pop(session.uid, None)
        changes.closed.append(session)
