"""Calls that survive their replica: nothing given twice, nothing lost, everything bounded."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from gateway.backend import Backend
from gateway.call_failures import NotOffered
from gateway.probing import ProbeTimes
from gateway.replica import Replica
from gateway.replicas import ReplicaSet
from gateway.route import Numerics, RetryPolicy, Route
from outrider.errors import (
    ENGINE_FAILED,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    OutriderError,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)
from outrider.v1 import common_pb2, verify_pb2
from outrider.wire import pack_ids, unpack_ids
from tests.gateway.fakes import FAST_PROBE, FAST_RETRY, FakeVerify, serving

LONG = list(range(10, 40))
LISTED = "addresses"  # the file that a backend has its replicas from
# An answer to a look that was under way would have one that broke a call taken for well before another is chosen.
SELDOM = replace(FAST_PROBE, interval_s=600.0, resolve_interval_s=600.0)


def by_seed(request: verify_pb2.GenerateRequest, choice: int) -> list[int]:
    """An output that depends on what an output may depend on."""
    return [10 + (request.sampling.seed + 7 * choice + 3 * position) % 200 for position in range(30)]


RELEASE: dict[str, Any] = {}  # what all replicas of a test know


@pytest.fixture(autouse=True, params=[True, False], ids=["one stream", "a stream each"])
def release(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls share a stream, or verify is of a release that has no such stream."""
    monkeypatch.setitem(RELEASE, "knows_many", request.param)


def fake(tmp_path: Path, **settings: Any) -> FakeVerify:
    """A replica that says LONG."""
    return FakeVerify(tmp_path, vocab_size=300, **{"say": lambda request, choice: LONG, **RELEASE, **settings})


@contextlib.asynccontextmanager
async def backend_of(
    fakes: Sequence[FakeVerify], tmp_path: Path, *, retry: RetryPolicy = FAST_RETRY, num_up: int | None = None,
    probe: ProbeTimes = SELDOM,
) -> AsyncGenerator[Backend]:  # fmt: skip
    """A backend that has found all its replicas."""
    async with contextlib.AsyncExitStack() as stack:
        addresses = [await stack.enter_async_context(serving(f, f"unix:{tmp_path}/{i}")) for i, f in enumerate(fakes)]
        listed = tmp_path / LISTED
        listed.write_text("\n".join(addresses))
        replicas = ReplicaSet([f"file:{listed}"], probe)
        await replicas.start()
        stack.push_async_callback(replicas.close)
        await until_up(replicas, len(fakes) if num_up is None else num_up)
        yield Backend(replicas, retry)


async def no_longer(backend: Backend, address: str, tmp_path: Path) -> None:
    """Takes a replica from the list."""
    left = [one.address for one in backend.replicas.serving if one.address != address]
    (tmp_path / LISTED).write_text("\n".join(left))
    await backend.replicas.look_up()


async def until_up(replicas: ReplicaSet, count: int) -> None:
    """Returns when `count` replicas serve."""
    async with asyncio.timeout(30):
        while len(replicas.serving) != count:
            await replicas.wait_for_change(0.05)


async def until_called(verify: FakeVerify, count: int) -> None:
    """Returns when `count` calls run."""
    while verify.active < count:  # noqa: ASYNC110
        await asyncio.sleep(0)


def ask(num_choices: int = 1, seed: int = 1) -> verify_pb2.GenerateRequest:
    """A request."""
    return verify_pb2.GenerateRequest(
        request_id="r", prompt_tokens=pack_ids([3, 4]), num_choices=num_choices,
        sampling=common_pb2.SamplingParams(seed=seed, max_tokens=100),
    )  # fmt: skip


async def outputs(backend: Backend, request: verify_pb2.GenerateRequest, **extra: Any) -> dict[int, list[int]]:
    """Every choice's tokens as the client is given them; each must finish once."""
    given: dict[int, list[int]] = {}
    finished: list[int] = []
    async for response in backend.generate(request, **{"timeout_s": 60.0, **extra}):
        given.setdefault(response.choice_index, []).extend(response.tokens)
        if response.HasField("finish"):
            finished.append(response.choice_index)
    assert sorted(finished) == sorted(given)
    return given


