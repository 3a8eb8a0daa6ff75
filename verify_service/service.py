"""The rpc handlers of VerifyService: they translate, and wait; the engine does the work."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import grpc.aio

from engine.config import ModelConfig
from outrider import __version__
from outrider.args import VerifyArgs
from outrider.auth import token_file
from outrider.errors import RETRY_SOON_S, ResourceExhausted
from outrider.thread_future import ThreadFuture
from outrider.tracing import Tracing
from outrider.v1 import verify_pb2, verify_pb2_grpc
from outrider.wire import WIRE_VERSION
from verify_service.call_stream import CallStream
from verify_service.call_totals import CallTotals
from verify_service.calls import Calls, how_ended
from verify_service.commands import Ask, Inbox
from verify_service.feature_calls import FeatureCalls
from verify_service.hosts import Hosts
from verify_service.requests import SessionFactory
from verify_service.speculate import DrafterStream
from verify_service.step_loop import StepLoop
from verify_service.target import Target

MAX_DRAFTERS = 1024  # who asks what is served is told of them all


class VerifyServicer(verify_pb2_grpc.VerifyServiceServicer):
    """The rpc handlers of VerifyService. Owned by the event loop."""

    def __init__(
        self,
        args: VerifyArgs,
        config: ModelConfig,
        target: Target,
        factory: SessionFactory,
        engine: StepLoop,
        inbox: Inbox,
        totals: CallTotals,
        tracing: Tracing | None,
        *,
        busy_poll: bool,
    ) -> None:
        self._args = args
        self._busy_poll = busy_poll
        self._config = config
        self._target = target
        self._engine = engine
        self._inbox = inbox
        self._tokens = token_file(args.token_file, "--token-file")
        self._streams: set[DrafterStream] = set()
        self._hosts = Hosts()
        self._call_streams: set[CallStream] = set()
        self._feature_calls = FeatureCalls(target, inbox, engine.drafters, engine.features)
        self._flush: ThreadFuture[tuple[int, int]] | None = None  # that the engine was asked for
        self.totals = totals
        most = args.max_running_requests + args.max_queued_requests
        self.calls = Calls(factory, inbox, target, totals, tracing, max_untaken=most)

    @property
    def model_name(self) -> str:
        """The model folder's name."""
        return Path(self._target.model.model_path).name

    def end_streams(self) -> None:
        """Ends the streams that callers keep open for calls to come."""
        for stream in self._call_streams:
            stream.close()

    async def Generate(
        self, request: verify_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[verify_pb2.GenerateResponse]:
        """Streams tokens as they are committed; leaving it in any way frees what its sessions hold."""
        # Bounded by what the sessions may generate, since they say nothing else.
        responses: asyncio.Queue[verify_pb2.GenerateResponse | Exception] = asyncio.Queue()
        call = await self.calls.begin(request, context.invocation_metadata(), responses.put_nowait)
        try:
            while call.running or not responses.empty():
                response = await responses.get()
                if isinstance(response, Exception):
                    self.calls.give_up(call, how_ended(response))
                    raise response
                yield response
        finally:
            self.calls.leave(call)

    async def GenerateMany(
        self, request_iterator: AsyncIterator[verify_pb2.GenerateManyRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[verify_pb2.GenerateManyResponse]:
        """Any number of Generate calls; leaving it in any way frees what their sessions hold."""
        stream = CallStream(self.calls, self._tokens, context.invocation_metadata())
        self._call_streams.add(stream)
        try:
            async with contextlib.aclosing(stream.frames(request_iterator)) as frames:
                async for frame in frames:
                    yield frame
        finally:
            self._call_streams.discard(stream)

    async def Speculate(  # pyright: ignore[reportIncompatibleMethodOverride] - gRPC takes both, its types know one
        self, request_iterator: AsyncIterator[verify_pb2.SpeculateRequest], context: grpc.aio.ServicerContext
    ) -> None:
        """One drafter, until its stream ends or it breaks a rule. No generator: each frame would pass through three."""
        peer = context.peer()
        self._admit_drafter()
        await self._hosts.admit(peer)
        stream = DrafterStream(
            self._args, self._target, self._inbox, self._engine.turns, self._feature_calls,
            admit=self._admit_drafter, on_expelled=partial(self._hosts.expelled, peer), busy_poll=self._busy_poll,
        )  # fmt: skip
        self._streams.add(stream)
        try:
            await stream.run(request_iterator, context.write)
        finally:
            self._streams.discard(stream)

    def _admit_drafter(self) -> None:
        enlisted = sum(stream.is_enlisted for stream in self._streams)
        if enlisted >= MAX_DRAFTERS:
            raise ResourceExhausted(
                f"{enlisted} drafters are enlisted; at most {MAX_DRAFTERS} may be", retry_after_s=RETRY_SOON_S
            )

    async def StreamFeatures(
        self, request: verify_pb2.StreamFeaturesRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[verify_pb2.StreamFeaturesResponse]:
        """Rows from the pool in pieces of at most 256 KiB, read when they are sent."""
        async with contextlib.aclosing(self._feature_calls.pieces(request)) as pieces:
            async for piece in pieces:
                yield piece

    async def GetServerInfo(
        self, request: verify_pb2.VerifyServiceGetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> verify_pb2.VerifyServiceGetServerInfoResponse:
        """What is served, its limits, and counters since start."""
        scheduler, counters = self._engine.scheduler, self._engine.counters
        pages = scheduler.pages
        drafters = [stream.drafter for stream in self._streams if stream.drafter is not None]
        return verify_pb2.VerifyServiceGetServerInfoResponse(
            version=__version__,
            wire_version=WIRE_VERSION,
            boot_id=self._target.boot_id,
            model=self._target.model,
            features=self._target.features,
            limits=verify_pb2.RequestLimits(
                context_length=self._target.model.context_length,
                max_running_requests=self._args.max_running_requests,
                max_queued_requests=self._args.max_queued_requests,
                max_choices=self._args.most_choices,
                max_total_tokens=pages.pool.num_pages * pages.page_size,
            ),
            state=verify_pb2.EngineState(
                running_requests=len(scheduler.running),
                queued_requests=len(scheduler.waiting) + len(scheduler.parked),
                total_pages=pages.pool.num_pages,
                free_pages=max(0, pages.num_available),  # counted while the engine moves pages
                page_size=pages.page_size,
                generation_tokens_per_s=counters.tokens_per_s,
                steps=counters.steps,
                preemptions=scheduler.num_preemptions,
                draining=self.calls.draining,
            ),
            speculation=self._engine.stats.to_proto(),
            drafters=[
                verify_pb2.DrafterState(
                    drafter_id=drafter.drafter_id,
                    algorithm=drafter.algorithm,
                    draft_model=drafter.draft_model,
                    sessions=len(drafter.assignments),
                    proposals=dict(drafter.counts),
                )
                for drafter in drafters
            ],
            arguments=self._args.as_flags(),
        )

    async def FlushCache(
        self, request: verify_pb2.FlushCacheRequest, context: grpc.aio.ServicerContext
    ) -> verify_pb2.FlushCacheResponse:
        """Empties the prefix cache between two steps; calls that come meanwhile share what one did."""
        if self._flush is None:
            self._flush = ThreadFuture(self._flushed)
            self._inbox.put(Ask(self._engine.scheduler.pages.flush_cache, self._flush))
        freed, kept = await asyncio.shield(self._flush)
        return verify_pb2.FlushCacheResponse(freed_pages=freed, kept_pages=kept)

    def _flushed(self) -> None:
        self._flush = None


def new_boot_id() -> str:
    """A name for this process's start."""
    return secrets.token_hex(8)
