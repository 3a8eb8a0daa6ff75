"""Links to verify services, over real sockets."""

from __future__ import annotations

import asyncio
import gc
import math
import random
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from draft_service.drafters.base import Drafter
from draft_service.drafters.ngram import NgramDrafter
from draft_service.drafting import Drafting
from draft_service.link import Identity
from draft_service.overlap import FixedOverlap
from draft_service.planning import FixedPlanner
from draft_service.sessions import SessionTable
from draft_service.worker import Worker
from outrider import rpc
from outrider.args import DraftArgs, GatewayArgs
from outrider.args.links import check_address
from outrider.backoff import Backoff
from outrider.errors import FailedPrecondition, ResourceExhausted, StartupError
from outrider.resolving import endpoints_of
from outrider.row_ring import HEADER_BYTES, RowRing
from outrider.v1 import common_pb2, draft_pb2
from outrider.v1 import verify_pb2 as pb
from outrider.wire import WIRE_VERSION
from tests.draft_service.fake_verify import FakeVerify, Stream, enlisted, following, opened, rows, verdict
from tests.draft_service.sending import sent

pytestmark = pytest.mark.asyncio

IDENTITY = Identity("host:1", "host", "drafter-boot")
LOOP = [*range(10, 20), 10, 11]  # a text that repeats
WAITING, PLAIN, PROPOSAL = pb.NEXT_KIND_WAITING, pb.NEXT_KIND_PLAIN, pb.NEXT_KIND_PROPOSAL