@pytest.mark.asyncio
@pytest.mark.parametrize("breaks_after", [0, 1, 2, 5, 10])
async def test_another_replica_goes_on(tmp_path: Path, breaks_after: int) -> None:
    one, two = fake(tmp_path, say=by_seed), fake(tmp_path, say=by_seed)
    one.break_after = [breaks_after]
    async with backend_of([one, two], tmp_path) as backend:
        assert await outputs(backend, ask(seed=5)) == {0: by_seed(ask(seed=5), 0)}
    (first,), (second,) = one.requests, two.requests
    assert first.resumed_tokens == b""
    resumed = unpack_ids(second.resumed_tokens, field="").tolist()
    assert resumed == by_seed(ask(seed=5), 0)[: len(resumed)]
    assert len(resumed) == (0 if breaks_after == 0 else 1 + 3 * (breaks_after - 1))
    assert second.sampling == first.sampling


@pytest.mark.asyncio
async def test_the_same_replica_comes_back(tmp_path: Path) -> None:
    only = fake(tmp_path, break_after=[2, 0, 3])
    async with backend_of([only], tmp_path) as backend:
        assert await outputs(backend, ask()) == {0: LONG}
    assert [len(request.resumed_tokens) // 4 for request in only.requests] == [0, 4, 4, 11]


@pytest.mark.asyncio
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("breaks_after", [0, 1, 3, 7])
async def test_choices_keep_their_index(tmp_path: Path, breaks_after: int, apart: bool) -> None:
    one, two = fake(tmp_path, say=by_seed), fake(tmp_path, say=by_seed)
    one.break_after = [breaks_after]
    two.break_after = [breaks_after]
    async with backend_of([one, two], tmp_path) as backend:
        expected = {choice: by_seed(ask(seed=9), choice) for choice in range(3)}
        assert await outputs(backend, ask(3, seed=9), apart=apart) == expected
        assert not any(replica.outstanding for replica in backend.replicas.serving)


@pytest.mark.asyncio
async def test_a_request_that_breaks_every_replica_is_given_up(tmp_path: Path) -> None:
    one, two = fake(tmp_path, break_after=[0] * 99), fake(tmp_path, break_after=[0] * 99)
    async with backend_of([one, two], tmp_path) as backend:
        with capture_logs() as logs, pytest.raises(Unavailable):
            await outputs(backend, ask())
    broken = [entry["failures"] for entry in logs if entry["event"] == "a generate call broke"]
    assert broken == list(range(1, FAST_RETRY.max_failures + 2))
    # A call may also break on its way, before a replica sees it.
    assert 1 < len(one.requests) + len(two.requests) <= FAST_RETRY.max_failures + 1


@pytest.mark.asyncio
async def test_a_request_that_engines_fail_on_does_not_go_through_them_all(tmp_path: Path) -> None:
    failed = Unavailable("the engine failed", code=ENGINE_FAILED)
    fakes = [fake(tmp_path, refuse=failed) for _ in range(4)]
    async with backend_of(fakes, tmp_path) as backend:
        with pytest.raises(Internal):
            await outputs(backend, ask())
        assert sum(len(one.requests) for one in fakes) == 2
        for one in fakes[1:]:
            one.refuse = None
        assert await outputs(backend, ask()) == {0: LONG}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "lies", [[*LONG, 5], [*LONG[:12], 300, *LONG[13:]], [2**32 - 1]], ids=["more", "after", "first"]
)
async def test_what_no_model_of_ours_says_reaches_no_client(tmp_path: Path, lies: list[int]) -> None:
    """More tokens than were asked for, or such as there are not: another replica answers."""
    lying, honest = fake(tmp_path), fake(tmp_path)
    lying.say, lying.unbounded = lambda request, choice: lies, True
    async with backend_of([lying, honest], tmp_path) as backend:
        request = ask()
        request.sampling.max_tokens = len(LONG)
        backend.replicas.serving[1].outstanding += 1
        assert await outputs(backend, request) == {0: LONG}
    assert [len(verify.requests) for verify in (lying, honest)] == [1, 1]


