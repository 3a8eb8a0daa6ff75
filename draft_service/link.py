"""The stream to one verify process: dialled, enlisted, served, and dialled again for as long as it is wanted."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import grpc
import grpc.aio

from draft_service.arrivals import Arrivals
from draft_service.drafting import Drafting
from draft_service.fetching import FeatureFetcher
from draft_service.framing import released
from draft_service.reading import Arrival, RoundStream, by_kind, next_frame, read
from draft_service.sessions import SessionTable
from outrider import rpc
from outrider.backoff import Backoff
from outrider.busy_poll import BusyPoll
from outrider.dialing import Dial
from outrider.errors import (
    BY_STATUS,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    OutriderError,
    Unavailable,
)
from outrider.row_ring import RowReader
from outrider.telemetry import get_logger
from outrider.v1 import common_pb2, draft_pb2, verify_pb2, verify_pb2_grpc
from outrider.wire import ENLIST_TIMEOUT_S, WIRE_VERSION

log = get_logger(__name__)

ROUNDS_IN_FLIGHT = 64  # read and not yet applied; gRPC's flow control holds back the rest

# What only a restart, on either side, can mend.
_REFUSALS = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)


@dataclass(frozen=True, slots=True)
class Identity:
    """The names under which this process enlists."""

    drafter_id: str
    host_id: str
    boot_id: str


@dataclass(slots=True)
class LinkStats:
    """How a link stands, and its counts since the process started."""

    state: draft_pb2.VerifyLinkState = draft_pb2.VERIFY_LINK_STATE_CONNECTING
    proposals: int = 0
    rounds: int = 0
    connects: int = 0
    last_error: str = ""
    counters: Counter[str] = field(default_factory=Counter)  # of all its streams' tables


@dataclass(eq=False)
class VerifyLink:
    """One address, one stream at a time. `enlisted` holds the boot ids that other links of this process serve."""

    address: str
    drafting: Drafting
    identity: Identity
    max_sessions: int
    enlisted: set[str]
    backoff: Backoff = field(default_factory=Backoff)
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    dial: Dial = rpc.create_channel
    busy_poll: bool = False
    stats: LinkStats = field(default_factory=LinkStats)
    target: common_pb2.ModelInfo = field(default_factory=common_pb2.ModelInfo)  # of the stream that was enlisted last
    _table: SessionTable | None = None
    _stream: RoundStream | None = None
    _draining: bool = False
    _sending: asyncio.Lock = field(default_factory=asyncio.Lock)
    _noted_connects: int = 0
    _noted_cut: int | None = None  # nodes that trees are cut to, as was last said

    @property
    def num_sessions(self) -> int:
        """Sessions open on the stream."""
        return 0 if self._table is None else len(self._table)

    async def run(self) -> None:
        """Serves the address until drained or cancelled."""
        while not self._draining:
            error = await self._serve_once()
            if self._draining:
                return
            refused = error is not None and error.status in _REFUSALS
            self._note_end(error, refused)
            await self.sleep(self.backoff.next_s(refused=refused))

    async def drain(self) -> None:
        """Gives all sessions up and ends this side of the stream; `run` returns when verify has ended its own."""
        table, stream = self._table, self._stream
        if table is None or stream is None:
            self._draining = True
            return
        table.draining = True
        changes = table.release_all(verify_pb2.RELEASE_REASON_DRAINING, "the drafter is shutting down")
        await self.drafting.forget(changes.closed)
        try:
            if changes.releases:
                await self._send(stream, released(changes.releases))
            async with self._sending:
                self._draining = True
                await stream.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            log.info("the stream ended before it was drained", address=self.address)
        finally:
            self._draining = True

    async def _serve_once(self) -> OutriderError | None:
        """One stream from dialling to its end; returns why it ended, None when verify just closed it."""
        boot_id = ""
        try:
            async with self.dial(self.address) as channel:
                self._stream = stream = verify_pb2_grpc.VerifyServiceStub(channel).Speculate()  # pyright: ignore[reportCallIssue]
                try:
                    enlisted = await self._enlist(stream)
                    if enlisted.boot_id in self.enlisted:
                        raise FailedPrecondition(f"{self.address}: another address already reaches this verify service")
                    boot_id = enlisted.boot_id
                    self.enlisted.add(boot_id)
                    await self._exchange(stream, enlisted)
                except asyncio.InvalidStateError:  # written after the stream's end
                    return await _reason(stream)
        except grpc.aio.AioRpcError as error:
            return rpc.error_from_rpc(error)
        except OutriderError as error:
            return error.with_traceback(None)  # which would keep the stream's feature rows while the next one runs
        except Exception as error:  # a fault of ours: this stream ends, the process goes on
            log.error("the stream failed", address=self.address, exc_info=error)
            return Internal(f"{type(error).__name__}: {error}")
        finally:
            self.enlisted.discard(boot_id)
            self.stats.state = draft_pb2.VERIFY_LINK_STATE_CONNECTING
            self._stream, table, self._table = None, self._table, None
            if table is not None:
                await self.drafting.forget(
                    table.release_all(verify_pb2.RELEASE_REASON_UNSPECIFIED, "the stream ended").closed
                )
        return None

    async def _enlist(self, stream: RoundStream) -> verify_pb2.Enlisted:
        drafter = self.drafting.drafter
        enlist = verify_pb2.Enlist(
            drafter_id=self.identity.drafter_id,
            wire_version=WIRE_VERSION,
            algorithm=drafter.algorithm,
            draft_model=drafter.draft_model,
            target=drafter.target,
            max_sessions=self.max_sessions,
            features=drafter.features,
            host_id=self.identity.host_id,
            boot_id=self.identity.boot_id,
        )
        try:
            async with asyncio.timeout(ENLIST_TIMEOUT_S):
                await self._send(stream, verify_pb2.SpeculateRequest(enlist=enlist))
                frame = await next_frame(stream)
        except TimeoutError:
            raise DeadlineExceeded(f"{self.address} did not answer within {ENLIST_TIMEOUT_S:g} s") from None
        if frame is None:
            raise Unavailable(f"{self.address} ended the stream before it enlisted this drafter")
        if frame.WhichOneof("message") != "enlisted":
            raise Internal(f"the first frame from {self.address} is not `enlisted`")
        return frame.enlisted

    async def _exchange(self, stream: RoundStream, enlisted: verify_pb2.Enlisted) -> None:
        """Rounds in, proposals out, until the stream ends. Rounds that came meanwhile are taken in together."""
        ring = _open_ring(enlisted)
        if ring is not None:
            nonce = verify_pb2.Proposals(shared_memory_nonce=ring.nonce)
            await self._send(stream, verify_pb2.SpeculateRequest(proposals=nonce))
        self._table = table = SessionTable(
            enlisted, max_sessions=self.max_sessions, counters=self.stats.counters, ring=ring
        )
        self.target = enlisted.target
        self._note_cut(enlisted.limits)
        self.stats.state = draft_pb2.VERIFY_LINK_STATE_ENLISTED
        self.stats.connects += 1
        log.info("enlisted", address=self.address, verify_boot_id=enlisted.boot_id)
        arrivals: Arrivals[Arrival] = Arrivals(ROUNDS_IN_FLIGHT)
        fetcher = FeatureFetcher(self.address, self.identity.drafter_id, enlisted, arrivals.put, self.dial)
        poll = BusyPoll(asyncio.get_running_loop(), on=self.busy_poll)
        reader = asyncio.create_task(read(stream, arrivals, fetcher, table.news, poll))
        began_s = time.monotonic()

        async def send(frame: verify_pb2.SpeculateRequest) -> None:
            await self._send(stream, frame)  # before all that can wait: so does verify
            if proposals := frame.proposals.proposals:
                poll.asked(len(proposals))
                self.stats.proposals += len(proposals)
                self.drafting.counts.sent(proposals)

        try:
            while True:
                rounds, lost, end = by_kind(await arrivals.take())
                self.stats.rounds += len(rounds)
                await self.drafting.serve(table, rounds, send, lost)
                if end is not None:
                    break
        finally:
            self.backoff.lasted(time.monotonic() - began_s)
            reader.cancel()
            await fetcher.close()
        if end.error is not None:
            try:
                raise end.error
            finally:
                del end  # the error keeps this frame, and with it the ring: not the other way round, too

    async def _send(self, stream: RoundStream, frame: verify_pb2.SpeculateRequest) -> None:
        async with self._sending:
            if not self._draining:
                await stream.write(frame)

    def _note_cut(self, limits: verify_pb2.DrafterLimits) -> None:
        """Logs that trees have more nodes than verify takes, once for as long as its limit stays the same."""
        wanted = self.drafting.drafter.num_draft_tokens - 1
        most = min(limits.max_verify_nodes or wanted, limits.max_proposal_nodes or wanted)
        if wanted > most != self._noted_cut:
            log.warning(
                "trees are cut to what this verify service takes", address=self.address, num_draft_tokens=wanted + 1,
                max_verify_nodes=limits.max_verify_nodes, max_proposal_nodes=limits.max_proposal_nodes,
            )  # fmt: skip
            self._noted_cut = most

    def _note_end(self, error: OutriderError | None, refused: bool) -> None:
        """Logs why the stream ended, once for as long as the reason stays the same."""
        reason = "" if error is None else f"{error.status.name}: {error.message}"
        if refused:
            self.stats.state = draft_pb2.VERIFY_LINK_STATE_REFUSED
        if reason != self.stats.last_error or self.stats.connects != self._noted_connects:
            reached = self.stats.connects or refused  # a drafter may be up before its verify service
            note, event = (log.warning, "not enlisted") if reached else (log.info, "not enlisted yet")
            note(event, address=self.address, refused=refused, reason=reason or "verify closed it")
        self.stats.last_error, self._noted_connects = reason, self.stats.connects


def _open_ring(enlisted: verify_pb2.Enlisted) -> RowReader | None:
    """The memory that verify offers for feature rows; None where there is none, or this process cannot see it."""
    offered = enlisted.shared_memory
    if not offered.name:
        return None
    try:
        return RowReader(
            offered.name, num_slots=offered.num_slots, slot_bytes=offered.slot_bytes,
            header_bytes=offered.header_bytes, dtype=enlisted.features.dtype,
        )  # fmt: skip
    except (OSError, ValueError) as error:
        log.info("feature rows are not shared in memory but sent", reason=str(error))
        return None


async def _reason(stream: RoundStream) -> OutriderError | None:
    """Why a finished stream ended, as its status tells."""
    code = await stream.code()
    if code is grpc.StatusCode.OK:
        return None
    return BY_STATUS.get(code, Internal)(await stream.details() or code.name)
