"""One drafter's stream: enlisting, frames in with bounded credit, rounds out. The sockets' side of drafters.py."""

from __future__ import annotations

import asyncio
import collections
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from outrider.algorithms import algorithm_name
from outrider.args import VerifyArgs
from outrider.busy_poll import BusyPoll
from outrider.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted
from outrider.row_ring import HEADER_BYTES, host_id
from outrider.telemetry import get_logger
from outrider.v1 import verify_pb2
from outrider.wire import ENLIST_TIMEOUT_S, MAX_ENTRIES
from verify_service.commands import Arrived, DrafterJoined, DrafterLeft, Inbox, ProposalsArrived, Released
from verify_service.drafter import Drafter
from verify_service.enlisting import check_enlist
from verify_service.feature_calls import FeatureCalls
from verify_service.parsing import parse_proposals
from verify_service.target import Target
from verify_service.turns import Turns

log = get_logger(__name__)

# Of one drafter's frames that wait for the engine; gRPC's flow control holds back the rest. One frame may always wait.
FRAMES_IN_FLIGHT = 64
BYTES_IN_FLIGHT = 8 * 2**20  # of memory
_BYTES_OF_PROPOSAL, _BYTES_PER_BYTE = 1024, 32  # of memory, and on the wire: as measured, about
FRESH_FRAMES = 64  # without an early proposal, after which none is thought to come
PROPOSALS_PER_TURN = 64  # of one frame; then other streams have theirs
Write = Callable[[verify_pb2.SpeculateResponse], Awaitable[object]]