@pytest.mark.asyncio
async def test_fewer_log_probabilities_than_tokens_come_from_no_replica(tmp_path: Path) -> None:
    """The answers of such a replica would end the request."""

    class Stingy(FakeVerify):
        async def Generate(
            self, request: verify_pb2.GenerateRequest, context: Any
        ) -> AsyncGenerator[verify_pb2.GenerateResponse]:
            async for response in super().Generate(request, context):
                response.ClearField("logprobs")
                yield response

    stingy = Stingy(tmp_path, vocab_size=300, say=lambda request, choice: LONG, **RELEASE)
    async with backend_of([stingy, fake(tmp_path)], tmp_path) as backend:
        request = ask()
        request.logprobs = True
        backend.replicas.serving[1].outstanding += 1
        assert await outputs(backend, request) == {0: LONG}
    assert len(stingy.requests) == 1


@pytest.mark.asyncio
async def test_a_replica_that_ends_after_each_token_is_asked_no_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    pause_s = Route._pause_s
    monkeypatch.setattr(Route, "_pause_s", lambda self: pauses.append(pause_s(self)) or 0.0)
    async with backend_of([fake(tmp_path, break_after=[1] * 20)], tmp_path, retry=RetryPolicy()) as backend:
        assert await outputs(backend, ask()) == {0: LONG}
    assert len(pauses) == 20
    assert max(pauses[:8]) == 0.0
    assert 0.5 <= pauses[-1] <= 1.0


@pytest.mark.asyncio
async def test_a_call_of_its_own_whose_stream_is_reset_goes_on_elsewhere(tmp_path: Path) -> None:
    one, two = fake(tmp_path, break_after=[3], break_with=grpc.StatusCode.INTERNAL), fake(tmp_path)
    request = ask()
    request.prompt_logprobs = True
    async with backend_of([one, two], tmp_path) as backend:
        assert await outputs(backend, request) == {0: LONG}
    assert two.requests[0].resumed_tokens
    assert not one.streams + two.streams


PROMPT = replace(FAST_PROBE, timeout_s=0.5)  # which finds in seconds that one answers nothing


@pytest.mark.asyncio
@pytest.mark.parametrize("num_choices", [1, 2])
async def test_a_replica_that_hangs_while_its_connection_lives_loses_its_calls(
    tmp_path: Path, num_choices: int
) -> None:
    """gRPC's core goes on answering pings, so that the connection never breaks."""
    one, two = fake(tmp_path, say=by_seed, hold_after=3), fake(tmp_path, say=by_seed, boot_id="two")
    async with backend_of([one, two], tmp_path, probe=PROMPT) as backend:
        before = backend.replicas.serving[0].channel
        call = asyncio.create_task(outputs(backend, ask(num_choices, seed=5)))
        await one.holding.wait()
        one.is_late = True
        assert await call == {choice: by_seed(ask(seed=5), choice) for choice in range(num_choices)}
        assert all(request.resumed_tokens for request in two.requests)
        await one.idle.wait()  # it was told
        one.is_late = False
        await until_up(backend.replicas, 2)
        assert backend.replicas.serving[0].channel is not before


@pytest.mark.asyncio
@pytest.mark.parametrize("returns", [True, False])
async def test_the_only_replica_hangs(tmp_path: Path, returns: bool) -> None:
    only = fake(tmp_path, say=by_seed, hold_after=3)
    retry = FAST_RETRY if returns else replace(FAST_RETRY, patience_s=0.05)
    async with backend_of([only], tmp_path, probe=PROMPT, retry=retry) as backend:
        call = asyncio.create_task(outputs(backend, ask(seed=5)))
        await only.holding.wait()
        only.is_late = True
        await only.idle.wait()
        if returns:
            only.is_late, only.hold_after = False, None
            assert await call == {0: by_seed(ask(seed=5), 0)}
            assert only.requests[1].resumed_tokens
        else:
            with pytest.raises(Unavailable):
                await call


