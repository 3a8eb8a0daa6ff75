"""Rounds as they come from a verify service: read one after the other, and queued until they are taken in."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import grpc.aio

from draft_service.arrivals import Arrivals
from draft_service.fetching import FeatureFetcher, Lost
from draft_service.news import News
from outrider.busy_poll import BusyPoll
from outrider.errors import Internal
from outrider.v1 import verify_pb2

# Of a round that is drafted for: asking gRPC for the next one would take the interpreter from who does.
_ASIDE_S = 0.001

RoundStream = grpc.aio.StreamStreamCall
"""The stream to one verify process: rounds in, proposals out."""


@dataclass(frozen=True, slots=True)
class End:
    """The stream's end, and what ended it; None: verify closed it."""

    error: Exception | None


Arrival = verify_pb2.Round | Lost | End


async def read(
    stream: RoundStream, arrivals: Arrivals[Arrival], fetcher: FeatureFetcher, news: News, poll: BusyPoll
) -> None:  # fmt: skip
    """Queues the stream's rounds, and then its end; has the rows fetched that a round announces."""
    try:
        while (frame := await next_frame(stream)) is not None:
            kind = frame.WhichOneof("message")
            if kind is None:
                continue  # of a kind that a newer verify service knows
            if kind != "round":
                raise Internal(f"a frame carries {kind}; after `enlisted` only rounds may come")
            poll.came()
            news.note(frame.round)
            await arrivals.put(frame.round)
            await asyncio.sleep(_ASIDE_S if frame.round.verdicts else 0)
            fetcher.watch([frame.round])
    except Exception as error:  # raised again by whoever takes it; a name for it here would keep it for ever
        await arrivals.put(End(error))
    else:
        await arrivals.put(End(None))


async def next_frame(stream: RoundStream) -> verify_pb2.SpeculateResponse | None:
    """The next frame, or None at the stream's end."""
    frame = await stream.read()
    if frame is None:  # how grpc gives bytes that it cannot parse
        raise Internal("the verify service sent bytes that are no frame")
    return frame if isinstance(frame, verify_pb2.SpeculateResponse) else None


def by_kind(arrived: list[Arrival]) -> tuple[list[verify_pb2.Round], list[Lost], End | None]:
    """What arrived, by kind; nothing after the end counts."""
    rounds: list[verify_pb2.Round] = []
    lost: list[Lost] = []
    for item in arrived:
        if isinstance(item, End):
            return rounds, lost, item
        if isinstance(item, Lost):
            lost.append(item)
        else:
            rounds.append(item)
    return rounds, lost, None
