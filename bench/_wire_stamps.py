"""When frames of Speculate come from gRPC and go to it, at the drafter's end of `bench wire`."""

from __future__ import annotations

import time
from typing import Any, cast

import grpc.aio

from outrider import rpc
from outrider.grpc_thread import let_grpc_in_first
from outrider.v1 import verify_pb2


def frame_key(proposal: verify_pb2.Proposal) -> str:
    """Names a frame of proposals by its first."""
    return f"{proposal.session}:{proposal.proposal_id}"


def round_key(round: verify_pb2.Round) -> str:
    """Names a frame of verdicts by its first."""
    return f"{round.verdicts[0].session}:{round.verdicts[0].base_len}"


class Stamps:
    """came_ns: of rounds with verdicts; sent_ns: of frames of proposals."""

    def __init__(self) -> None:
        self.came_ns: dict[str, int] = {}
        self.sent_ns: dict[str, int] = {}

    def dial(self, address: str) -> grpc.aio.Channel:
        """A channel that notes them."""
        channel = rpc.create_channel(address)
        let_grpc_in_first()
        return cast("grpc.aio.Channel", _Channel(channel, self))


class _Channel:
    def __init__(self, channel: grpc.aio.Channel, stamps: Stamps) -> None:
        self._channel, self._stamps = channel, stamps

    async def __aenter__(self) -> _Channel:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._channel.__aexit__(None, None, None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Opens the channel's stream, stamped."""
        begin = self._channel.stream_stream(method, *args, **kwargs)
        if not method.endswith("/Speculate"):
            return begin
        return lambda *args, **kwargs: _Call(begin(*args, **kwargs), self._stamps)


class _Call:
    def __init__(self, call: Any, stamps: Stamps) -> None:
        self._call, self._stamps = call, stamps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    async def read(self) -> Any:
        """Reads from the call, and notes when."""
        frame = await self._call.read()
        now_ns = time.monotonic_ns()
        if isinstance(frame, verify_pb2.SpeculateResponse) and frame.round.verdicts:
            self._stamps.came_ns[round_key(frame.round)] = now_ns
        return frame

    async def write(self, frame: verify_pb2.SpeculateRequest) -> None:
        """Writes to the call, and notes when."""
        if frame.proposals.proposals:
            self._stamps.sent_ns[frame_key(frame.proposals.proposals[0])] = time.monotonic_ns()
        await self._call.write(frame)