class _Credits:
    """Bounds frames in flight: the event loop acquires; the engine releases, and wakes it only if it waits."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._sizes: collections.deque[int] = collections.deque()  # of the frames in flight, in their order
        self._acquired_bytes = 0
        self._released_bytes = 0  # written by the engine alone
        self._room = asyncio.Event()
        self._is_waiting = False

    async def acquire(self, num_bytes: int) -> None:
        """Waits for room for a frame of this size."""
        while self._is_full(num_bytes):
            self._room.clear()
            self._is_waiting = True
            # A release before this line may have seen nobody waiting.
            if self._is_full(num_bytes):
                await self._room.wait()
            self._is_waiting = False
        self._acquired_bytes += num_bytes
        self._sizes.append(num_bytes)

    def release(self) -> None:
        """A frame was handled."""
        self._released_bytes += self._sizes.popleft()
        if self._is_waiting:
            self._loop.call_soon_threadsafe(self._room.set)

    def _is_full(self, num_bytes: int) -> bool:
        waiting = self._acquired_bytes - self._released_bytes
        return len(self._sizes) >= FRAMES_IN_FLIGHT or (waiting > 0 and waiting + num_bytes > BYTES_IN_FLIGHT)


class DrafterStream:
    """The life of one Speculate rpc."""

    def __init__(
        self, args: VerifyArgs, target: Target, inbox: Inbox, turns: Turns, feature_calls: FeatureCalls,
        *, admit: Callable[[], object], on_expelled: Callable[[], object], busy_poll: bool,
    ) -> None:  # fmt: skip
        """admit: raises where no more drafters may be enlisted. on_expelled: called when this one is expelled."""
        self._args = args
        self._admit, self._on_expelled = admit, on_expelled
        self._target = target
        self._inbox = inbox
        self._turns = turns
        self._fresh_frames = FRESH_FRAMES  # since one of proposals that assume tokens
        self._feature_calls = feature_calls
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._poll = BusyPoll(self._loop, on=busy_poll)
        self._ready = asyncio.Event()
        self._credits = _Credits(self._loop)
        self._writing: asyncio.Task[None] | None = None  # which waits for the drafter to read
        self._ended_because: str | None = None  # words: an error would hold on to the frames that it was raised in
        self.is_enlisted = False  # as it is from the moment that it is taken
        self.drafter: Drafter | None = None

    async def run(self, requests: AsyncIterator[verify_pb2.SpeculateRequest], write: Write) -> None:
        """Writes frames to the drafter, `enlisted` and then rounds, until it leaves. Raises what ends the stream."""
        drafter = self._enlist(await self._first_frame(requests))
        self.is_enlisted = True
        reader: asyncio.Task[None] | None = None
        token = self._feature_calls.admit(drafter) if drafter.needs_features else b""
        try:
            await write(verify_pb2.SpeculateResponse(enlisted=self._enlisted(drafter, token)))
            self.drafter = drafter
            self._inbox.put(DrafterJoined(drafter))
            algorithm = algorithm_name(drafter.algorithm)
            log.info("drafter enlisted", drafter=drafter.drafter_id, algorithm=algorithm)
            reader = asyncio.create_task(self._read(requests, drafter))
            reader.add_done_callback(lambda _: self._ready.set())
            await self._write_rounds(write, drafter, reader)
            if self._ended_because is not None:
                if reader.done() and not reader.cancelled():
                    reader.exception()  # what it failed with just then is no news
                raise ResourceExhausted(self._ended_because)
            await reader
        except ResourceExhausted:
            self._on_expelled()
            raise
        finally:
            if drafter.ring is not None:
                drafter.ring.unlink()
            if token:
                self._feature_calls.dismiss(token)
            if reader is not None:
                reader.cancel()
                self._inbox.put(DrafterLeft(drafter))
                log.info("drafter left", drafter=drafter.drafter_id)
            # An error holds on to this frame, and a drafter to its stream: they go now, and wait for no collector.
            reader = self.drafter = None

    async def _write_rounds(self, write: Write, drafter: Drafter, reader: asyncio.Task[None]) -> None:
        """Writes until the reader ends, or the stream is ended: a drafter that reads nothing does not hold that up."""
        task = asyncio.current_task()
        try:
            while self._ended_because is None and not reader.done():
                await self._ready.wait()
                self._ready.clear()
                frame = verify_pb2.SpeculateResponse()
                while self._ended_because is None and drafter.outbox.take(frame.round):
                    self._writing = task
                    await write(frame)
                    self._writing = None
                    if frame.round.verdicts:
                        self._poll.asked(len(frame.round.verdicts))
                    frame = verify_pb2.SpeculateResponse()
                self._turns.settled()
        except asyncio.CancelledError:
            if self._ended_because is None or self._writing is None:
                raise
            self._writing.uncancel()
        finally:
            task = self._writing = None

    async def _first_frame(self, requests: AsyncIterator[verify_pb2.SpeculateRequest]) -> verify_pb2.Enlist:
        try:
            frame = await asyncio.wait_for(anext(aiter(requests)), ENLIST_TIMEOUT_S)
        except TimeoutError:
            raise DeadlineExceeded(f"no `enlist` came in {ENLIST_TIMEOUT_S:g} s") from None
        except StopAsyncIteration:
            raise InvalidArgument("the stream ended before `enlist`", field="message") from None
        if frame.WhichOneof("message") != "enlist":
            raise InvalidArgument("the first frame must be `enlist`", field="message")
        return frame.enlist

    def _enlist(self, enlist: verify_pb2.Enlist) -> Drafter:
        """Checks what a drafter says of itself, and makes its record."""
        self._admit()
        needs_features = check_enlist(enlist, self._target)
        is_near = needs_features and enlist.host_id == host_id()
        return Drafter(
            drafter_id=enlist.drafter_id,
            algorithm=enlist.algorithm,
            draft_model=enlist.draft_model,
            max_sessions=min(enlist.max_sessions, self._args.max_running_requests),
            needs_features=needs_features,
            wake=self._wake,
            end=lambda reason: self._loop.call_soon_threadsafe(self._end, reason),
            taken=self._credits.release,
            ring=self._feature_calls.ring(self._target.outbox_bytes) if is_near else None,
        )

    def _enlisted(self, drafter: Drafter, features_token: bytes) -> verify_pb2.Enlisted:
        args = self._args
        return verify_pb2.Enlisted(
            boot_id=self._target.boot_id,
            target=self._target.model,
            features=self._target.features,
            limits=verify_pb2.DrafterLimits(
                max_proposal_nodes=args.max_proposal_nodes,
                max_assumed_tokens=args.max_assumed_tokens,
                max_proposals_per_session=args.max_proposals_per_session,
                drafter_outbox_bytes=self._target.outbox_bytes,
                max_sessions=drafter.max_sessions,
                max_verify_nodes=args.max_verify_nodes,
            ),
            shared_memory=None
            if drafter.ring is None
            else verify_pb2.SharedMemoryRing(
                name=drafter.ring.name, num_slots=drafter.ring.num_slots, slot_bytes=drafter.ring.slot_bytes,
                header_bytes=HEADER_BYTES,
            ),
            features_token=features_token,
        )  # fmt: skip

    async def _read(self, requests: AsyncIterator[verify_pb2.SpeculateRequest], drafter: Drafter) -> None:
        async for frame in requests:
            self._poll.came()
            await self._credits.acquire(held_bytes(frame))
            if self._ended_because is not None:
                return
            match frame.WhichOneof("message"):
                case "proposals":
                    proposed = frame.proposals
                    proposals = proposed.proposals
                    if len(proposals) > MAX_ENTRIES:
                        raise ResourceExhausted(
                            f"a frame has {len(proposals)} proposals; at most {MAX_ENTRIES} are taken"
                        )
                    if proposed.HasField("shared_memory_nonce"):
                        drafter.prove(proposed.shared_memory_nonce)
                    read = proposed.consumed_slot_seq if proposed.HasField("consumed_slot_seq") else None
                    arrived, brings_early = await self._parse(proposals, drafter)
                    self._hand_over(ProposalsArrived(drafter, arrived, read), brings_early=brings_early)
                    await asyncio.sleep(0)  # what that led to is sent first: asking gRPC for the next one takes a while
                case "releases":
                    releases = frame.releases.releases
                    if len(releases) > MAX_ENTRIES:
                        raise ResourceExhausted(
                            f"a frame has {len(releases)} releases; at most {MAX_ENTRIES} are taken"
                        )
                    self._inbox.put(Released(drafter, list(releases)))
                case "enlist":
                    raise InvalidArgument("`enlist` may only be the first frame", field="message")
                case _:
                    raise InvalidArgument("a frame must carry a message", field="message")

    def _hand_over(self, arrived: ProposalsArrived, *, brings_early: bool) -> None:
        """Gives proposals to the engine; its step is run here only while no early ones are expected.

        Those come during a step, and must not wait for its end to be read.
        """
        self._fresh_frames = 0 if brings_early else self._fresh_frames + 1
        if self._fresh_frames > FRESH_FRAMES:
            self._turns.bring(arrived)
        else:
            self._inbox.put(arrived)

    async def _parse(self, proposals: Sequence[verify_pb2.Proposal], drafter: Drafter) -> tuple[list[Arrived], bool]:
        """The proposals, and whether any is early. Of a session that the drafter has not, nothing is looked at."""
        arrived: list[Arrived] = []
        has_early = False
        for first in range(0, len(proposals), PROPOSALS_PER_TURN):
            if first:
                await asyncio.sleep(0)
            piece = proposals[first : first + PROPOSALS_PER_TURN]
            own: list[verify_pb2.Proposal] = []
            for pb in piece:
                if drafter.find(pb.session, pb.generation) is not None:
                    own.append(pb)
                    has_early = has_early or len(pb.assumed) > 0
                else:
                    arrived.append(Arrived(pb.session, pb.generation, pb.proposal_id, None))
            if own:
                arrived += parse_proposals(
                    own, vocab_size=self._target.model.vocab_size, max_nodes=self._args.max_proposal_nodes
                )
        return arrived, has_early

    def _wake(self) -> None:
        if threading.get_ident() == self._thread:
            self._ready.set()
        else:
            self._loop.call_soon_threadsafe(self._ready.set)

    def _end(self, reason: str) -> None:
        self._ended_because = reason
        self._ready.set()
        if self._writing is not None:
            self._writing.cancel()


def held_bytes(frame: verify_pb2.SpeculateRequest) -> int:
    """Memory that a frame takes once it is read."""
    return _BYTES_PER_BYTE * frame.ByteSize() + _BYTES_OF_PROPOSAL * len(frame.proposals.proposals)
