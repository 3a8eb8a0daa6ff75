"""Useless drafters, each in its own way, that come again and again over a real stream."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, cast

import grpc
import grpc.aio

from outrider import rpc
from outrider.v1 import common_pb2, verify_pb2, verify_pb2_grpc
from outrider.wire import pack_ids
from tests.drafter_view import Draft, Seen
from tests.fake_drafters import FakeDrafter, random_draft

_DEAF_TURNS = 10
_FLOOD = 5000  # proposals: more than verify refuses in a row


@dataclass(eq=False)
class Rogue:
    """A drafter that dials again whenever verify has thrown it out. `turn` first waits for something to happen.

    It checks all that it sees against the rules of the wire (tests/drafter_view.py).
    """

    kind: str
    address: str
    rng: random.Random
    turn: Callable[[], Awaitable[object]]
    num_streams: int = 0
    num_enlisted: int = 0
    reasons: set[str] = field(default_factory=set)  # statuses that its streams ended with
    vocab_size: int = 0
    _old: list[verify_pb2.Proposal] = field(default_factory=list)
    _drafter: FakeDrafter | None = None

    async def run(self) -> None:
        """Dials again and again until cancelled. Raises AssertionError when verify breaks a rule."""
        while True:
            async with rpc.create_channel(self.address) as channel:
                await self._stream(
                    cast("verify_pb2_grpc.VerifyServiceAsyncStub", verify_pb2_grpc.VerifyServiceStub(channel))
                )
            await self.turn()

    async def _stream(self, stub: verify_pb2_grpc.VerifyServiceAsyncStub) -> None:
        self.num_streams += 1
        target = common_pb2.ModelInfo(vocab_fingerprint="another") if self.kind == "stranger" else None
        self._drafter = drafter = FakeDrafter(
            stub, self._policy, name=f"{self.kind}-{self.rng.random()}", max_sessions=3, target=target
        )
        try:
            await drafter.start()
            assert self.kind != "stranger", "a drafter of another vocabulary was enlisted"
            self.num_enlisted += 1
            self.vocab_size = drafter.enlisted.target.vocab_size
            if self.kind == "deaf":
                drafter.reads.clear()
                for _ in range(_DEAF_TURNS):
                    await self.turn()
                drafter.half_close()
                drafter.reads.set()
            error = await drafter.finished()
        except grpc.aio.AioRpcError as refusal:
            error = refusal
        finally:
            drafter.half_close()  # lets grpc finish with what it asks for frames
            await drafter.close()
        self.reasons.add("OK" if error is None else error.code().name)

    def _policy(self, seen: Seen) -> list[Draft]:
        """The drafts that its kind makes for a session of which it has just heard."""
        return getattr(self, f"_{self.kind}")(seen)

    def _random(self, seen: Seen) -> list[Draft]:
        """Proposes trees of tokens from the text, for now and early."""
        coming = self.rng.sample(seen.tokens, min(8, len(seen.tokens)))
        draft = random_draft(coming, self.vocab_size, self.rng, 12)
        draft.assumed = coming[: self.rng.choice([0, 0, 1, 2])]
        return [draft]

    def _lazy(self, seen: Seen) -> list[Draft]:
        """Answers one time in ten."""
        return self._random(seen) if self.rng.random() < 0.1 else []

    def _deaf(self, seen: Seen) -> list[Draft]:
        """Proposes nothing; it reads only when it goes."""
        return []

    def _stranger(self, seen: Seen) -> list[Draft]:
        """Fails, since verify refuses a drafter of another vocabulary and never asks it."""
        raise AssertionError("a drafter of another vocabulary was enlisted")

    def _garbage(self, seen: Seen) -> list[Draft]:
        """Sends a proposal that is malformed in some way, which costs it the session."""
        bad = self.rng.choice([
            {"tokens": pack_ids([1, 2]), "parents": pack_ids([1, -1])},
            {"tokens": pack_ids([1, 1]), "parents": pack_ids([-1, -1])},
            {"tokens": pack_ids([self.vocab_size]), "parents": pack_ids([-1])},
            {"tokens": pack_ids([1, 2]), "parents": pack_ids([-1])},
            {"tokens": b"12345", "parents": b""},
            {"base_len": len(seen.tokens) + 100},
            {"base_len": 0},
            {"scores": b"123"},
        ])  # fmt: skip
        self._send(seen, **bad)
        return []

    def _replaying(self, seen: Seen) -> list[Draft]:
        """Sends each proposal twice, and sometimes one from long ago."""
        assert self._drafter is not None
        sent = self._drafter.view.propose(seen, *self._random(seen))
        self._old = [*self._old[-20:], sent]
        self._drafter.send(sent, self.rng.choice(self._old), sent)
        return []

    def _foreign(self, seen: Seen) -> list[Draft]:
        """Proposes for a session that nobody has, and for another generation of this one."""
        self._send(seen, generation=seen.generation + self.rng.choice([-1, 1, 1000]))
        self._send(seen, session=seen.session + 2**40)
        return self._random(seen)

    def _flooding(self, seen: Seen) -> list[Draft]:
        """Sends more proposals than anybody could use."""
        stale = verify_pb2.Proposal(session=seen.session, generation=seen.generation, base_len=seen.prompt_len)
        self._send_frame([stale] * _FLOOD)
        return []

    def _send(self, seen: Seen, **fields: Any) -> None:
        sound: dict[str, Any] = {
            "session": seen.session, "generation": seen.generation, "proposal_id": len(seen.sent) + 1,
            "base_len": len(seen.tokens), "tokens": pack_ids([1]), "parents": pack_ids([-1]),
        }  # fmt: skip
        self._send_frame([verify_pb2.Proposal(**{**sound, **fields})])

    def _send_frame(self, proposals: list[verify_pb2.Proposal]) -> None:
        assert self._drafter is not None
        self._drafter.send(*proposals)


KINDS = ("random", "lazy", "deaf", "stranger", "garbage", "replaying", "foreign", "flooding")
