"""Fetches feature rows that verify only announced, over a connection of its own: rounds never queue behind them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

import grpc.aio

from outrider.dialing import Dial
from outrider.telemetry import get_logger
from outrider.v1 import common_pb2, verify_pb2, verify_pb2_grpc

log = get_logger(__name__)

FETCH_TIMEOUT_S = 60.0
MAX_FETCHES = 2  # at once: pieces of more would only wait for one another

Key = tuple[int, int]  # session, generation


@dataclass(frozen=True, slots=True)
class Lost:
    """Rows of a session that could not be had, and why."""

    session: int
    generation: int
    detail: str


Deliver = Callable[[verify_pb2.Round | Lost], Awaitable[None]]


class FeatureFetcher:
    """Fetches for one enlisted stream; pieces go to `deliver` as rounds that hold rows only, in order of position.

    One task for each session, however often its rows are announced.
    """

    def __init__(
        self, address: str, drafter_id: str, enlisted: verify_pb2.Enlisted, deliver: Deliver, dial: Dial
    ) -> None:  # fmt: skip
        self._address = address
        self._drafter_id = drafter_id
        self._enlisted = enlisted
        self._deliver = deliver
        self._dial = dial
        self._channel: grpc.aio.Channel | None = None
        self._ends: dict[Key, int] = {}  # of sessions being fetched for: position after the last row wanted
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(MAX_FETCHES)

    def watch(self, rounds: Sequence[verify_pb2.Round]) -> None:
        """Starts to fetch whatever these rounds announce."""
        for key, rows in _announced(rounds):
            end = rows.first_pos + rows.count
            if key in self._ends:
                self._ends[key] = max(self._ends[key], end)
                continue
            self._ends[key] = end
            task = asyncio.create_task(self._fetch(key, rows.first_pos))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Stops fetching."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close(None)

    async def _fetch(self, key: Key, first_pos: int) -> None:
        try:
            while first_pos < self._ends[key]:
                async with self._slots:
                    first_pos = await self._fetch_range(key, first_pos, self._ends[key])
        except grpc.aio.AioRpcError as error:
            await self._deliver(Lost(*key, f"{error.code().name}: {error.details()}"))
        except Exception as error:  # certificates that cannot be read, say: a session must not wait for nothing
            log.error("feature rows cannot be fetched", address=self._address, exc_info=error)
            await self._deliver(Lost(*key, f"{type(error).__name__}: {error}"))
        finally:
            del self._ends[key]

    async def _fetch_range(self, key: Key, first_pos: int, end: int) -> int:
        """Delivers the rows from first_pos to end - 1; returns `end`."""
        session, generation = key
        request = verify_pb2.StreamFeaturesRequest(
            session=session, generation=generation, boot_id=self._enlisted.boot_id, drafter_id=self._drafter_id,
            features_token=self._enlisted.features_token, first_pos=first_pos, count=end - first_pos,
        )  # fmt: skip
        stub = verify_pb2_grpc.VerifyServiceStub(self._connect())
        async for piece in stub.StreamFeatures(request, timeout=FETCH_TIMEOUT_S):
            count = piece.rows.shape[0] if piece.rows.shape else 0
            rows = common_pb2.FeatureRows(first_pos=piece.first_pos, count=count, rows=piece.rows)
            found = verify_pb2.SessionFeatures(session=session, generation=generation, rows=rows)
            await self._deliver(verify_pb2.Round(features=[found]))
        return end

    def _connect(self) -> grpc.aio.Channel:
        if self._channel is None:
            self._channel = self._dial(self._address)
        return self._channel


def _announced(rounds: Sequence[verify_pb2.Round]) -> Iterator[tuple[Key, common_pb2.FeatureRows]]:
    for round in rounds:
        for features in round.features:
            if features.rows.announced:
                yield (features.session, features.generation), features.rows
        for verdict in round.verdicts:
            if verdict.features.announced:
                yield (verdict.session, verdict.generation), verdict.features
