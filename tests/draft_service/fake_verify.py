"""A verify service that says what a test tells it to, on a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

import grpc.aio
import numpy as np

from outrider import rpc
from outrider.errors import OutriderError, Unimplemented
from outrider.v1 import common_pb2, verify_pb2_grpc
from outrider.v1 import verify_pb2 as pb
from outrider.wire import pack_ids, unpack_ids

VOCAB = 1000


class Stream:
    """One drafter's stream, from the other side."""

    def __init__(self, enlist: pb.Enlist) -> None:
        self.enlist = enlist
        self.incoming: asyncio.Queue[pb.SpeculateRequest] = asyncio.Queue()
        self.outgoing: asyncio.Queue[pb.SpeculateResponse | OutriderError | None] = asyncio.Queue()
        self.half_closed = asyncio.Event()

    def tell(self, **round: Any) -> None:
        """Sends a Round."""
        self.outgoing.put_nowait(pb.SpeculateResponse(round=pb.Round(**round)))

    def end(self, error: OutriderError | None = None) -> None:
        """Ends the stream, well or not."""
        self.outgoing.put_nowait(error)

    async def proposals(self) -> list[pb.Proposal]:
        """The next frame, which must carry proposals."""
        frame = await self.incoming.get()
        assert frame.WhichOneof("message") == "proposals", frame
        return list(frame.proposals.proposals)

    async def proposal(self) -> tuple[pb.Proposal, list[int], list[int]]:
        """The next frame's only proposal, its tokens and what it assumes."""
        (found,) = await self.proposals()
        return found, unpack_ids(found.tokens, field="t").tolist(), unpack_ids(found.assumed, field="a").tolist()

    async def releases(self) -> list[pb.Release]:
        """The next frame, which must carry releases."""
        frame = await self.incoming.get()
        assert frame.WhichOneof("message") == "releases", frame
        return list(frame.releases.releases)


class FakeVerify(verify_pb2_grpc.VerifyServiceServicer):
    """Enlists whoever comes, or refuses with `refusal`; each stream is handed to the test by `stream()`."""

    def __init__(self, address: str, *, boot_id: str = "boot", refusal: OutriderError | None = None) -> None:
        self.address = address
        self.boot_id = boot_id
        self.refusal = refusal
        self.first: pb.SpeculateResponse | None = None
        self._streams: asyncio.Queue[Stream] = asyncio.Queue()
        self._server: grpc.aio.Server | None = None

    async def stream(self) -> Stream:
        """The next drafter that enlists."""
        return await self._streams.get()

    async def __aenter__(self) -> Self:
        self._server = rpc.create_server()
        verify_pb2_grpc.add_VerifyServiceServicer_to_server(self, self._server)
        rpc.bind(self._server, self.address)
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        await self._server.stop(None)

    async def Speculate(
        self, request_iterator: AsyncIterator[pb.SpeculateRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.SpeculateResponse]:
        stream = Stream((await anext(aiter(request_iterator))).enlist)
        self._streams.put_nowait(stream)
        if self.refusal is not None:
            raise self.refusal
        yield self.first or enlisted(self.boot_id)
        reader = asyncio.create_task(self._read(request_iterator, stream))
        try:
            while (frame := await stream.outgoing.get()) is not None:
                if isinstance(frame, OutriderError):
                    raise frame
                yield frame
        finally:
            reader.cancel()

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Refuses: drafters do not call it."""
        raise Unimplemented("a fake")
        yield

    async def GenerateMany(
        self, request_iterator: AsyncIterator[pb.GenerateManyRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateManyResponse]:
        """Refuses: drafters do not call it."""
        raise Unimplemented("a fake")
        yield

    async def StreamFeatures(
        self, request: pb.StreamFeaturesRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.StreamFeaturesResponse]:
        """Refuses: it announces no rows."""
        raise Unimplemented("a fake")
        yield

    async def GetServerInfo(
        self, request: pb.VerifyServiceGetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.VerifyServiceGetServerInfoResponse:
        """Refuses: drafters do not call it."""
        raise Unimplemented("a fake")

    async def FlushCache(
        self, request: pb.FlushCacheRequest, context: grpc.aio.ServicerContext
    ) -> pb.FlushCacheResponse:
        """Refuses: drafters do not call it."""
        raise Unimplemented("a fake")

    @staticmethod
    async def _read(requests: AsyncIterator[pb.SpeculateRequest], stream: Stream) -> None:
        async for frame in requests:
            stream.incoming.put_nowait(frame)
        stream.half_closed.set()
        stream.end()


def enlisted(boot_id: str) -> pb.SpeculateResponse:
    return pb.SpeculateResponse(
        enlisted=pb.Enlisted(
            boot_id=boot_id,
            target=common_pb2.ModelInfo(vocab_size=VOCAB, vocab_fingerprint="words", context_length=512),
            limits=pb.DrafterLimits(
                max_proposal_nodes=64, max_assumed_tokens=16, max_proposals_per_session=8, max_verify_nodes=32,
                max_sessions=16,
            ),
            features_token=b"of this stream",
        )
    )  # fmt: skip


def opened(session: int, tokens: list[int], *, generation: int = 1, **more: Any) -> pb.Opened:
    fields: dict[str, Any] = {"prompt_len": len(tokens), "remaining_tokens": 100, "remaining_context": 100}
    return pb.Opened(session=session, generation=generation, tokens=pack_ids(tokens), **(fields | more))


def verdict(session: int, base_len: int, tokens: list[int], **more: Any) -> pb.Verdict:
    fields: dict[str, Any] = {"generation": 1, "steps": 1}
    return pb.Verdict(session=session, base_len=base_len, tokens=tokens, **(fields | more))


def following(kind: pb.NextKind, base_len: int, **more: Any) -> pb.Next:
    return pb.Next(kind=kind, base_len=base_len, **more)


def rows(count: int, width: int = 4) -> common_pb2.FeatureRows:
    data = np.zeros((count, width), np.float32)
    tensor = common_pb2.Tensor(dtype=common_pb2.DTYPE_FLOAT32, shape=data.shape, data=data.tobytes())
    return common_pb2.FeatureRows(first_pos=0, count=count, rows=tensor)
