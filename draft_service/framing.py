"""Frames of the stream to verify, of what drafting has to say."""

from __future__ import annotations

from collections.abc import Sequence

from draft_service.sessions import Changes, SessionTable
from outrider.v1 import verify_pb2


def framed(
    table: SessionTable, changes: Changes, proposals: Sequence[verify_pb2.Proposal]
) -> list[verify_pb2.SpeculateRequest]:
    """Releases, then proposals, as far as there are any."""
    frames: list[verify_pb2.SpeculateRequest] = []
    if (frame := released(changes)) is not None:
        frames.append(frame)
    if proposals:
        frame = verify_pb2.SpeculateRequest()
        frame.proposals.proposals.extend(proposals)
        if table.ring is not None and table.ring.last is not None:
            frame.proposals.consumed_slot_seq = table.ring.last
        frames.append(frame)
    return frames


def released(changes: Changes) -> verify_pb2.SpeculateRequest | None:
    """The frame that gives sessions up, if there are any."""
    if not changes.releases:
        return None
    return verify_pb2.SpeculateRequest(releases=verify_pb2.Releases(releases=changes.releases))