@pytest.mark.asyncio
async def test_a_replica_that_hangs_and_leaves_the_list_loses_its_calls_too(tmp_path: Path) -> None:
    one, two = fake(tmp_path, hold_after=3), fake(tmp_path, boot_id="two")
    async with backend_of([one, two], tmp_path, probe=PROMPT) as backend:
        call = asyncio.create_task(outputs(backend, ask()))
        await one.holding.wait()
        one.is_late = True
        (address,) = [replica.address for replica in backend.replicas.serving if replica.outstanding]
        await no_longer(backend, address, tmp_path)
        assert await call == {0: LONG}
        assert len(two.requests) == 1


@pytest.mark.asyncio
async def test_questions_that_come_in_late_together_are_one_pause(tmp_path: Path) -> None:
    """Clients ask for infos, and as many as they like."""
    only = fake(tmp_path, hold_after=3)
    async with backend_of([only], tmp_path, probe=replace(PROMPT, interval_s=600.0)) as backend:
        call = asyncio.create_task(outputs(backend, ask()))
        await only.holding.wait()
        only.is_late = True
        assert await asyncio.gather(*(backend.replicas.ask_all() for _ in range(8))) == [[]] * 8
        only.is_late = False
        assert len(backend.replicas.serving) == 1
        only.release.set()
        assert await call == {0: LONG}
    assert len(only.requests) == 1


@pytest.mark.asyncio
async def test_a_pause_of_one_late_answer_breaks_nothing(tmp_path: Path) -> None:
    only = fake(tmp_path, hold_after=3)
    async with backend_of([only], tmp_path) as backend:
        call = asyncio.create_task(outputs(backend, ask()))
        await only.holding.wait()
        (replica,) = backend.replicas.serving
        only.is_late = True
        prober = ReplicaSet([], PROMPT).prober
        for _ in range(2):
            await prober.probe(replica)
        only.is_late = False
        only.release.set()
        assert await call == {0: LONG}
    assert len(only.requests) == 1


@pytest.mark.asyncio
async def test_no_replica_comes_back(tmp_path: Path) -> None:
    retry = RetryPolicy(patience_s=0.05, first_pause_s=0.001, max_pause_s=0.01)
    only = fake(tmp_path, break_after=[3])
    async with backend_of([only], tmp_path, retry=retry) as backend:
        stream = backend.generate(ask(), timeout_s=60.0)
        async with contextlib.aclosing(stream):
            await anext(stream)
            only.draining = True
            with pytest.raises(Unavailable):
                async for _ in stream:
                    pass


@pytest.mark.asyncio
async def test_a_gateway_that_ends_waits_for_no_replica_to_come_back(tmp_path: Path) -> None:
    """Clients, and whoever starts it again, would else hear of the end after --failover-patience-s."""
    only = fake(tmp_path, break_after=[3])
    retry = RetryPolicy(patience_s=600.0, first_pause_s=0.001, max_pause_s=0.01)
    async with backend_of([only], tmp_path, retry=retry) as backend:
        stream = backend.generate(ask(), timeout_s=600.0)
        async with contextlib.aclosing(stream):
            await anext(stream)
            only.draining = backend.replicas.draining = True
            with pytest.raises(Unavailable):
                async for _ in stream:
                    pass


@pytest.mark.asyncio
async def test_without_a_replica_nothing_is_waited_for(tmp_path: Path) -> None:
    async with backend_of([fake(tmp_path, draining=True)], tmp_path, num_up=0) as backend:
        with pytest.raises(Unavailable):
            await outputs(backend, ask())
        with pytest.raises(Unavailable):
            backend.check_room()


@pytest.mark.asyncio
async def test_a_full_replica_passes_a_request_on(tmp_path: Path) -> None:
    full, free = fake(tmp_path, refuse=ResourceExhausted("queue full", retry_after_s=7)), fake(tmp_path)
    async with backend_of([full, free], tmp_path) as backend:
        assert await outputs(backend, ask()) == {0: LONG}
        free.refuse = ResourceExhausted("queue full", retry_after_s=9)
        with pytest.raises(ResourceExhausted) as refused:
            await outputs(backend, ask())
        assert refused.value.retry_after_s in (7, 9)


