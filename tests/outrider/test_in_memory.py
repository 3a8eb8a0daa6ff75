"""Calls without sockets behave as gRPC's: order, ends, statuses, room, time, and who gives up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from outrider.errors import Internal, InvalidArgument, ResourceExhausted, Unimplemented
from outrider.in_memory import InMemoryChannel, InMemoryServer
from outrider.rpc import error_from_rpc
from outrider.v1 import verify_pb2, verify_pb2_grpc


class Servicer(verify_pb2_grpc.VerifyServiceServicer):
    """Does what the request's numbers say."""

    def __init__(self) -> None:
        self.taken = self.said = self.closed = 0
        self.error: Exception | None = None
        self.stuck = asyncio.Event()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[verify_pb2.GenerateResponse]:
        """Nobody asks for it."""
        raise Unimplemented("a fake")
        yield

    async def GenerateMany(self, request_iterator: Any, context: Any) -> AsyncIterator[verify_pb2.GenerateManyResponse]:
        """Nobody asks for it."""
        raise Unimplemented("a fake")
        yield

    async def FlushCache(self, request: Any, context: Any) -> verify_pb2.FlushCacheResponse:
        """Has no cache."""
        return verify_pb2.FlushCacheResponse()

    async def GetServerInfo(self, request: Any, context: Any) -> verify_pb2.VerifyServiceGetServerInfoResponse:
        """One answer."""
        if self.error is not None:
            raise self.error
        return verify_pb2.VerifyServiceGetServerInfoResponse(version="1")

    async def StreamFeatures(
        self, request: verify_pb2.StreamFeaturesRequest, context: Any
    ) -> AsyncIterator[verify_pb2.StreamFeaturesResponse]:
        """Gives as many answers as asked for."""
        try:
            for position in range(request.count):
                self.said += 1
                yield verify_pb2.StreamFeaturesResponse(first_pos=position)
            if self.error is not None:
                raise self.error
        finally:
            self.closed += 1

    async def Speculate(
        self, request_iterator: AsyncIterator[verify_pb2.SpeculateRequest], context: Any
    ) -> AsyncIterator[verify_pb2.SpeculateResponse]:
        """Names each drafter back; `stop` ends the call, `hang` never answers again."""
        async for request in request_iterator:
            self.taken += 1
            if request.enlist.drafter_id == "stop":
                return
            if request.enlist.drafter_id == "hang":
                self.stuck.set()
                await asyncio.Event().wait()
            yield verify_pb2.SpeculateResponse(enlisted=verify_pb2.Enlisted(boot_id=request.enlist.drafter_id))


def named(name: str) -> verify_pb2.SpeculateRequest:
    """A frame with a drafter's name."""
    return verify_pb2.SpeculateRequest(enlist=verify_pb2.Enlist(drafter_id=name))


def connect(servicer: Servicer) -> tuple[InMemoryChannel, Any]:
    """A channel and its stub."""
    server = InMemoryServer()
    verify_pb2_grpc.add_VerifyServiceServicer_to_server(servicer, cast(Any, server))
    channel = server.dial("anywhere")
    return channel, verify_pb2_grpc.VerifyServiceStub(channel)


@pytest.mark.asyncio
async def test_frames_go_both_ways_and_both_ends_end() -> None:
    async with InMemoryChannel({}) as empty:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await verify_pb2_grpc.VerifyServiceStub(empty).Speculate().read()  # pyright: ignore
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    channel, stub = connect(Servicer())
    async with channel:
        call = stub.Speculate()
        for name in ("a", "b"):
            await call.write(named(name))
            assert (await call.read()).enlisted.boot_id == name
        await call.done_writing()
        assert not isinstance(await call.read(), verify_pb2.SpeculateResponse)
        assert await call.code() is grpc.StatusCode.OK
        ended = stub.Speculate()
        await ended.write(named("stop"))
        assert not isinstance(await ended.read(), verify_pb2.SpeculateResponse)
        with pytest.raises(asyncio.InvalidStateError):
            await ended.write(named("late"))


@pytest.mark.asyncio
async def test_messages_are_handed_over_as_they_are() -> None:
    channel, stub = connect(Servicer())
    async with channel:
        assert (await stub.GetServerInfo(verify_pb2.VerifyServiceGetServerInfoRequest(), timeout=5)).version == "1"
        asked = verify_pb2.StreamFeaturesRequest(count=40)
        assert [piece.first_pos async for piece in stub.StreamFeatures(asked, timeout=5)] == list(range(40))
        requests = (named(str(number)) for number in range(40))

        async def told() -> AsyncIterator[verify_pb2.SpeculateRequest]:
            for request in requests:
                yield request

        names = [frame.enlisted.boot_id async for frame in stub.Speculate(told())]
        assert names == [str(number) for number in range(40)]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidArgument("no", field="count"), InvalidArgument),
        (ResourceExhausted("full", retry_after_s=3.0), ResourceExhausted),
        (KeyError("secret"), Internal),
    ],
)
async def test_statuses_are_what_a_socket_would_carry(error: Exception, kind: type[Exception]) -> None:
    servicer = Servicer()
    servicer.error = error
    channel, stub = connect(servicer)
    async with channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetServerInfo(verify_pb2.VerifyServiceGetServerInfoRequest())
        got = error_from_rpc(caught.value)
        assert type(got) is kind
        assert got.field == getattr(error, "field", None)
        assert getattr(got, "retry_after_s", None) == getattr(error, "retry_after_s", None)
        assert "secret" not in got.message
        call = stub.StreamFeatures(verify_pb2.StreamFeaturesRequest(count=1))
        assert (await call.read()).first_pos == 0
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()


@pytest.mark.asyncio
async def test_who_reads_nothing_is_told_only_so_much() -> None:
    servicer = Servicer()
    channel, stub = connect(servicer)
    async with channel:
        unread = stub.StreamFeatures(verify_pb2.StreamFeaturesRequest(count=10_000))
        await unread.read()
        for _ in range(100):
            await asyncio.sleep(0)
        assert servicer.said < 40
        stuck = stub.Speculate()
        await stuck.write(named("hang"))
        await servicer.stuck.wait()
        writes = asyncio.gather(*(stuck.write(named("more")) for _ in range(100)), return_exceptions=True)
        for _ in range(100):
            await asyncio.sleep(0)
        assert not writes.done()
        assert servicer.taken == 1
        stuck.cancel()
        assert {type(result) for result in await writes} == {type(None), asyncio.InvalidStateError}
        assert await stuck.code() is grpc.StatusCode.CANCELLED
        assert await stuck.details()


@pytest.mark.asyncio
async def test_time_and_closing_end_the_handler() -> None:
    servicer = Servicer()
    channel, stub = connect(servicer)
    late = stub.StreamFeatures(verify_pb2.StreamFeaturesRequest(count=10_000), timeout=0.01)
    assert await late.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert servicer.closed == 1
    call = stub.StreamFeatures(verify_pb2.StreamFeaturesRequest(count=10_000))
    await call.read()
    await channel.close()
    assert servicer.closed == 2
    assert await call.code() is grpc.StatusCode.CANCELLED
    assert channel.get_state() is grpc.ChannelConnectivity.READY


@pytest.mark.asyncio
async def test_a_call_that_is_cancelled_before_it_began_ends() -> None:
    channel, stub = connect(Servicer())
    async with channel:
        call = stub.Speculate()
        call.cancel()
        with pytest.raises(grpc.aio.AioRpcError, match="the call was cancelled"):
            await call.read()
        assert await call.code() is grpc.StatusCode.CANCELLED
        with pytest.raises(asyncio.InvalidStateError):
            await call.write(named("late"))
