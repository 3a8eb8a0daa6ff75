"""How rows of features get to drafters beside rounds: by StreamFeatures, or in memory that a drafter here shares.

Who may read which rows, and how many calls and how much memory there are at once. The rows themselves are the engine's.
"""

from __future__ import annotations

import asyncio
import secrets
import weakref
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from outrider.errors import RETRY_SOON_S, InvalidArgument, NotFound, ResourceExhausted
from outrider.row_ring import RowRing
from outrider.telemetry import get_logger
from outrider.thread_future import ThreadFuture
from outrider.v1 import common_pb2, verify_pb2
from outrider.wire import INLINE_FEATURE_BYTES
from verify_service.commands import Ask, Inbox
from verify_service.drafter import Drafter
from verify_service.drafters import Drafters
from verify_service.features import FeatureSender
from verify_service.target import Target

log = get_logger(__name__)

MAX_UNPROVEN_RINGS = 16  # of drafters that have not shown yet that they see the memory: anybody may claim to be near
MAX_UNPROVEN_BYTES = 2**28  # of all those, beyond which they get small ones
LARGEST_RING_BYTES = 64 * 2**20  # that is made while streams wait: some 60 ms
SMALL_RING_BYTES = 8 * 2**20  # where more cannot be had: a container's /dev/shm has 64 MiB, for all of them
MAX_FEATURE_READS = 16  # that the engine is asked for at once; it does them all before a step
# Each may hold a piece that nobody reads.
MAX_CALLS = 256  # those of drafters that left too, until their callers go
MAX_CALLS_PER_DRAFTER = 8  # ours makes two


@dataclass(slots=True, eq=False)
class _Reader:
    drafter: Drafter
    num_calls: int = 0


class FeatureCalls:
    """All StreamFeatures calls of this process. Owned by the event loop; drafters, features: the engine's."""

    def __init__(self, target: Target, inbox: Inbox, drafters: Drafters, features: FeatureSender) -> None:
        self._target = target
        self._inbox = inbox
        self._drafters = drafters
        self._features = features
        self._readers: dict[bytes, _Reader] = {}  # by token
        self._num_calls = 0
        self._rings: weakref.WeakSet[RowRing] = weakref.WeakSet()
        self._reads = asyncio.Semaphore(MAX_FEATURE_READS)

    def admit(self, drafter: Drafter) -> bytes:
        """The token that the drafter shows in its calls; nobody can guess it."""
        token = secrets.token_bytes(16)
        self._readers[token] = _Reader(drafter)
        return token

    def dismiss(self, token: bytes) -> None:
        """Forgets a drafter that left."""
        del self._readers[token]

    def ring(self, num_bytes: int) -> RowRing | None:
        """Memory for the rows of a drafter that says it runs on this host; None where there is none to be had."""
        if sum(not ring.proven for ring in self._rings) >= MAX_UNPROVEN_RINGS:
            return None
        row_bytes, num_bytes = self._target.row_bytes, min(num_bytes, LARGEST_RING_BYTES)
        unproven = sum(ring.num_slots * ring.slot_bytes for ring in self._rings if not ring.proven)
        if unproven + num_bytes > MAX_UNPROVEN_BYTES:
            num_bytes = min(num_bytes, SMALL_RING_BYTES)
        try:
            ring = RowRing(row_bytes, max(1, num_bytes // row_bytes))
        except OSError as error:
            if num_bytes > SMALL_RING_BYTES:
                return self.ring(SMALL_RING_BYTES)
            log.warning("feature rows are not shared in memory but sent", reason=str(error))
            return None
        self._rings.add(ring)
        return ring

    async def pieces(
        self, request: verify_pb2.StreamFeaturesRequest
    ) -> AsyncGenerator[verify_pb2.StreamFeaturesResponse]:
        """The rows in pieces of at most 256 KiB, read when they are sent."""
        self._check(request)
        reader = self._readers.get(request.features_token)
        if reader is None or request.drafter_id != reader.drafter.drafter_id:
            raise NotFound(
                "features_token is not that of an enlisted drafter of this drafter_id", field="features_token"
            )
        for open_calls, most, whose in (
            (reader.num_calls, MAX_CALLS_PER_DRAFTER, "of this drafter"),
            (self._num_calls, MAX_CALLS, "of all drafters"),
        ):
            if open_calls >= most:
                raise ResourceExhausted(
                    f"{open_calls} StreamFeatures calls {whose} are open; at most {most} may be",
                    retry_after_s=RETRY_SOON_S,
                )
        reader.num_calls += 1
        self._num_calls += 1
        try:
            per_piece = max(1, INLINE_FEATURE_BYTES // self._target.row_bytes)
            end = request.first_pos + request.count
            for first_pos in range(request.first_pos, end, per_piece):
                rows = await self._read(reader.drafter, request, first_pos, min(per_piece, end - first_pos))
                if rows is None:
                    raise NotFound(
                        f"rows {first_pos} to {end - 1} of session {request.session} are not there", field="first_pos"
                    )
                yield verify_pb2.StreamFeaturesResponse(first_pos=first_pos, rows=rows)
        finally:
            reader.num_calls -= 1
            self._num_calls -= 1

    def _check(self, request: verify_pb2.StreamFeaturesRequest) -> None:
        target = self._target
        if request.boot_id != target.boot_id:
            raise NotFound(f"boot_id is not this process's, {target.boot_id}", field="boot_id")
        if not 1 <= request.count <= target.model.context_length:
            raise InvalidArgument(
                f"count is {request.count}; it must be from 1 to {target.model.context_length}", field="count"
            )
        if not target.row_bytes:
            raise NotFound("this server keeps no features", field="session")

    async def _read(
        self, drafter: Drafter, request: verify_pb2.StreamFeaturesRequest, first_pos: int, count: int
    ) -> common_pb2.Tensor | None:
        """Rows of a session that is open to the drafter; None where they are not there."""

        def read() -> common_pb2.Tensor | None:
            is_enlisted = drafter in self._drafters
            assignment = drafter.find(request.session, request.generation) if is_enlisted else None
            return None if assignment is None else self._features.read(assignment, first_pos, count)

        await self._reads.acquire()  # until the engine has read, whether or not the caller is still there
        answer: ThreadFuture[common_pb2.Tensor | None] = ThreadFuture(self._reads.release)
        self._inbox.put(Ask(read, answer))
        return await answer