@pytest.mark.asyncio
@pytest.mark.parametrize("place", [0, 1])
async def test_who_was_full_at_first_takes_over_once_there_is_room(tmp_path: Path, place: int) -> None:
    """It makes no difference which of the two is asked first."""
    fakes = [fake(tmp_path, break_after=[3]) for _ in range(2)]
    full = fakes[place]
    full.break_after, full.refuse = [], ResourceExhausted("queue full", retry_after_s=7)
    async with backend_of(fakes, tmp_path) as backend:
        given: list[int] = []
        async for response in backend.generate(ask(), timeout_s=60.0):
            full.refuse = None
            given += response.tokens
        assert given == LONG
        assert full.requests


@pytest.mark.asyncio
async def test_our_own_calls_fill_a_replica(tmp_path: Path) -> None:
    only = fake(tmp_path, max_running=1, max_queued=1, hold_after=0)
    async with backend_of([only], tmp_path) as backend:
        calls = [asyncio.create_task(outputs(backend, ask())) for _ in range(2)]
        await until_called(only, 2)
        with pytest.raises(ResourceExhausted, match="limit of 1 waiting requests"):
            backend.check_room()
        only.release.set()
        assert await asyncio.gather(*calls) == [{0: LONG}, {0: LONG}]
        backend.check_room()


@pytest.mark.asyncio
@pytest.mark.parametrize("error", [InvalidArgument("top_k is odd", field="top_k"), OutriderError("oh")])
async def test_other_errors_are_the_requests_own(tmp_path: Path, error: OutriderError) -> None:
    one, two = fake(tmp_path, refuse=error), fake(tmp_path, refuse=error)
    async with backend_of([one, two], tmp_path) as backend:
        with pytest.raises(OutriderError) as failed:
            await outputs(backend, ask())
        assert (failed.value.http_status, failed.value.field) == (error.http_status, error.field)
        assert failed.value.message == error.message
    assert len(one.requests) + len(two.requests) == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("another", [True, False])
async def test_a_token_that_verify_does_not_take_is_not_the_clients(tmp_path: Path, another: bool) -> None:
    refusal = Unauthenticated("the token is not valid any more")
    one, two = fake(tmp_path, refuse=refusal), fake(tmp_path, refuse=None if another else refusal)
    async with backend_of([one, two], tmp_path) as backend:
        backend.replicas.serving[1].outstanding += 1
        with contextlib.nullcontext() if another else pytest.raises(Unavailable):
            assert await outputs(backend, ask()) == {0: LONG}
    assert len(one.requests) > 0


@pytest.mark.asyncio
async def test_the_deadline_ends_the_call(tmp_path: Path) -> None:
    only = fake(tmp_path, hold_after=1)
    async with backend_of([only], tmp_path) as backend:
        with pytest.raises(DeadlineExceeded, match=r"longer than the 1\.5 s that this server allows"):
            await outputs(backend, ask(), timeout_s=1.5)
        while only.active:  # noqa: ASYNC110
            await asyncio.sleep(0)
        with pytest.raises(DeadlineExceeded, match="longer than the 0 s"):
            await outputs(backend, ask(), timeout_s=0.0)


@pytest.mark.asyncio
@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("apart", [False, True])
async def test_closing_cancels_the_calls(tmp_path: Path, num_choices: int, apart: bool) -> None:
    only = fake(tmp_path, hold_after=2)
    async with backend_of([only], tmp_path) as backend:
        stream = backend.generate(ask(num_choices), timeout_s=60.0, apart=apart)
        await anext(stream)
        await until_called(only, num_choices if apart else 1)
        await stream.aclose()
        await asyncio.wait_for(only.idle.wait(), 30)
        assert only.cancelled == (num_choices if apart else 1)
        assert not backend.replicas.serving[0].outstanding


