"""A drafter that proposes random trees: enlists over the real wire, and is right only by chance.

python -m tests.e2e.random_drafter ADDRESS SEED
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

import numpy as np

from outrider import rpc
from outrider.telemetry import announce
from outrider.v1 import common_pb2, verify_pb2, verify_pb2_grpc
from outrider.wire import WIRE_VERSION, pack_ids


class RandomDrafter:
    """A drafter of random trees; half of the nodes repeat tokens of the session's text, so that some are accepted."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.outgoing: asyncio.Queue[verify_pb2.SpeculateRequest] = asyncio.Queue()
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.proposals: dict[tuple[int, int], int] = {}
        self.vocab_size = 0

    async def run(self, address: str) -> None:
        """Drafts until verify ends the stream."""
        enlist = verify_pb2.Enlist(
            drafter_id="random", wire_version=WIRE_VERSION, algorithm=common_pb2.ALGORITHM_NGRAM, max_sessions=64,
            host_id="test", boot_id="test",
        )  # fmt: skip
        self.outgoing.put_nowait(verify_pb2.SpeculateRequest(enlist=enlist))
        async with rpc.create_channel(address) as channel:
            async for frame in verify_pb2_grpc.VerifyServiceStub(channel).Speculate(self.frames()):
                if frame.HasField("enlisted"):
                    self.vocab_size = frame.enlisted.target.vocab_size
                    announce("random drafter serves")
                else:
                    self.apply(frame.round)

    async def frames(self) -> AsyncIterator[verify_pb2.SpeculateRequest]:
        """The frames to send."""
        while True:
            yield await self.outgoing.get()

    def apply(self, frame: verify_pb2.Round) -> None:
        """Answers every opened session and verdict with a tree."""
        changed: list[tuple[int, int]] = []
        for opened in frame.opened:
            self.tokens[opened.session, opened.generation] = np.frombuffer(opened.tokens, "<i4").tolist()
        for verdict in frame.verdicts:
            key = verdict.session, verdict.generation
            assert len(self.tokens[key]) == verdict.base_len
            self.tokens[key] += list(verdict.tokens)
            changed.append(key)
        for closed in frame.closed:
            self.tokens.pop((closed.session, closed.generation), None)
        trees = [self.propose(key) for key in changed if key in self.tokens]
        if trees:
            self.outgoing.put_nowait(verify_pb2.SpeculateRequest(proposals=verify_pb2.Proposals(proposals=trees)))

    def propose(self, key: tuple[int, int]) -> verify_pb2.Proposal:
        """A random tree of up to 16 nodes."""
        known = self.tokens[key]
        nodes: dict[tuple[int, int], int] = {}
        parents: list[int] = []
        tokens: list[int] = []
        for _ in range(int(self.rng.integers(0, 17))):
            parent = int(self.rng.integers(-1, len(tokens)))
            seen = self.rng.random() < 0.5
            token = int(self.rng.choice(known)) if seen else int(self.rng.integers(self.vocab_size))
            if (parent, token) not in nodes:
                nodes[parent, token] = len(tokens)
                parents.append(parent)
                tokens.append(token)
        self.proposals[key] = self.proposals.get(key, 0) + 1
        return verify_pb2.Proposal(
            session=key[0], generation=key[1], proposal_id=self.proposals[key], base_len=len(known),
            tokens=pack_ids(tokens), parents=pack_ids(parents),
        )  # fmt: skip


if __name__ == "__main__":
    asyncio.run(RandomDrafter(int(sys.argv[2])).run(sys.argv[1]))
