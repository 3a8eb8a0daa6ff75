"""Drafters to test against: what one sees of the verify service, each rule of the wire checked, and ways to draft.

A view is a drafter's state machine without sockets; FakeDrafter puts one behind a real stream.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import grpc.aio
import numpy as np

from outrider.tree import ROOT, TokenTree
from outrider.v1 import common_pb2, verify_pb2, verify_pb2_grpc
from outrider.wire import WIRE_VERSION, pack_ids, unpack_ids

Key = tuple[int, int]


@dataclass
class Draft:
    """What a policy wants to propose; parents None: one branch."""

    tokens: list[int]
    parents: list[int] | None = None
    assumed: list[int] = field(default_factory=list)
    scores: list[int] = field(default_factory=list)

    @property
    def tree(self) -> TokenTree:
        """The nodes."""
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
        """What its messages carry."""
        return self.session, self.generation


Policy = Callable[[Seen], list[Draft]]


class View:
    """A drafter's sessions. `apply` asserts what verify promises about order, lengths, credits, hints and rows."""

    def __init__(self, *, needs_features: bool = False) -> None:
        self.sessions: dict[Key, Seen] = {}
        self.generations: dict[int, int] = defaultdict(int)
        self.closed: dict[Key, verify_pb2.CloseReason] = {}
        self.rejected: list[verify_pb2.Rejected] = []
        self.num_credits = self.num_accepted = self.num_rerooted = 0
        self.kinds: set[verify_pb2.NextKind] = set()
        self._needs_features = needs_features

    def apply(self, frame: verify_pb2.Round) -> list[Seen]:
        """Takes a frame in; returns the sessions that it said something new of and that are still open."""
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
        self.generations[opened.session] = opened.generation
        tokens = unpack_ids(opened.tokens, field="tokens").tolist()
        assert 1 <= opened.prompt_len <= len(tokens)
        assert opened.features_from_pos == 0
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
        """What was accepted is a path of the proposal below its root, and what is committed along it."""
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
        """All that a proposal assumes, and its path to `node`, is committed."""
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
        """Each row once, in order; it holds its token and its position."""
        assert self._needs_features
        assert rows.first_pos == seen.next_row_pos
        seen.next_row_pos += rows.count
        assert seen.next_row_pos < len(seen.tokens)
        if rows.announced:
            seen.announced.append(rows)
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


# ---- Ways to draft


@dataclass
class Truth:
    """Whole outputs that are known beforehand; what a perfect drafter drafts from."""

    texts: list[list[int]] = field(default_factory=list)

    def after(self, tokens: Sequence[int], count: int) -> list[int]:
        """Up to `count` tokens that will follow; empty where nothing is known."""
        for text in self.texts:
            if text[: len(tokens)] == list(tokens):
                return text[len(tokens) : len(tokens) + count]
        return []


def silent(seen: Seen) -> list[Draft]:
    """Never proposes."""
    return []


def declining(seen: Seen) -> list[Draft]:
    """Says that it has nothing."""
    return [Draft([])]


def perfect(truth: Truth, depth: int = 4) -> Policy:
    """One branch with what will come."""

    def policy(seen: Seen) -> list[Draft]:
        tokens = truth.after(seen.tokens, min(depth, seen.remaining))
        return [Draft(tokens)] if tokens else []

    return policy


def wrong(truth: Truth, vocab_size: int, depth: int = 4) -> Policy:
    """One branch that misses at its first token."""

    def policy(seen: Seen) -> list[Draft]:
        return [Draft([(token + 1) % vocab_size for token in truth.after(seen.tokens, depth)])]

    return policy


def random_trees(truth: Truth, vocab_size: int, rng: random.Random, nodes: int = 12) -> Policy:
    """Trees of any shape that hold some of what will come, with scores of any size or none."""

    def policy(seen: Seen) -> list[Draft]:
        return [random_draft(truth.after(seen.tokens, nodes), vocab_size, rng, nodes)]

    return policy


def random_draft(coming: list[int], vocab_size: int, rng: random.Random, max_nodes: int) -> Draft:
    """A tree below the token before `coming`."""
    right_at = {ROOT: 0}  # nodes that hold what will come, and how much of it
    taken: set[tuple[int, int]] = set()
    draft = Draft([], [])
    assert draft.parents is not None
    for _ in range(rng.randint(0, max_nodes)):
        parent = rng.choice([*right_at, rng.randint(ROOT, len(draft.tokens) - 1)])
        place = right_at.get(parent)
        is_right = place is not None and place < len(coming) and rng.random() < 0.7
        token = coming[place] if is_right and place is not None else rng.randrange(vocab_size)
        if (parent, token) in taken:
            continue
        taken.add((parent, token))
        if place is not None and place < len(coming) and token == coming[place]:
            right_at[len(draft.tokens)] = place + 1
        draft.tokens.append(token)
        draft.parents.append(parent)
    if rng.random() < 0.5:
        draft.scores = [rng.randrange(256) for _ in draft.tokens]
    return draft