@pytest.mark.asyncio
@pytest.mark.parametrize("breaks", [False, True])
async def test_a_choice_that_was_ended_costs_nothing_more(tmp_path: Path, breaks: bool) -> None:
    only, ended = fake(tmp_path, say=lambda request, choice: by_seed(request, choice) * 10), {1}
    async with backend_of([only], tmp_path) as backend:
        if breaks:
            only.break_after = [3, 3, 3]
        given: dict[int, int] = {}
        async for response in backend.generate(ask(3), timeout_s=60.0, apart=True, ended=ended):
            given[response.choice_index] = given.get(response.choice_index, 0) + len(response.tokens)
            if response.choice_index == 2 and given[2] >= 4:
                ended.add(2)
        await asyncio.wait_for(only.idle.wait(), 30)
        assert not backend.replicas.serving[0].outstanding
    assert given.keys() == {0, 2}
    assert given[0] == 100
    assert all(request.first_choice_index != 1 for request in only.requests)


@pytest.mark.asyncio
async def test_what_fails_of_a_choice_that_was_ended_is_no_failure(tmp_path: Path) -> None:
    class Breaking(FakeVerify):
        async def _responses(self, request: verify_pb2.GenerateRequest) -> AsyncGenerator[verify_pb2.GenerateResponse]:
            yield await anext(super()._responses(request))
            await self.release.wait()
            raise Unavailable("this replica goes away")

    only, ended = Breaking(tmp_path, vocab_size=300, say=lambda request, choice: LONG, **RELEASE), set[int]()
    async with backend_of([only], tmp_path, retry=replace(FAST_RETRY, max_failures=0)) as backend:
        given = asyncio.Event()

        async def read() -> None:
            async for _ in backend.generate(ask(), timeout_s=60.0, ended=ended):
                given.set()

        reading = asyncio.create_task(read())
        await given.wait()  # now it waits for the next
        ended.add(0)
        only.release.set()
        await reading


@pytest.mark.asyncio
async def test_the_least_busy_replica_is_picked(tmp_path: Path) -> None:
    fakes = [fake(tmp_path, hold_after=1) for _ in range(3)]
    async with backend_of(fakes, tmp_path) as backend:
        calls = [asyncio.create_task(outputs(backend, ask())) for _ in range(6)]
        for verify in fakes:
            await asyncio.wait_for(verify.holding.wait(), 30)
            verify.release.set()
        await asyncio.gather(*calls)
    assert [len(verify.requests) for verify in fakes] == [2, 2, 2]


@pytest.mark.asyncio
async def test_equal_numerics_are_preferred(tmp_path: Path) -> None:
    """An output goes on where its tokens stay the same, even on a busier replica."""
    first, other, same = (fake(tmp_path, numerics_id=name) for name in ("a", "b", "a"))
    first.break_after = [2]
    async with backend_of([first, other, same], tmp_path) as backend:
        backend.replicas.serving[2].outstanding += 2
        backend.replicas.serving[1].outstanding += 1
        assert await outputs(backend, ask()) == {0: LONG}
    assert [len(verify.requests) for verify in (first, other, same)] == [1, 0, 1]


@pytest.mark.asyncio
@pytest.mark.parametrize("breaks_after", [0, 2])
async def test_what_was_given_goes_on_only_where_its_tokens_stay_the_same(tmp_path: Path, breaks_after: int) -> None:
    """Before a token came any replica may begin it anew."""
    first, other = fake(tmp_path, numerics_id="a"), fake(tmp_path, numerics_id="b")
    first.break_after = [breaks_after]
    retry = FAST_RETRY if breaks_after == 0 else replace(FAST_RETRY, patience_s=0.5)
    async with backend_of([first, other], tmp_path, retry=retry) as backend:
        backend.replicas.serving[1].outstanding += 1
        given: list[int] = []
        fails = pytest.raises(Unavailable, match="as that which began")
        with contextlib.nullcontext() if breaks_after == 0 else fails:
            first_address = backend.replicas.serving[0].address
            async for response in backend.generate(ask(), timeout_s=60.0):
                given += response.tokens
                await no_longer(backend, first_address, tmp_path)
    assert given == (LONG if breaks_after == 0 else LONG[: len(given)])
    assert len(given) > 0


