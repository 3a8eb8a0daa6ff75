"""Frames of the stream to verify, of what drafting has to say."""

from __future__ import annotations

from collections.abc import Sequence

from draft_service.sessions import SessionTable
from outrider.v1 import verify_pb2


def framed(
    table: SessionTable, releases: Sequence[verify_pb2.Release], said: verify_pb2.SpeculateRequest | None
) -> list[verify_pb2.SpeculateRequest]:
    """Releases, then the frame with what is proposed, as far as there are any."""
    frames: list[verify_pb2.SpeculateRequest] = []
    if releases:
        frames.append(released(releases))
    if said is not None and said.proposals.proposals:
        if table.ring is not None and table.ring.last is not None:
            said.proposals.consumed_slot_seq = table.ring.last
        frames.append(said)
    return frames


def released(releases: Sequence[verify_pb2.Release]) -> verify_pb2.SpeculateRequest:
    """The frame that gives sessions up."""
    return verify_pb2.SpeculateRequest(releases=verify_pb2.Releases(releases=releases))