def early(truth: Truth, vocab_size: int, rng: random.Random, depth: int = 3) -> Policy:
    """Drafts now, and for outcomes that may come true: some do, some don't."""

    def policy(seen: Seen) -> list[Draft]:
        coming = truth.after(seen.tokens, 3 * depth + 2)
        drafts = [Draft(coming[:depth])] if rng.random() < 0.8 else []
        for _ in range(rng.randint(0, 3)):
            ahead = rng.randint(1, depth + 1)
            assumed = coming[:ahead]
            if assumed and rng.random() < 0.3:
                assumed[-1] = rng.randrange(vocab_size)
            below = random_draft(coming[ahead:], vocab_size, rng, 6)
            below.assumed = assumed
            drafts.append(below)
        rng.shuffle(drafts)
        return drafts

    return policy


# ---- A drafter on a stream


class FakeDrafter:
    """One Speculate stream with a view and a policy. `reads` cleared: it stops reading, as a stuck process does."""

    def __init__(
        self,
        stub: verify_pb2_grpc.VerifyServiceAsyncStub,
        policy: Policy = silent,
        *,
        name: str = "fake-1",
        algorithm: common_pb2.Algorithm = common_pb2.ALGORITHM_NGRAM,
        max_sessions: int = 64,
        features: common_pb2.FeatureLayout | None = None,
        target: common_pb2.ModelInfo | None = None,
        wire_version: int = WIRE_VERSION,
    ) -> None:
        needs_features = features is not None and features.kind > common_pb2.FEATURE_KIND_NONE
        self.view = View(needs_features=needs_features)
        self.policy = policy
        self.enlist = verify_pb2.Enlist(
            drafter_id=name,
            wire_version=wire_version,
            algorithm=algorithm,
            draft_model="fake",
            target=target,
            max_sessions=max_sessions,
            features=features,
            host_id="here",
            boot_id=name,
        )
        self.enlisted = verify_pb2.Enlisted()
        self.rounds: list[verify_pb2.Round] = []
        self.error: grpc.aio.AioRpcError | None = None
        self.has_ended = False
        self.reads = asyncio.Event()
        self.reads.set()
        self._stub = stub
        self._outgoing: asyncio.Queue[verify_pb2.SpeculateRequest | None] = asyncio.Queue()
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self._call = self._stub.Speculate(self._requests())

    async def start(self) -> None:
        """Enlists and begins to serve. Raises the AioRpcError of a refusal."""
        answer = await self._call.read()
        assert isinstance(answer, verify_pb2.SpeculateResponse)
        assert answer.WhichOneof("message") == "enlisted"
        self.enlisted = answer.enlisted
        self._task = asyncio.create_task(self._serve())

    async def until(self, done: Callable[[], object]) -> None:
        """Waits for rounds until `done()`; the stream must not end before."""
        async with self._changed:
            await self._changed.wait_for(lambda: done() or self.has_ended)
        self._check()
        assert done()

    async def finished(self) -> grpc.aio.AioRpcError | None:
        """Waits for verify to end the stream; returns the error that it ended with, None: well."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.has_ended)
        self._check()
        return self.error

    async def close(self) -> None:
        """Goes away without a word."""
        self._call.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._check()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def send(self, *proposals: verify_pb2.Proposal) -> None:
        """Sends one frame of proposals."""
        self.send_frame(verify_pb2.SpeculateRequest(proposals=verify_pb2.Proposals(proposals=proposals)))

    def send_frame(self, frame: verify_pb2.SpeculateRequest) -> None:
        """Sends any frame."""
        self._outgoing.put_nowait(frame)

    def release(self, seen: Seen, reason: verify_pb2.ReleaseReason = verify_pb2.RELEASE_REASON_CAPACITY) -> None:
        """Gives a session up."""
        release = verify_pb2.Release(session=seen.session, generation=seen.generation, reason=reason, detail="tired")
        self.send_frame(verify_pb2.SpeculateRequest(releases=verify_pb2.Releases(releases=[release])))

    def half_close(self) -> None:
        """Ends its side of the stream."""
        self._outgoing.put_nowait(None)

    async def _requests(self) -> AsyncIterator[verify_pb2.SpeculateRequest]:
        yield verify_pb2.SpeculateRequest(enlist=self.enlist)
        while (frame := await self._outgoing.get()) is not None:
            yield frame

    async def _serve(self) -> None:
        try:
            while True:
                await self.reads.wait()
                answer = await self._call.read()
                if not isinstance(answer, verify_pb2.SpeculateResponse):
                    break
                await self._take(answer.round)
        except grpc.aio.AioRpcError as error:
            self.error = error
        except Exception as failure:
            self._failure = failure
        async with self._changed:
            self.has_ended = True
            self._changed.notify_all()

    async def _take(self, frame: verify_pb2.Round) -> None:
        told = self.view.apply(frame)
        proposals = [self.view.propose(seen, draft) for seen in told for draft in self.policy(seen)]
        if proposals:
            self.send(*proposals)
        async with self._changed:
            self.rounds.append(frame)
            self._changed.notify_all()
