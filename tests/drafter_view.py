"""A drafter's view of the verify service that checks each rule of the wire: a state machine without sockets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from outrider.row_ring import RowReader
from outrider.tree import ROOT, TokenTree
from outrider.v1 import common_pb2, verify_pb2
from outrider.wire import INT31_MAX, pack_ids, unpack_ids

Key = tuple[int, int]


@dataclass
class Draft:
    """A tree that a policy wants to propose; parents None: one branch."""

    tokens: list[int]
    parents: list[int] | None = None
    assumed: list[int] = field(default_factory=list)
    scores: list[int] = field(default_factory=list)

    @property
    def tree(self) -> TokenTree:
        """The draft's nodes as a tree."""
        tokens = np.array(self.tokens, np.int32)
        return TokenTree.chain(tokens) if self.parents is None else TokenTree(tokens, np.array(self.parents, np.int32))


@dataclass
class Sent:
    """A proposal that went out."""

    base_len: int
    draft: Draft

    @property
    def tree_len(self) -> int:
        """Committed length at which its root is the newest token."""
        return self.base_len + len(self.draft.assumed)


@dataclass(eq=False)
class Seen:
    """One session as its drafter knows it."""

    session: int
    generation: int
    tokens: list[int]
    prompt_len: int
    remaining: int
    next_row_pos: int = 0
    announced: list[common_pb2.FeatureRows] = field(default_factory=list)
    sent: dict[int, Sent] = field(default_factory=dict)
    next: verify_pb2.Next = field(default_factory=verify_pb2.Next)
    node_budget: int | None = None
    steps: int = 0

    @property
    def key(self) -> Key:
        """(session, generation), which its messages carry."""
        return self.session, self.generation


Policy = Callable[[Seen], list[Draft]]


