"""One verify service as the gateway knows it: its last answer, our calls to it."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

import grpc.aio

from gateway.call_failures import Broken, ChannelClosed, answer_of
from gateway.calls import Call, ReplicaCalls
from outrider.stopping import cancelled
from outrider.v1 import verify_pb2, verify_pb2_grpc

ServerInfo = verify_pb2.VerifyServiceGetServerInfoResponse


@dataclass(slots=True, eq=False)
class Replica:
    """One verify service. `info` is its last answer; `outstanding` counts our calls to it that run."""

    address: str
    channel: grpc.aio.Channel
    stub: verify_pb2_grpc.VerifyServiceAsyncStub
    calls: ReplicaCalls
    info: ServerInfo | None = None
    serving: bool = False
    told_of: str = ""  # boot id of the process of which it was told in what it differs
    doubtful: bool = False
    reasons: set[str] = field(default_factory=set)  # why it does not serve, as told since it last did
    missed: int = 0  # for probes in a row that got no answer
    outstanding: int = 0
    running: set[Call] = field(default_factory=set)
    ended: asyncio.Event = field(default_factory=asyncio.Event)  # a call of these
    leaving: bool = False  # it gets no more calls
    others: int = 0  # sessions of other callers, when it was last asked
    look_again: asyncio.Event = field(default_factory=asyncio.Event)
    watch: asyncio.Task[None] | None = None

    @classmethod
    def at(cls, address: str, channel: grpc.aio.Channel) -> Replica:
        """The replica that this channel leads to."""
        return cls(address, channel, verify_pb2_grpc.VerifyServiceStub(channel), ReplicaCalls(channel))

    @property
    def load(self) -> int:
        """The sessions that it has, ours as they are now."""
        return self.outstanding + self.others

    @property
    def context_length(self) -> int:
        """The most tokens of a prompt and its output together; 0: not told."""
        return 0 if self.info is None else self.info.limits.context_length or self.info.model.context_length

    @property
    def max_choices(self) -> int:
        """The most choices of one call; 0: not told."""
        return 0 if self.info is None else self.info.limits.max_choices

    @property
    def max_queued(self) -> int:
        """The most requests that may wait in its queue; 0: not told."""
        return 0 if self.info is None else self.info.limits.max_queued_requests

    def is_full(self, more: int) -> bool:
        """Whether our own calls, with so many `more`, fill its batch and its queue."""
        limits = self.info.limits if self.info is not None else verify_pb2.RequestLimits()
        room = limits.max_running_requests + limits.max_queued_requests
        return room > 0 and self.outstanding + more >= room

    def learn(self, info: ServerInfo) -> None:
        """Takes in the replica's answer."""
        if self.info is not None and self.info.boot_id != info.boot_id:  # another process than before
            self.calls.ask_again()
        self.info = info
        self.others = max(0, info.state.running_requests + info.state.queued_requests - self.outstanding)

    def check_same(self, start: verify_pb2.GenerateStart) -> None:
        """Broken where another model's process took the call than the one that was asked what it is."""
        asked = "" if self.info is None else self.info.model.numerics_id
        if asked and start.numerics_id and start.numerics_id != asked:
            raise Broken("another model answers at this address now")

    def begin(self, request: verify_pb2.GenerateRequest, timeout_s: float, *, alone: bool = False) -> Call:
        """A Generate call, which must be ended."""
        call = self.calls.begin(request, timeout_s, alone=alone)
        self.outstanding += 1
        self.running.add(call)
        return call

    def end(self, call: Call) -> None:
        """Ends a call that nobody waits for any more."""
        self.outstanding -= 1
        self.running.discard(call)
        self.ended.set()
        call.close()

    def break_calls(self, reason: str) -> None:
        """Ends all calls that run, as Broken."""
        for call in self.running:
            call.close(Broken(reason))

    def move_to(self, channel: grpc.aio.Channel) -> grpc.aio.Channel:
        """Makes what comes next over another channel; the one before, which is the caller's to close."""
        self.calls.retire()
        before, self.channel = self.channel, channel
        self.stub, self.calls = verify_pb2_grpc.VerifyServiceStub(channel), ReplicaCalls(channel)
        return before

    def leaves(self) -> None:
        """Takes no more calls."""
        self.serving, self.leaving = False, True
        self.calls.retire()

    async def flush_cache(self, timeout_s: float) -> int:
        """Empties its prefix cache; the pages that this freed, none where it leaves meanwhile. AioRpcError."""
        try:
            freed = await answer_of(self.stub.FlushCache(verify_pb2.FlushCacheRequest(), timeout=timeout_s))
        except ChannelClosed:
            return 0
        return freed.freed_pages

    async def close(self, calls_s: float | None) -> None:
        """Closes the channel of one that leaves, and ends the watching; calls that run have `calls_s`, or none."""
        try:
            if calls_s is not None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(calls_s):
                        while self.running:
                            self.ended.clear()
                            await self.ended.wait()
        finally:
            try:
                if self.watch is not None:
                    await cancelled(self.watch)
            finally:
                await self.channel.close(None)


async def close_channel(channel: grpc.aio.Channel, calls_s: float | None) -> None:
    """Closes a channel; calls that run on it have `calls_s`, without it or once this is cancelled none."""
    try:
        await channel.close(calls_s)
    except asyncio.CancelledError:
        await channel.close(None)
        raise
