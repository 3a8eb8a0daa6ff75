"""Feature rows that verify only announces, and sessions that a drafter gives up, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import grpc.aio
import pytest

from draft_service.drafters.base import DraftRequest, GivenUp
from draft_service.fetching import FeatureFetcher, Lost
from draft_service.session import Session
from outrider.args import DraftArgs
from outrider.errors import NotFound, StartupError
from outrider.v1 import common_pb2
from outrider.v1 import verify_pb2 as pb
from tests.draft_service.fake_verify import FakeVerify, opened, rows, verdict
from tests.draft_service.test_worker import LOOP, Settled, begun, serving

pytestmark = pytest.mark.asyncio

PER_PIECE = 4


class KeepsRows(FakeVerify):
    """Has the rows of sessions below `kept`; pieces wait for `gate`."""

    def __init__(self, address: str, kept: dict[int, int]) -> None:
        super().__init__(address)
        self.kept = kept
        self.asked: list[pb.StreamFeaturesRequest] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def StreamFeatures(
        self, request: pb.StreamFeaturesRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.StreamFeaturesResponse]:
        """Sends rows in pieces of a few."""
        self.asked.append(request)
        await self.gate.wait()
        for first_pos in range(request.first_pos, request.first_pos + request.count, PER_PIECE):
            count = min(PER_PIECE, request.first_pos + request.count - first_pos)
            if first_pos + count > self.kept.get(request.session, 0):
                raise NotFound(f"rows {first_pos} of session {request.session} are not there")
            yield pb.StreamFeaturesResponse(first_pos=first_pos, rows=rows(count).rows)


class Reader(Settled):
    """Notes the rows that it is given, and gives up the sessions of `unwanted`."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.positions: list[int] = []
        self.news = asyncio.Condition()
        self.unwanted: set[int] = set()
        self._given_up: list[GivenUp] = []

    def add_features(self, rows: Sequence[tuple[Session, common_pb2.FeatureRows]]) -> None:
        for _, found in rows:
            if found.WhichOneof("location") == "rows":
                self.positions += range(found.first_pos, found.first_pos + found.count)

    def draft(self, requests: Sequence[DraftRequest]) -> Any:
        for request in requests:
            if request.session.session_id in self.unwanted:
                self._given_up.append(GivenUp(request.session, pb.RELEASE_REASON_CAPACITY, "no room"))
        return super().draft(requests)

    def take_given_up(self) -> list[GivenUp]:
        taken, self._given_up = self._given_up, []
        return taken


@pytest.fixture
def reader() -> Reader:
    return Reader.from_args(DraftArgs(speculative_ngram_capacity=50_000))


def announced(first_pos: int, count: int) -> common_pb2.FeatureRows:
    return common_pb2.FeatureRows(first_pos=first_pos, count=count, announced=True)


def told(session: int, found: common_pb2.FeatureRows) -> pb.SessionFeatures:
    return pb.SessionFeatures(session=session, generation=1, rows=found)


async def test_announced_rows_are_fetched_and_given_in_order(address: str, reader: Reader) -> None:
    async with KeepsRows(address, {1: 100}) as verify, serving([address], drafter=reader):
        stream = await verify.stream()
        await begun(stream)
        verify.gate.clear()
        stream.tell(features=[told(1, announced(0, 9))])
        stream.tell(verdicts=[verdict(1, 12, [12], features=announced(9, 6))])
        await stream.proposal()
        verify.gate.set()
        while len(reader.positions) < 15:
            await stream.proposal()  # rows make a session due again
        assert reader.positions == list(range(15))
        assert {asked.features_token for asked in verify.asked} == {b"of this stream"}
        assert {(asked.session, asked.generation, asked.boot_id, asked.drafter_id) for asked in verify.asked} == {
            (1, 1, "boot", "host:1")
        }


async def test_rows_that_are_gone_release_their_session_only(address: str, reader: Reader) -> None:
    async with KeepsRows(address, {2: 100}) as verify, serving([address], drafter=reader) as worker:
        stream = await verify.stream()
        await begun(stream, session=1)
        await begun(stream, session=2)
        stream.tell(features=[told(1, announced(0, 9))])
        (release,) = await stream.releases()
        assert (release.session, release.reason) == (1, pb.RELEASE_REASON_FEATURES)
        assert "NOT_FOUND: rows 0 of session 1 are not there" in release.detail
        stream.tell(verdicts=[verdict(2, 12, [12])])
        assert (await stream.proposal())[0].session == 2
        assert worker.links[0].num_sessions == 1


async def test_a_session_that_the_drafter_gives_up_is_released_and_not_proposed_for(
    address: str, reader: Reader
) -> None:
    reader.unwanted = {2}
    async with FakeVerify(address) as verify, serving([address], drafter=reader) as worker:
        stream = await verify.stream()
        stream.tell(opened=[opened(1, LOOP, prompt_len=1), opened(2, LOOP, prompt_len=1)])
        (release,) = await stream.releases()
        assert (release.session, release.reason, release.detail) == (2, pb.RELEASE_REASON_CAPACITY, "no room")
        assert (await stream.proposal())[0].session == 1
        assert worker.links[0].num_sessions == 1


async def test_rows_for_which_no_connection_can_be_made_are_lost(address: str) -> None:
    def dial(address: str) -> grpc.aio.Channel:
        raise StartupError("the certificate cannot be read")

    delivered: list[pb.Round | Lost] = []
    came = asyncio.Event()

    async def deliver(found: pb.Round | Lost) -> None:
        delivered.append(found)
        came.set()

    fetcher = FeatureFetcher(address, "host:1", pb.Enlisted(), deliver, dial)
    fetcher.watch([pb.Round(features=[told(3, announced(0, 9))])])
    await came.wait()
    await fetcher.close()
    assert delivered == [Lost(3, 1, "StartupError: the certificate cannot be read")]