class Sleeps:
    """Instead of sleeping: notes how long, and goes on when the test says so."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[float] = asyncio.Queue()
        self._go = asyncio.Semaphore(0)

    async def __call__(self, seconds: float) -> None:
        if seconds == 10.0:  # the resolver's period
            await asyncio.Event().wait()
        self.asked.put_nowait(seconds)
        await self._go.acquire()

    async def next(self) -> float:
        """Waits until somebody sleeps, and wakes them."""
        seconds = await self.asked.get()
        self.go()
        return seconds

    def go(self) -> None:
        """Wakes who sleeps."""
        self._go.release()


class Settled(NgramDrafter):
    """Drafts only once all that was told is in the trie, so that tests need not wait for the thread."""

    def draft(self, requests: Any) -> Any:
        self.corpus.flush()
        return super().draft(requests)


@asynccontextmanager
async def serving(
    addresses: list[str], *, early: bool = False, drafter: Drafter | None = None, sleep: Any = None,
    max_sessions: int = 8, resolve: Any = endpoints_of, executor: ThreadPoolExecutor | None = None,
    steady_s: float = 0.0,
) -> AsyncIterator[Worker]:  # fmt: skip
    ngram = drafter or Settled.from_args(DraftArgs(speculative_ngram_capacity=50_000))
    worker = Worker(
        addresses, Drafting(ngram, FixedPlanner(FixedOverlap(on=early)), executor=executor), IDENTITY,
        max_sessions=max_sessions, sleep=sleep or Sleeps(), resolve=resolve,
        backoff=lambda: Backoff(rng=random.Random(0), steady_s=steady_s),
    )  # fmt: skip
    running = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        running.cancel()
        await worker.drain(0)
        ngram.close_down()


async def begun(stream: Stream, session: int = 1, tokens: list[int] = LOOP, **more: Any) -> pb.Proposal:
    """Opens a session in the middle of its output, and takes what is proposed for it."""
    stream.tell(opened=[opened(session, tokens, prompt_len=1, **more)])
    return (await stream.proposal())[0]


async def test_enlisting_says_who_it_is(address: str) -> None:
    async with FakeVerify(address) as verify, serving([address]) as worker:
        stream = await verify.stream()
        enlist = stream.enlist
        assert (enlist.drafter_id, enlist.host_id, enlist.boot_id) == ("host:1", "host", "drafter-boot")
        assert enlist.wire_version == WIRE_VERSION
        assert enlist.algorithm == common_pb2.ALGORITHM_NGRAM
        assert enlist.max_sessions == 8
        assert enlist.features.kind == common_pb2.FEATURE_KIND_NONE
        assert enlist.target.vocab_fingerprint == ""
        await begun(stream)
        assert worker.target.vocab_size == 1000
        (link,) = worker.links
        assert link.num_sessions == 1
        assert link.stats.state == draft_pb2.VERIFY_LINK_STATE_ENLISTED
        while not link.stats.proposals:  # noqa: ASYNC110  counted when gRPC says that it was written, maybe after that
            await asyncio.sleep(0)
        assert (link.stats.connects, link.stats.rounds, link.stats.proposals) == (1, 1, 1)


async def test_rounds_are_answered_with_trees(address: str) -> None:
    async with FakeVerify(address) as verify, serving([address]):
        stream = await verify.stream()
        stream.tell(opened=[opened(1, LOOP)])  # a prompt: its first token is guessed too
        found, tokens, assumed = await stream.proposal()
        assert (found.session, found.generation, found.proposal_id, found.base_len) == (1, 1, 1, 12)
        assert (tokens, assumed) == ([12, 13, 14, 15, 16, 17, 18, 19, 10, 11], [])
        assert list(found.scores) == sorted(found.scores)
        stream.tell(verdicts=[verdict(1, 12, [12], next=following(WAITING, 13))])
        found, tokens, _ = await stream.proposal()
        assert (found.proposal_id, found.base_len) == (2, 13)
        assert tokens == [13, 14, 15, 16, 17, 18, 19, 10, 11, 12]
        stream.tell(verdicts=[verdict(1, 13, [500], next=following(PLAIN, 14))])
        found, tokens, _ = await stream.proposal()
        assert (found.proposal_id, tokens) == (3, [])  # nothing followed 500 before: it declines
        stream.tell(closed=[pb.Closed(session=1, generation=1, reason=pb.CLOSE_REASON_FINISHED)])
        await begun(stream, session=2)


async def test_all_sessions_of_a_round_go_into_one_frame(address: str) -> None:
    async with FakeVerify(address) as verify, serving([address]):
        stream = await verify.stream()
        stream.tell(opened=[opened(session, LOOP, prompt_len=1) for session in (1, 2, 3)])
        assert [found.session for found in await stream.proposals()] == [1, 2, 3]


async def test_a_prompt_that_nothing_follows_is_not_declined(address: str) -> None:
    async with FakeVerify(address) as verify, serving([address]):
        stream = await verify.stream()
        stream.tell(opened=[opened(1, [5])])
        stream.tell(opened=[opened(2, [5, 6], prompt_len=1)])
        (declined,) = await stream.proposals()
        assert (declined.session, declined.base_len, declined.tokens) == (2, 2, b"")


async def test_coalesced_verdicts_and_feature_rows_are_taken(address: str) -> None:
    async with FakeVerify(address) as verify, serving([address]):
        stream = await verify.stream()
        await begun(stream)
        many = verdict(
            1, 12, [12, 13, 14, 15], steps=3, features=rows(4),
            credits=[pb.Credit(proposal_id=1, root_node=-1, nodes_verified=5, accepted_nodes=[0, 1, 2])],
        )  # fmt: skip
        stream.tell(features=[pb.SessionFeatures(session=1, generation=1, rows=rows(11))], verdicts=[many])
        found, tokens, _ = await stream.proposal()
        assert found.base_len == 16
        assert tokens[:3] == [16, 17, 18]


async def test_rounds_that_waited_are_drafted_for_once() -> None:
    """Pure: what was read together is one batch, and only the newest state is drafted for."""
    drafter = Settled.from_args(DraftArgs(speculative_ngram_capacity=50_000))
    table = _table()
    rounds = [
        pb.Round(opened=[opened(1, LOOP)]),
        pb.Round(verdicts=[verdict(1, 12, [12])]),
        pb.Round(verdicts=[verdict(1, 13, [13])]),
    ]
    frames = await sent(Drafting(drafter), table, *rounds)
    (proposal,) = frames[0].proposals.proposals
    assert (len(frames), proposal.base_len) == (1, 14)
    drafter.close_down()


async def test_a_planner_that_fails_ends_no_stream() -> None:
    class Failing(FixedPlanner):
        def meet(self, sessions: int) -> None:
            raise ZeroDivisionError

        plan = drafted = meet  # pyright: ignore[reportAssignmentType]

    drafter = Settled.from_args(DraftArgs(speculative_ngram_capacity=50_000))
    drafting, table = Drafting(drafter, Failing()), _table()
    with capture_logs() as logs:
        for round in (pb.Round(opened=[opened(1, LOOP)]), pb.Round(verdicts=[verdict(1, 12, [12])])):
            frames = await sent(drafting, table, round)
    (proposal,) = frames[0].proposals.proposals
    assert proposal.base_len == 13
    assert [log["event"] for log in logs if log["log_level"] == "error"] == [
        "the planner failed, which is said once; trees stay as they were planned"
    ]
    drafter.close_down()


async def test_silence_is_kept_until_there_is_a_budget(address: str) -> None:
    async with FakeVerify(address) as verify, serving([address]):
        stream = await verify.stream()
        await begun(stream)
        stream.tell(verdicts=[verdict(1, 12, [12], node_budget=0)])
        stream.tell(verdicts=[verdict(1, 13, [13], node_budget=2)])
        found, tokens, _ = await stream.proposal()
        assert (found.base_len, tokens) == (14, [14, 15])


async def test_a_request_shapes_its_trees(address: str) -> None:
    async with FakeVerify(address) as verify, serving([address]):
        stream = await verify.stream()
        wish = common_pb2.SpeculativeParams(num_draft_tokens=4, num_steps=2, topk=1)
        found = await begun(stream, speculative=wish)
        assert len(found.tokens) == 2 * 4
        found = await begun(stream, session=2, remaining_tokens=2)
        assert len(found.tokens) == 1 * 4


async def test_a_reassigned_session_starts_anew(address: str) -> None:
    async with FakeVerify(address) as verify, serving([address]) as worker:
        stream = await verify.stream()
        first = await begun(stream)
        again = await begun(stream, tokens=[*LOOP, 12], generation=3)
        assert (again.generation, again.proposal_id, again.base_len) == (3, 1, 13)
        assert first.proposal_id == 1
        # What still comes for the old one is dropped, and hurts nobody.
        stream.tell(
            verdicts=[verdict(1, 12, [99])],
            closed=[pb.Closed(session=1, generation=1, reason=pb.CLOSE_REASON_REASSIGNED)],
            rejected=[pb.Rejected(session=1, generation=1, proposal_id=1, reason=pb.REJECT_REASON_FOREIGN)],
        )
        stream.tell(verdicts=[verdict(1, 13, [13], generation=3)])
        assert (await stream.proposal())[0].base_len == 14
        assert worker.links[0].num_sessions == 1


async def test_a_length_that_differs_releases_the_session_only(address: str) -> None:
    async with FakeVerify(address) as verify, serving([address]) as worker:
        stream = await verify.stream()
        await begun(stream)
        await begun(stream, session=2)
        stream.tell(verdicts=[verdict(1, 99, [12]), verdict(2, 12, [12])])
        (release,) = await stream.releases()
        assert (release.session, release.reason) == (1, pb.RELEASE_REASON_OUT_OF_SYNC)
        assert "99" in release.detail
        assert (await stream.proposal())[0].session == 2
        assert worker.links[0].num_sessions == 1


async def test_sessions_over_the_capacity_are_released(address: str) -> None:
    async with FakeVerify(address) as verify, serving([address], max_sessions=1):
        stream = await verify.stream()
        stream.tell(opened=[opened(1, [1]), opened(2, [1])])
        (release,) = await stream.releases()
        assert (release.session, release.reason) == (2, pb.RELEASE_REASON_CAPACITY)


async def test_early_proposals_assume_what_is_likely(address: str) -> None:
    async with FakeVerify(address) as verify, serving([address], early=True):
        stream = await verify.stream()
        wish = common_pb2.SpeculativeParams(num_draft_tokens=4)
        first = await begun(stream, tokens=[*LOOP, *LOOP], speculative=wish)
        assert first.assumed == b""
        # Verify waits: it takes what comes as used, so what follows it is drafted at once.
        stream.tell(verdicts=[verdict(1, 24, [12], next=following(WAITING, 25))])
        now, tokens, assumed = await stream.proposal()
        assert (tokens, assumed) == ([13, 14, 15], [])
        early, *_ = await stream.proposals()
        assert early.base_len == 25
        assert early.assumed == _packed(13, 14, 15, 16)
        assert early.tokens == _packed(17, 18, 19)
        # The outcome that was assumed: its tree is verified already, and the one after that is drafted.
        step = following(PROPOSAL, 29, proposal_id=early.proposal_id, root_node=-1, nodes_kept=2)
        credit = pb.Credit(proposal_id=now.proposal_id, root_node=-1, nodes_verified=3, accepted_nodes=[0, 1, 2])
        stream.tell(verdicts=[verdict(1, 25, [13, 14, 15, 16], credits=[credit], next=step)])
        later, *_ = await stream.proposals()
        assert later.base_len == 29
        assert later.assumed == _packed(17, 18, 19)
        # A re-rooted one: what is left below the node that was accepted.
        step = following(PROPOSAL, 30, proposal_id=early.proposal_id, root_node=0, nodes_kept=2)
        stream.tell(verdicts=[verdict(1, 29, [17], next=step)])
        rerooted, *_ = await stream.proposals()
        assert rerooted.assumed == _packed(18, 19, 10)


async def test_without_early_proposals_a_running_step_is_left_alone(address: str) -> None:
    async with FakeVerify(address) as verify, serving([address]):
        stream = await verify.stream()
        found = await begun(stream)
        step = following(PROPOSAL, 13, proposal_id=found.proposal_id, root_node=0, nodes_kept=3)
        stream.tell(verdicts=[verdict(1, 12, [12], next=step)])
        stream.tell(verdicts=[verdict(1, 13, [13], next=following(WAITING, 14))])
        assert (await stream.proposal())[0].base_len == 14


async def test_a_restarted_verify_service_is_dialled_again(address: str) -> None:
    sleeps = Sleeps()
    async with serving([address], sleep=sleeps) as worker:
        waits = [await sleeps.next() for _ in range(3)]
        assert 0.05 <= waits[0] <= 0.1
        assert waits[0] < waits[1] < waits[2]
        async with FakeVerify(address, boot_id="one") as verify:
            stream = await _next_stream(verify, sleeps)
            await begun(stream)
            assert worker.links[0].num_sessions == 1
        assert await sleeps.next() <= 0.1  # it was enlisted: the waits begin anew
        assert worker.links[0].num_sessions == 0
        assert "UNAVAILABLE" in worker.links[0].stats.last_error
        async with FakeVerify(address, boot_id="two") as verify:
            stream = await _next_stream(verify, sleeps)
            assert (await begun(stream)).proposal_id == 1
        assert worker.links[0].stats.connects == 2


async def test_a_refused_drafter_dials_slowly_and_keeps_both_values(address: str) -> None:
    sleeps = Sleeps()
    refusal = FailedPrecondition("wire_version differs: the drafter has 1, this target 2")
    async with FakeVerify(address, refusal=refusal) as verify, serving([address], sleep=sleeps) as worker:
        await verify.stream()
        assert 15.0 <= await sleeps.next() <= 30.0
        await verify.stream()
        await sleeps.asked.get()
        (link,) = worker.links
        assert link.stats.state == draft_pb2.VERIFY_LINK_STATE_REFUSED
        assert link.stats.last_error == f"FAILED_PRECONDITION: {refusal.message}"


async def test_trees_that_verify_does_not_take_whole_are_told_of_once(address: str) -> None:
    sleeps = Sleeps()
    asked = Settled.from_args(DraftArgs(speculative_ngram_capacity=50_000, speculative_num_draft_tokens=48))
    with capture_logs() as logs:
        async with serving([address], drafter=asked, sleep=sleeps):
            for boot_id in ("one", "two"):
                async with FakeVerify(address, boot_id=boot_id) as verify:
                    await begun(await _next_stream(verify, sleeps))
    (told,) = [entry for entry in logs if entry["event"].startswith("trees are cut")]
    assert (told["num_draft_tokens"], told["max_verify_nodes"], told["max_proposal_nodes"]) == (48, 32, 64)


async def test_a_stream_ended_with_an_error_is_dialled_again(address: str) -> None:
    sleeps = Sleeps()
    async with FakeVerify(address) as verify, serving([address], sleep=sleeps) as worker:
        stream = await verify.stream()
        await begun(stream)
        stream.end(ResourceExhausted("too many bytes wait"))
        await sleeps.next()
        assert worker.links[0].stats.last_error == "RESOURCE_EXHAUSTED: too many bytes wait"
        stream = await verify.stream()
        await begun(stream)
        stream.end()
        await sleeps.next()
        assert worker.links[0].stats.last_error == ""
        await verify.stream()


async def test_streams_that_end_as_soon_as_they_begin_are_dialled_ever_more_slowly(address: str) -> None:
    sleeps = Sleeps()
    async with FakeVerify(address) as verify, serving([address], sleep=sleeps, steady_s=math.inf) as worker:
        waits: list[float] = []
        for error in (None, ResourceExhausted("thrown out"), None, None, None):
            (await verify.stream()).end(error)
            waits.append(await sleeps.next())
        assert waits[-1] >= 0.8
        assert waits == sorted(waits)
        assert worker.links[0].stats.connects == 5


async def test_a_status_whose_details_are_none_is_a_status(address: str) -> None:
    class Garbled(FakeVerify):
        async def Speculate(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
            details = (("grpc-status-details-bin", b"\xff\xff\xff"),)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "not now", trailing_metadata=details)
            yield

    sleeps = Sleeps()
    async with Garbled(address), serving([address], sleep=sleeps) as worker:
        await sleeps.next()
        assert worker.links[0].stats.last_error == "UNAVAILABLE: not now"
        await sleeps.next()


@pytest.mark.parametrize("first", [pb.SpeculateResponse(), pb.SpeculateResponse(round=pb.Round())])
async def test_a_wrong_first_frame_ends_the_stream(address: str, first: pb.SpeculateResponse) -> None:
    sleeps = Sleeps()
    async with FakeVerify(address) as verify:
        verify.first = first
        async with serving([address], sleep=sleeps) as worker:
            await sleeps.next()
            assert "is not `enlisted`" in worker.links[0].stats.last_error


async def test_a_frame_of_a_kind_that_is_not_known_is_passed_over(address: str) -> None:
    async with FakeVerify(address) as verify, serving([address]) as worker:
        stream = await verify.stream()
        stream.outgoing.put_nowait(pb.SpeculateResponse.FromString(b"\xfa\x01\x02hi"))  # member 31
        await begun(stream)
        assert worker.links[0].stats.connects == 1


async def test_a_wrong_later_frame_ends_the_stream(address: str) -> None:
    sleeps = Sleeps()
    async with FakeVerify(address) as verify, serving([address], sleep=sleeps) as worker:
        (await verify.stream()).outgoing.put_nowait(enlisted("boot"))
        await sleeps.next()
        assert "only rounds" in worker.links[0].stats.last_error


@pytest.mark.parametrize("frames", [[b"\xff\xff"], [enlisted("boot").SerializeToString(), b"\xff\xff"]])
async def test_garbage_ends_the_stream_and_nothing_else(address: str, frames: list[bytes]) -> None:
    async def speculate(requests: Any, context: Any) -> AsyncIterator[bytes]:
        for frame in frames:
            yield frame
        await asyncio.Event().wait()

    handlers = {"Speculate": grpc.stream_stream_rpc_method_handler(speculate)}
    server = rpc.create_server()
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("outrider.v1.VerifyService", handlers)])
    rpc.bind(server, address)
    await server.start()
    sleeps = Sleeps()
    async with serving([address], sleep=sleeps) as worker:
        await sleeps.next()
        assert "bytes that are no frame" in worker.links[0].stats.last_error
        await sleeps.next()
    await server.stop(None)


def _sharing(ring: RowRing) -> pb.SpeculateResponse:
    first = enlisted("boot")
    first.enlisted.shared_memory.CopyFrom(
        pb.SharedMemoryRing(name=ring.name, num_slots=8, slot_bytes=64, header_bytes=HEADER_BYTES)
    )
    return first


async def test_a_stream_that_ended_leaves_no_shared_memory(address: str) -> None:
    """Without the collector, which comes late: memory for rows may be large, and streams may end often."""
    ends = [None, ResourceExhausted("thrown out"), enlisted("boot"), ResourceExhausted("thrown out")]
    rings = [RowRing(64, 8) for _ in ends]
    mappings = [lambda ring=ring: Path("/proc/self/maps").read_text().count(ring.name) for ring in rings]
    sleeps = Sleeps()
    gc.disable()
    try:
        async with FakeVerify(address) as verify:
            verify.first = _sharing(rings[0])
            async with serving([address], sleep=sleeps):
                for end, mapped, later in zip(ends, mappings, [*rings[1:], rings[0]], strict=True):
                    stream = await verify.stream()
                    assert (await stream.incoming.get()).proposals.shared_memory_nonce
                    await begun(stream)
                    assert mapped() == 1  # the writer's own has no name there
                    stream.outgoing.put_nowait(end)
                    await sleeps.asked.get()
                    assert mapped() == 0
                    verify.first = _sharing(later)
                    sleeps.go()
    finally:
        gc.enable()
        for ring in rings:
            ring.unlink()


async def test_one_name_may_stand_for_several_and_two_for_one(tmp_path: Path) -> None:
    one, two, same = (f"unix:{tmp_path}/{name}.sock" for name in ("one", "two", "same"))
    endpoints = [one, two]
    sleeps = Sleeps()

    async def resolve(address: str) -> list[str]:
        return endpoints if address == "verify:1" else [address]

    async with (
        FakeVerify(one, boot_id="one") as first, FakeVerify(two, boot_id="two") as second,
        FakeVerify(same, boot_id="one") as third,
        serving(["verify:1"], resolve=resolve, sleep=sleeps) as worker,
    ):  # fmt: skip
        streams = [await first.stream(), await second.stream()]
        for stream in streams:
            await begun(stream)  # equal session ids of two verify services are two sessions
        assert [link.num_sessions for link in worker.links] == [1, 1]
        endpoints.append(same)
        await worker.look_again()
        await third.stream()
        assert await sleeps.next() >= 15.0
        assert "another address already reaches" in worker.links[2].stats.last_error
        # Gone from the name: a stream that serves is kept, a link that does not is ended.
        endpoints[:] = [two]
        await worker.look_again()
        await asyncio.gather(worker._running[same].task, return_exceptions=True)
        await worker.look_again()
        assert [link.address for link in worker.links] == [one, two]


@pytest.mark.parametrize("reason", [OSError("no such name"), UnicodeError("label too long")])
async def test_an_address_that_does_not_resolve_keeps_its_links(address: str, reason: Exception) -> None:
    failing = False

    async def resolve(name: str) -> list[str]:
        if failing:
            raise reason
        return [address]

    async with FakeVerify(address) as verify, serving(["verify:1"], resolve=resolve) as worker:
        await verify.stream()
        failing = True
        await worker.look_again()
        assert [link.address for link in worker.links] == [address]
        assert not worker._running[address].task.cancelling()


async def test_an_address_that_does_not_resolve_keeps_none_of_anothers_links() -> None:
    endpoints = ["unix:/nowhere/one"]

    async def resolve(address: str) -> list[str]:
        if address == "unknown:1":
            raise OSError("no such name")
        return endpoints

    async with serving(["unknown:1", "verify:1"], resolve=resolve) as worker:
        await worker.look_again()
        (gone,) = worker._running.values()
        endpoints = ["unix:/nowhere/two"]
        await worker.look_again()
        await asyncio.gather(gone.task, return_exceptions=True)
        await worker.look_again()
        assert [link.address for link in worker.links] == endpoints


async def test_draining_releases_every_session_and_waits_for_the_end(address: str) -> None:
    async with FakeVerify(address) as verify, serving([address]) as worker:
        stream = await verify.stream()
        await begun(stream)
        await begun(stream, session=2)
        await worker.drain(30.0)
        released = await stream.releases()
        assert [(release.session, release.reason) for release in released] == [
            (1, pb.RELEASE_REASON_DRAINING), (2, pb.RELEASE_REASON_DRAINING)
        ]  # fmt: skip
        assert stream.half_closed.is_set()


async def test_draining_ends_links_that_only_dial(address: str) -> None:
    sleeps = Sleeps()
    async with serving([address], sleep=sleeps) as worker:
        await sleeps.asked.get()
        await worker.drain(30.0)
        await worker.look_again()
        assert worker.links == []


class Broken(Settled):
    """Fails on session 1."""

    fails_in: str = "draft"

    def open(self, sessions: Any) -> None:
        self._fail("open", [session.session_id for session in sessions])
        super().open(sessions)

    def draft(self, requests: Any) -> Any:
        self._fail("draft", [request.session.session_id for request in requests])
        return super().draft(requests)

    def _fail(self, call: str, sessions: list[int]) -> None:
        if call == self.fails_in and 1 in sessions:
            raise RuntimeError("broken")


@pytest.mark.parametrize("call", ["open", "draft"])
async def test_a_failing_drafter_releases_its_sessions_and_goes_on(address: str, call: str) -> None:
    broken = Broken.from_args(DraftArgs(speculative_ngram_capacity=50_000))
    broken.fails_in = call
    async with FakeVerify(address) as verify, serving([address], drafter=broken) as worker:
        stream = await verify.stream()
        stream.tell(opened=[opened(1, LOOP)])
        (release,) = await stream.releases()
        assert (release.session, release.reason) == (1, pb.RELEASE_REASON_ERROR)
        assert (await begun(stream, session=2)).session == 2
        assert worker.links[0].num_sessions == 1


async def test_a_drafter_that_takes_long_runs_in_a_thread(address: str) -> None:
    slow = Settled.from_args(DraftArgs(speculative_ngram_capacity=50_000))
    slow.inline = False
    with pytest.raises(ValueError, match="executor"):
        Drafting(slow)
    with ThreadPoolExecutor(1) as executor:
        async with FakeVerify(address) as verify, serving([address], drafter=slow, executor=executor):
            assert (await begun(await verify.stream())).proposal_id == 1


@pytest.mark.parametrize("reads", [False, True])
async def test_what_is_brief_is_drafted_on_the_event_loop(reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pure: a thread's first trees tell that they are brief; a session that is opened may have much to read."""
    monkeypatch.setattr("draft_service.drafting.BRIEF_MS", 60_000.0)  # however busy the machine is
    slow, threads = Settled.from_args(DraftArgs(speculative_ngram_capacity=50_000)), list[str]()
    slow.inline, draft = False, slow.draft

    def noting(requests: Any) -> Any:
        threads.append(threading.current_thread().name)
        return draft(requests)

    slow.draft = noting
    with ThreadPoolExecutor(1, thread_name_prefix="drafter") as executor:
        drafting, table = Drafting(slow, executor=executor), _table()
        more = [opened(2, LOOP)] if reads else []
        for round in (pb.Round(opened=[opened(1, LOOP)]), pb.Round(opened=more, verdicts=[verdict(1, 12, [12])])):
            assert await sent(drafting, table, round)
    away = [name.startswith("drafter") for name in threads]
    assert away == [True, reads]
    slow.close_down()


@pytest.mark.parametrize(
    "address",
    ["verify", "verify:", ":1", "verify:0", "verify:70000", "verify:x", "a:b:1", "unix:", f"a.{'b' * 64}.c:1"],
)
async def test_wrong_addresses_are_refused(address: str) -> None:
    with pytest.raises(StartupError, match="verify-address"):
        check_address("--verify-address", address)
    with pytest.raises(StartupError, match="verify-address"):
        GatewayArgs.parse(["--verify-address", address])
    with pytest.raises(StartupError, match="verify-address"):
        DraftArgs.parse(["--verify-address", address])


def _packed(*tokens: int) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def _table() -> SessionTable:
    return SessionTable(enlisted("boot").enlisted, max_sessions=8)


async def _next_stream(verify: FakeVerify, sleeps: Sleeps) -> Stream:
    """The next stream, with the dialling woken as often as it takes."""
    arriving = asyncio.create_task(verify.stream())
    while not arriving.done():
        waking = asyncio.create_task(sleeps.next())
        await asyncio.wait([arriving, waking], return_when=asyncio.FIRST_COMPLETED)
        waking.cancel()
    return arriving.result()
