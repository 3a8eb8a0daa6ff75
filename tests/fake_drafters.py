"""Drafters to test against: ways to draft, good and bad, and one that does so on a real stream."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import grpc.aio

from outrider.row_ring import RowReader
from outrider.tree import ROOT
from outrider.v1 import common_pb2, verify_pb2, verify_pb2_grpc
from outrider.wire import WIRE_VERSION
from tests.drafter_view import Draft, Policy, Seen, View

# ---- Ways to draft


@dataclass
class Truth:
    """Whole outputs that are known beforehand, from which a perfect drafter drafts."""

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
    """Declines: says that it has nothing."""
    return [Draft([])]


def perfect(truth: Truth, depth: int = 4) -> Policy:
    """Proposes one branch with the tokens that will come."""

    def policy(seen: Seen) -> list[Draft]:
        tokens = truth.after(seen.tokens, min(depth, seen.remaining))
        return [Draft(tokens)] if tokens else []

    return policy


def wrong(truth: Truth, vocab_size: int, depth: int = 4) -> Policy:
    """Proposes one branch that is wrong at its first token."""

    def policy(seen: Seen) -> list[Draft]:
        return [Draft([(token + 1) % vocab_size for token in truth.after(seen.tokens, depth)])]

    return policy


def random_trees(truth: Truth, vocab_size: int, rng: random.Random, nodes: int = 12) -> Policy:
    """Proposes trees of any shape with some of the tokens that will come, with scores of any size or none."""

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
        host: str = "here",
        draft_model: str = "fake",
    ) -> None:
        needs_features = features is not None and features.kind > common_pb2.FEATURE_KIND_NONE
        self.view = View(needs_features=needs_features, max_sessions=max_sessions)
        self.policy = policy
        self.enlist = verify_pb2.Enlist(
            drafter_id=name,
            wire_version=wire_version,
            algorithm=algorithm,
            draft_model=draft_model,
            target=target,
            max_sessions=max_sessions,
            features=features,
            host_id=host,
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
        offered = self.enlisted.shared_memory
        if offered.name:
            self.view.ring = ring = RowReader(
                offered.name, num_slots=offered.num_slots, slot_bytes=offered.slot_bytes,
                header_bytes=offered.header_bytes, dtype=self.enlisted.features.dtype,
            )  # fmt: skip
            nonce = verify_pb2.Proposals(shared_memory_nonce=ring.nonce)
            self.send_frame(verify_pb2.SpeculateRequest(proposals=nonce))
        self._task = asyncio.create_task(self._serve())

    async def until(self, done: Callable[[], object]) -> None:
        """Waits for rounds until `done()`; the stream must not end before."""
        async with self._changed:
            await self._changed.wait_for(lambda: done() or self.has_ended)
        self._check()
        assert done()

    async def finished(self) -> grpc.aio.AioRpcError | None:
        """Waits for verify to end the stream; returns the error that it ended with, None for a good end."""
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
        read = None if self.view.ring is None else self.view.ring.last
        frame = verify_pb2.Proposals(proposals=proposals, consumed_slot_seq=read)
        self.send_frame(verify_pb2.SpeculateRequest(proposals=frame))

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