@pytest.mark.asyncio
@pytest.mark.parametrize("max_failures", [0, 4])
async def test_calls_of_one_request_are_computed_alike(tmp_path: Path, max_failures: int) -> None:
    """Whoever is later goes where the first went before it gave a token; the replica is not to blame."""
    first, other = fake(tmp_path, numerics_id="a"), fake(tmp_path, numerics_id="b", say=by_seed, hold_after=0)
    retry = replace(FAST_RETRY, max_failures=max_failures)
    async with backend_of([first, other], tmp_path, retry=retry) as backend:
        numerics = Numerics()
        calls = [asyncio.create_task(outputs(backend, ask(), numerics=numerics)) for _ in range(2)]
        await other.holding.wait()
        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        other.release.set()
        assert await asyncio.gather(*calls) == [{0: LONG}] * 2
        assert not any(replica.doubtful for replica in backend.replicas.serving)
    assert not any(request.resumed_tokens for request in (*first.requests, *other.requests))
    assert [len(verify.requests) for verify in (first, other)] == [2, 1]


@pytest.mark.asyncio
async def test_another_model_that_took_an_address_over_gives_no_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other model comes between two looks at a replica."""
    first, other = fake(tmp_path, numerics_id="a"), fake(tmp_path, numerics_id="a")
    first.break_after = [2]
    async with backend_of([first, other], tmp_path) as backend:
        backend.replicas.serving[1].outstanding += 1
        monkeypatch.setattr("gateway.replica.Replica.learn", lambda replica, info: None)
        other.numerics_id = "b"
        given: list[int] = []
        async for response in backend.generate(ask(), timeout_s=60.0):
            given += response.tokens
            if response.HasField("start"):
                assert response.start.numerics_id == "a"
    assert given == LONG
    assert [len(verify.requests) for verify in (first, other)] == [2, 1]


@pytest.mark.asyncio
@pytest.mark.parametrize("max_tokens", [30, 100])
@pytest.mark.parametrize("breaks_after", [0, 2])
async def test_a_shorter_context_takes_only_answers_that_it_holds(
    tmp_path: Path, breaks_after: int, max_tokens: int
) -> None:
    """An answer's end would else depend on where it is given."""
    first, short = fake(tmp_path), fake(tmp_path, context_length=64)
    first.break_after = [breaks_after] * 3  # a probe may have found it well before another is chosen
    with capture_logs() as logs:
        async with backend_of([first, short], tmp_path) as backend:
            request = ask()
            request.sampling.max_tokens = max_tokens
            backend.replicas.serving[1].outstanding += 1
            assert await outputs(backend, request) == {0: LONG}
    assert (len(short.requests) > 0) == (max_tokens == 30)
    warned = [log for log in logs if "shorter context" in log["event"]]
    assert len(warned) <= 1  # none where the short one was found first


@pytest.mark.asyncio
@pytest.mark.parametrize("breaks_after", [0, 2])
async def test_choices_go_where_so_many_are_given_or_one_by_one(tmp_path: Path, breaks_after: int) -> None:
    """Those that have begun go on elsewhere, each in a call of its own; those that have not wait."""
    large, small = fake(tmp_path), fake(tmp_path, max_choices=2)
    large.break_after = [breaks_after]
    async with backend_of([large, small], tmp_path) as backend:
        backend.replicas.serving[0].outstanding += 1
        assert await outputs(backend, ask(3)) == dict.fromkeys(range(3), LONG)
        with pytest.raises(Unavailable):
            backend.replicas.pick(num_choices=9)
    assert {request.num_choices for request in small.requests} <= {1}
    assert large.requests[0].num_choices == 3


@pytest.mark.asyncio
async def test_room_is_for_answers_under_way_before_new_ones(tmp_path: Path) -> None:
    one = fake(tmp_path)
    async with backend_of([one], tmp_path) as backend:
        (replica,) = backend.replicas.serving
        assert replica.info is not None
        limits = replica.info.limits
        replica.outstanding = limits.max_running_requests + limits.max_queued_requests - 2
        with backend.replicas.waiting():
            assert backend.replicas.pick() is replica
            with backend.replicas.waiting():
                with pytest.raises(ResourceExhausted):
                    backend.replicas.pick()
                assert backend.replicas.pick(sure=True) is replica
        assert backend.replicas.pick() is replica