class View:
    """A drafter's sessions. `apply` asserts what verify promises about order, lengths, credits, hints and rows."""

    def __init__(self, *, needs_features: bool = False, max_sessions: int = INT31_MAX) -> None:
        self.sessions: dict[Key, Seen] = {}
        self.generations: dict[int, int] = defaultdict(int)
        self.closed: dict[Key, verify_pb2.CloseReason] = {}
        self.rejected: list[verify_pb2.Rejected] = []
        self.num_credits = self.num_accepted = self.num_rerooted = 0
        self.kinds: set[verify_pb2.NextKind] = set()
        self._needs_features = needs_features
        self.max_sessions = max_sessions
        self.ring: RowReader | None = None
        self.slot_seq_end = 0  # no slot before it is named any more
        self.num_shared = 0  # rows that came through it
        self._named_end = self._read_end = 0  # one past the numbers of its rows that were named, and in Rounds before

    def apply(self, frame: verify_pb2.Round) -> list[Seen]:
        """Takes a frame in; returns the sessions that are still open and of which it says something new."""
        told: dict[Key, Seen] = {}
        for opened in frame.opened:
            seen = self._open(opened)
            told[seen.key] = seen
        for chunk in frame.features:
            self._rows(self.sessions[chunk.session, chunk.generation], chunk.rows)
        for verdict in frame.verdicts:
            seen = self.sessions[verdict.session, verdict.generation]
            self._extend(seen, verdict)
            told[seen.key] = seen
        for closed in frame.closed:
            key = closed.session, closed.generation
            assert key not in self.closed
            self.closed[key] = closed.reason
            told.pop(key, None)
            seen = self.sessions.pop(key, None)
            assert seen is not None or closed.reason == verify_pb2.CLOSE_REASON_SLOW
        self.rejected += frame.rejected
        if frame.HasField("slot_seq_end"):
            assert self.ring is not None
            assert frame.slot_seq_end >= self.slot_seq_end
            self.slot_seq_end = frame.slot_seq_end
            self.ring.skip(frame.slot_seq_end)
        self._read_end = self._named_end
        return list(told.values())

    def propose(self, seen: Seen, draft: Draft) -> verify_pb2.Proposal:
        """The next proposal of a session."""
        proposal_id = len(seen.sent) + 1
        seen.sent[proposal_id] = Sent(len(seen.tokens), draft)
        return verify_pb2.Proposal(
            session=seen.session,
            generation=seen.generation,
            proposal_id=proposal_id,
            base_len=len(seen.tokens),
            assumed=pack_ids(draft.assumed),
            tokens=pack_ids(draft.tokens),
            parents=pack_ids(draft.tree.parents),
            scores=bytes(draft.scores),
            draft_us=1,
        )

    def _open(self, opened: verify_pb2.Opened) -> Seen:
        key = opened.session, opened.generation
        assert opened.generation > self.generations[opened.session]
        assert key not in self.sessions
        assert len(self.sessions) < self.max_sessions
        self.generations[opened.session] = opened.generation
        tokens = unpack_ids(opened.tokens, field="tokens").tolist()
        assert 1 <= opened.prompt_len <= len(tokens)
        assert opened.remaining_tokens >= 1
        self.sessions[key] = seen = Seen(*key, tokens, opened.prompt_len, opened.remaining_tokens)
        return seen

    def _extend(self, seen: Seen, verdict: verify_pb2.Verdict) -> None:
        assert verdict.base_len == len(seen.tokens)
        assert verdict.tokens
        assert verdict.steps >= 1
        seen.steps += verdict.steps
        seen.tokens += verdict.tokens
        seen.remaining -= len(verdict.tokens)
        assert seen.remaining >= 0
        seen.node_budget = verdict.node_budget if verdict.HasField("node_budget") else None
        for credit in verdict.credits:
            self._credit(seen, credit)
        is_last = verdict.next.kind == verify_pb2.NEXT_KIND_NONE and not verdict.HasField("features")
        if self._needs_features and not is_last:
            assert (verdict.features.first_pos, verdict.features.count) == (verdict.base_len - 1, len(verdict.tokens))
            self._rows(seen, verdict.features)
        self._hint(seen, verdict.next)

    def _credit(self, seen: Seen, credit: verify_pb2.Credit) -> None:
        """Asserts that the accepted nodes are a path below the root, with the committed tokens along it."""
        sent = seen.sent[credit.proposal_id]
        tree, node = sent.draft.tree, credit.root_node
        self._agrees(seen, sent, node)
        for accepted in credit.accepted_nodes:
            assert tree.parents[accepted] == node
            node = accepted
            self._agrees(seen, sent, node)
        assert len(credit.accepted_nodes) <= credit.nodes_verified <= len(tree.subtree(credit.root_node)[0])
        self.num_credits += 1
        self.num_accepted += len(credit.accepted_nodes)
        self.num_rerooted += credit.root_node != ROOT

    @staticmethod
    def _agrees(seen: Seen, sent: Sent, node: int) -> None:
        """Whether all that a proposal assumes, and its path to `node`, is committed."""
        path = sent.draft.assumed + [sent.draft.tokens[n] for n in sent.draft.tree.path(node)]
        assert seen.tokens[sent.base_len : sent.base_len + len(path)] == path

    def _hint(self, seen: Seen, following: verify_pb2.Next) -> None:
        self.kinds.add(following.kind)
        seen.next = following
        assert following.kind != verify_pb2.NEXT_KIND_UNSPECIFIED
        assert following.base_len == len(seen.tokens)
        if following.kind == verify_pb2.NEXT_KIND_PROPOSAL:
            sent = seen.sent[following.proposal_id]
            depth = len(sent.draft.tree.path(following.root_node))
            assert sent.tree_len + depth == following.base_len
            self._agrees(seen, sent, following.root_node)
            assert 1 <= following.nodes_kept <= len(sent.draft.tree.subtree(following.root_node)[0])

    def _rows(self, seen: Seen, rows: common_pb2.FeatureRows) -> None:
        """Asserts that each row comes once, in order, and holds its token and its position."""
        assert self._needs_features
        assert rows.first_pos == seen.next_row_pos
        seen.next_row_pos += rows.count
        assert seen.next_row_pos < len(seen.tokens)
        if rows.announced:
            seen.announced.append(rows)
        elif rows.WhichOneof("location") == "slot_seq":
            assert self.ring is not None
            assert rows.slot_seq >= max(self.slot_seq_end, self._read_end)  # else it was said to be read
            self._named_end = max(self._named_end, rows.slot_seq + rows.count)
            self.num_shared += rows.count
            found = self.ring.rows(rows.slot_seq, rows.count)
            shape = [rows.count, found.shape[1] // 4]
            tensor = common_pb2.Tensor(dtype=self.ring.dtype, shape=shape, data=found.tobytes())
            check_rows(seen.tokens, rows.first_pos, tensor)
        else:
            check_rows(seen.tokens, rows.first_pos, rows.rows)


def check_rows(tokens: Sequence[int], first_pos: int, tensor: common_pb2.Tensor) -> int:
    """Asserts that FakeRunner made these rows for these tokens; returns how many there are."""
    assert tensor.dtype == common_pb2.DTYPE_FLOAT32
    count, width = tensor.shape
    values = np.frombuffer(tensor.data, "<f4").reshape(count, width)
    assert values[:, 0].astype(int).tolist() == list(tokens[first_pos : first_pos + count])
    assert values[:, 1].astype(int).tolist() == list(range(first_pos, first_pos + count))
    return count
