"""What a drafter sends of rounds, without sockets."""

from __future__ import annotations

from draft_service.drafting import Drafting
from draft_service.sessions import SessionTable
from outrider.v1 import verify_pb2


async def sent(drafting: Drafting, table: SessionTable, *rounds: verify_pb2.Round) -> list[verify_pb2.SpeculateRequest]:
    """Has rounds served; the frames that were sent."""
    frames: list[verify_pb2.SpeculateRequest] = []

    async def send(frame: verify_pb2.SpeculateRequest) -> None:
        frames.append(frame)

    await drafting.serve(table, rounds, send)
    return frames