@pytest.mark.asyncio
async def test_a_replica_with_another_vocabulary_gets_nothing(tmp_path: Path) -> None:
    one, other = fake(tmp_path), fake(tmp_path, fingerprint="other")
    async with backend_of([one, other], tmp_path, num_up=1) as backend:
        await asyncio.gather(*(outputs(backend, ask()) for _ in range(4)))
    assert sorted(len(verify.requests) for verify in (one, other)) == [0, 4]


@pytest.mark.asyncio
async def test_a_draining_replica_gets_no_new_calls(tmp_path: Path) -> None:
    one, two = fake(tmp_path), fake(tmp_path)
    async with backend_of([one, two], tmp_path, probe=FAST_PROBE) as backend:
        one.draining = True
        await until_up(backend.replicas, 1)
        await asyncio.gather(*(outputs(backend, ask()) for _ in range(3)))
        assert len(one.requests) == 0
        one.draining = False
        await until_up(backend.replicas, 2)


@pytest.mark.asyncio
async def test_a_name_stands_for_several_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What DNS says is followed: replicas come and go with it, and stay while it cannot be asked."""
    hosts = ["127.0.0.1", "127.0.0.2"]
    loop = asyncio.get_running_loop()
    real = loop.getaddrinfo

    async def look_up(host: Any, port: Any, **extra: Any) -> Any:
        if host != "verify.example":
            return await real(host, port, **extra)
        if not hosts:
            raise socket.gaierror("no answer")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, int(port))) for address in hosts]

    monkeypatch.setattr(loop, "getaddrinfo", look_up)
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(serving(fake(tmp_path), "127.0.0.1:0"))
        port = first.rpartition(":")[2]
        await stack.enter_async_context(serving(fake(tmp_path), f"127.0.0.2:{port}"))
        replicas = ReplicaSet([f"verify.example:{port}"], FAST_PROBE)
        await replicas.start()
        stack.push_async_callback(replicas.close)
        await until_up(replicas, 2)
        hosts.pop()
        await until_up(replicas, 1)
        hosts.clear()
        await replicas.look_up()
        assert len(replicas.serving) == 1


@pytest.mark.asyncio
async def test_a_replica_that_is_not_there_yet_is_found_and_until_then_the_log_says_why_not(tmp_path: Path) -> None:
    replicas = ReplicaSet([f"unix:{tmp_path}/later"], FAST_PROBE)
    with capture_logs() as logs:
        await replicas.start()
        await replicas.wait_for_change(0.05)
        for replica in replicas._replicas.values():
            for _ in range(3):
                await replicas.prober.probe(replica)
    try:
        assert not replicas.serving
        ((event, reason, detail),) = {(log["event"], log["reason"], log["detail"]) for log in logs}
        assert (event, reason) == ("verify service not reached yet", "UNAVAILABLE")
        assert "later" in detail
        assert len(logs) == 1
        async with serving(fake(tmp_path), f"unix:{tmp_path}/later"):
            await until_up(replicas, 1)
        await until_up(replicas, 0)
    finally:
        await replicas.close()


@pytest.mark.asyncio
async def test_a_call_that_its_stream_did_not_take_goes_on_elsewhere_when_its_replica_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with backend_of([fake(tmp_path), fake(tmp_path)], tmp_path) as backend:
        begin = Replica.begin
        asked: list[str] = []

        def begin_in_vain(replica: Replica, *args: Any, **extra: Any) -> Any:
            asked.append(replica.address)
            if len(asked) > 1:
                return begin(replica, *args, **extra)

            class NotTaken:
                async def take(self) -> list[verify_pb2.GenerateResponse]:
                    await no_longer(backend, replica.address, tmp_path)
                    raise NotOffered

                def close(self) -> None:
                    pass

            replica.outstanding += 1
            return NotTaken()

        monkeypatch.setattr(Replica, "begin", begin_in_vain)
        assert await outputs(backend, ask()) == {0: LONG}
        assert asked[0] not in asked[1:]
