"""The target's hidden rows on their way to drafters: chunk by chunk, inline or announced, each once per generation.

Every view asserts that rows come in order, once, and hold what the fake runner writes for their tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from pathlib import Path

import grpc
import grpc.aio
import pytest
from structlog.testing import capture_logs

from outrider.row_ring import RowRing, host_id
from outrider.sampling import SamplingParams
from outrider.v1 import common_pb2, verify_pb2
from outrider.wire import INLINE_FEATURE_BYTES
from tests.drafter_view import Draft, Policy, Seen, check_rows
from tests.fake_drafters import FakeDrafter, Truth, perfect, silent
from tests.fakes import ToyModel
from tests.verify_service.conftest import Serve, Service, layout, tokens_of
from tests.verify_service.held import OUTPUT, hold
from tests.verify_service.rig import prompt_of, request
from verify_service import feature_calls
from verify_service.commands import Ask, ProposalsArrived
from verify_service.feature_calls import (
    MAX_CALLS,
    MAX_CALLS_PER_DRAFTER,
    MAX_FEATURE_READS,
    MAX_UNPROVEN_RINGS,
    SMALL_RING_BYTES,
)

MODEL = ToyModel(vocab_size=32, order=3)
PROMPT = prompt_of(100, 32)
TEXT = PROMPT + MODEL.greedy(PROMPT, 60)
PARAMS = SamplingParams(temperature=0.0, max_tokens=40)
NARROW, WIDE = 8, 8192  # numbers in a row: 32 bytes, and 32 KiB of which 8 go inline
TARGET = common_pb2.ModelInfo(hidden_size=8)


async def head(
    service: Service, width: int, policy: Policy = silent, *, name: str = "head", host: str = "here"
) -> FakeDrafter:
    """A drafter that needs features."""
    return await service.draft(policy, name=name, features=layout(width), target=TARGET, host=host)


def with_rows(policy: Policy) -> Policy:
    """A policy that does not draft past a missing row, as a head cannot."""

    def careful(seen: Seen) -> list[Draft]:
        return policy(seen) if seen.next_row_pos == len(seen.tokens) - 1 else []

    return careful


@pytest.mark.asyncio
async def test_a_prompts_rows_follow_its_chunks_and_the_first_verdict_brings_the_last_of_them(serve: Serve) -> None:
    service = await serve(MODEL, feature_width=NARROW, chunked_prefill_size=32, max_draft_wait_ms=0.0)
    drafter = await head(service, NARROW, with_rows(perfect(Truth([TEXT]))))
    assert drafter.enlisted.features == layout(NARROW)
    service.gate.close()
    task = asyncio.create_task(service.generate(request(PROMPT, PARAMS)))
    await service.gate.at_step()
    for end in (32, 64, 96, 100):
        await service.gate.pass_steps(1)
        await drafter.until(lambda end=end: any(s.next_row_pos == end for s in drafter.view.sessions.values()))
    (chunks, verdicts) = (
        [c for r in drafter.rounds for c in r.features],
        [v for r in drafter.rounds for v in r.verdicts],
    )
    assert [(c.rows.first_pos, c.rows.count) for c in chunks] == [(0, 32), (32, 32), (64, 32), (96, 3)]
    assert [(v.features.first_pos, v.features.count) for v in verdicts] == [(99, 1)]
    service.gate.open()
    assert tokens_of(await task) == TEXT[100:140]


@pytest.mark.asyncio
async def test_rows_of_accepted_nodes_are_those_of_the_committed_path(serve: Serve) -> None:
    service = await serve(MODEL, feature_width=NARROW)
    truth = Truth([TEXT])

    def bushy(seen: Seen) -> list[Draft]:
        coming = truth.after(seen.tokens, 4)
        if len(coming) < 4:
            return [Draft([])]
        aside = [(token + 1) % 32 for token in coming]
        return [Draft([aside[0], coming[0], aside[1], coming[1], coming[2], aside[2]], [-1, -1, 1, 1, 3, 3])]

    drafter = await service.patient_draft(with_rows(bushy), features=layout(NARROW), target=TARGET)
    assert tokens_of(await service.generate(request(PROMPT, PARAMS))) == TEXT[100:140]
    await service.inbox.idle()
    assert drafter.view.num_accepted > 20


@pytest.mark.asyncio
async def test_a_drafter_that_joins_late_gets_every_row_from_the_first_on(serve: Serve) -> None:
    service = await serve(MODEL, feature_width=NARROW, max_draft_wait_ms=0.0)
    service.gate.close(after=10)
    task = asyncio.create_task(service.generate(request(PROMPT, PARAMS)))
    await service.gate.at_step()
    drafter = await head(service, NARROW, with_rows(perfect(Truth([TEXT]))))
    await service.gate.pass_steps(1)
    await drafter.until(lambda: any(seen.next_row_pos == 107 for seen in drafter.view.sessions.values()))
    assert len(drafter.rounds[0].opened[0].tokens) == 4 * 108
    service.gate.open()
    assert tokens_of(await task) == TEXT[100:140]


@pytest.mark.asyncio
async def test_a_cached_prefix_still_has_its_rows(serve: Serve) -> None:
    service = await serve(MODEL, feature_width=NARROW)
    await service.generate(request(PROMPT, PARAMS))
    drafter = await head(service, NARROW)
    responses = await service.generate(request(PROMPT, PARAMS))
    assert responses[0].start.cached_tokens == 99
    assert tokens_of(responses) == TEXT[100:140]
    await drafter.until(lambda: drafter.view.closed)
    chunks = [chunk for frame in drafter.rounds for chunk in frame.features]
    assert sum(chunk.rows.count for chunk in chunks) == 99


@pytest.mark.asyncio
async def test_rows_of_a_preempted_session_are_not_sent_again(serve: Serve) -> None:
    service = await serve(MODEL, feature_width=NARROW, context=80, pages=100, disable_radix_cache=True)
    texts = [[n, *MODEL.greedy([n], 70)] for n in range(3)]
    drafter = await head(service, NARROW, with_rows(perfect(Truth(texts), 2)))
    params = SamplingParams(temperature=0.0, max_tokens=70)
    answers = await asyncio.gather(*(service.generate(request([n], params)) for n in range(3)))
    for text, responses in zip(texts, answers, strict=True):
        assert tokens_of(responses) == text[1:]
    await service.inbox.idle()
    assert service.engine.scheduler.num_preemptions > 0
    assert set(drafter.view.generations.values()) == {1}


def asking(service: Service, drafter: FakeDrafter, **fields: object) -> verify_pb2.StreamFeaturesRequest:
    seen = next(iter(drafter.view.sessions.values()))
    sound = {
        "session": seen.session,
        "generation": seen.generation,
        "boot_id": drafter.enlisted.boot_id,
        "first_pos": 0,
        "count": 10,
        "drafter_id": drafter.enlist.drafter_id,
        "features_token": drafter.enlisted.features_token,
    }
    return verify_pb2.StreamFeaturesRequest(**{**sound, **fields})


def shown_by(drafter: FakeDrafter) -> dict[str, object]:
    """What names a drafter in its calls."""
    return {"drafter_id": drafter.enlist.drafter_id, "features_token": drafter.enlisted.features_token}


async def fetch(service: Service, asked: verify_pb2.StreamFeaturesRequest) -> list[verify_pb2.StreamFeaturesResponse]:
    """All pieces, with the engine going on a step for each."""

    async def collect() -> list[verify_pb2.StreamFeaturesResponse]:
        return [piece async for piece in service.stub.StreamFeatures(asked)]

    task = asyncio.create_task(collect())
    num_answered = service.inbox.kinds.count(Ask)

    def moved() -> bool:
        return task.done() or service.inbox.kinds.count(Ask) > num_answered

    task.add_done_callback(lambda _: service.inbox.notify())
    while True:
        await service.inbox.until(moved)
        if task.done():
            return await task
        num_answered += 1
        await service.gate.pass_steps(1)


async def held_session(serve: Serve, *, width: int) -> tuple[Service, FakeDrafter, asyncio.Task[object]]:
    service = await serve(
        MODEL, feature_width=width, chunked_prefill_size=64, max_draft_wait_ms=0.0, disable_radix_cache=True, pages=256
    )
    drafter = await head(service, width)
    service.gate.close(after=4)
    task = asyncio.create_task(service.generate(request(PROMPT, SamplingParams(temperature=0.0, max_tokens=100))))
    await service.gate.at_step()
    await drafter.until(lambda: drafter.view.sessions and next(iter(drafter.view.sessions.values())).steps)
    return service, drafter, task


@pytest.mark.asyncio
@pytest.mark.parametrize(("width", "slots"), [(NARROW, 512), (WIDE, 12)])
async def test_a_drafter_on_the_same_host_finds_rows_in_shared_memory(serve: Serve, width: int, slots: int) -> None:
    outbox = {"drafter_outbox_bytes": slots * width * 4}
    service = await serve(MODEL, feature_width=width, chunked_prefill_size=8, max_draft_wait_ms=10_000.0, **outbox)
    drafter = await head(service, width, perfect(Truth([TEXT])), host=host_id())
    offered = drafter.enlisted.shared_memory
    assert (offered.num_slots, offered.slot_bytes) == (slots, width * 4)
    await service.inbox.until(lambda: not Path("/dev/shm", offered.name).exists())  # proven: the name goes
    responses = await service.generate(request(PROMPT, PARAMS))
    assert tokens_of(responses) == TEXT[100:140]
    await drafter.until(lambda: drafter.view.num_shared >= (101 if width == NARROW else 8))
    # More slots than there are get used: those that were read come round again. Until verify is told so, which may
    # take a while, rows go another way.
    for _ in range(100):
        if width == NARROW or drafter.view.num_shared > slots:
            return
        assert tokens_of(await service.generate(request(PROMPT, PARAMS))) == TEXT[100:140]
    raise AssertionError(f"{drafter.view.num_shared} rows went through {slots} slots")


@pytest.mark.asyncio
async def test_nobody_is_offered_memory_who_is_elsewhere_or_needs_no_rows(serve: Serve) -> None:
    service = await serve(MODEL, feature_width=NARROW)
    assert not (await head(service, NARROW)).enlisted.HasField("shared_memory")
    assert not (await service.draft(name="plain", host=host_id())).enlisted.HasField("shared_memory")
    wrong = await head(service, NARROW, name="liar", host=host_id())
    name = wrong.enlisted.shared_memory.name
    await wrong.close()
    await service.inbox.until(lambda: not Path("/dev/shm", name).exists())


@pytest.mark.asyncio
async def test_where_memory_is_short_a_small_ring_is_offered(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    def scarce(slot_bytes: int, num_slots: int) -> RowRing:
        if slot_bytes * num_slots > SMALL_RING_BYTES:
            raise OSError(errno.ENOSPC, "no space left")
        return RowRing(slot_bytes, num_slots)

    monkeypatch.setattr(feature_calls, "RowRing", scarce)
    service = await serve(MODEL, feature_width=WIDE, drafter_outbox_bytes=3 * SMALL_RING_BYTES)
    offered = (await head(service, WIDE, host=host_id())).enlisted.shared_memory
    assert offered.num_slots * offered.slot_bytes == SMALL_RING_BYTES


@pytest.mark.asyncio
async def test_wrong_use_of_shared_memory_is_logged_once_for_each_stream(serve: Serve) -> None:
    service = await serve(MODEL, feature_width=NARROW, max_draft_wait_ms=0.0)
    with capture_logs() as logs:
        for name in ("one", "other"):
            drafter = await head(service, NARROW, name=name, host=host_id())  # which sends the right nonce first
            for _ in range(2):
                frame = verify_pb2.Proposals(shared_memory_nonce=b"wrong", consumed_slot_seq=10**6)
                drafter.send_frame(verify_pb2.SpeculateRequest(proposals=frame))
        await service.inbox.until(lambda: service.inbox.kinds.count(ProposalsArrived) == 6)
        assert tokens_of(await service.generate(request(PROMPT, PARAMS))) == TEXT[100:140]
        await service.inbox.idle()
    mistakes = {
        "shared_memory_nonce is not what the ring's header begins with",
        "consumed_slot_seq is above the last row that was written",
    }
    told = [(line["drafter"], line["event"]) for line in logs if line["event"] in mistakes]
    assert sorted(told) == sorted((name, event) for name in ("one", "other") for event in mistakes)


@pytest.mark.asyncio
async def test_memory_for_drafters_that_do_not_show_that_they_see_it_is_bounded(serve: Serve) -> None:
    calls = (await serve(MODEL, feature_width=NARROW)).servicer._feature_calls
    rings = [calls.ring(4096) for _ in range(MAX_UNPROVEN_RINGS)]
    assert None not in rings
    assert calls.ring(4096) is None
    first = rings.pop(0)
    assert first is not None
    first.prove(first._nonce)
    rings.append(calls.ring(4096))
    assert rings[-1] is not None
    assert calls.ring(4096) is None
    for ring in filter(None, rings):
        ring.unlink()
    rings.clear()  # their drafters have left
    last = calls.ring(4096)
    assert last is not None
    last.unlink()


@pytest.mark.asyncio
async def test_those_drafters_get_small_rings_once_theirs_come_to_much(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = (await serve(MODEL, feature_width=WIDE)).servicer._feature_calls
    large = 2 * SMALL_RING_BYTES
    monkeypatch.setattr(feature_calls, "MAX_UNPROVEN_BYTES", large)
    rings = [ring for _ in range(2) if (ring := calls.ring(large)) is not None]
    assert [ring.num_slots * ring.slot_bytes for ring in rings] == [large, SMALL_RING_BYTES]
    for ring in rings:
        ring.prove(ring._nonce)
    third = calls.ring(large)
    assert third is not None
    assert third.num_slots * third.slot_bytes == large
    for ring in (*rings, third):
        ring.unlink()


@pytest.mark.asyncio
async def test_rows_too_many_for_a_frame_are_announced_and_fetched_in_pieces(serve: Serve) -> None:
    service, drafter, task = await held_session(serve, width=WIDE)
    seen = next(iter(drafter.view.sessions.values()))
    announced = [(rows.first_pos, rows.count) for rows in seen.announced]
    assert announced[:2] == [(0, 64), (64, 35)]
    pieces = await fetch(service, asking(service, drafter, first_pos=64, count=35))
    assert [piece.first_pos for piece in pieces] == [64, 72, 80, 88, 96]
    assert all(len(piece.rows.data) <= INLINE_FEATURE_BYTES for piece in pieces)
    assert sum(check_rows(TEXT, piece.first_pos, piece.rows) for piece in pieces) == 35
    service.gate.open()
    await task


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"boot_id": "another"}, grpc.StatusCode.NOT_FOUND),
        ({"session": 4711}, grpc.StatusCode.NOT_FOUND),
        ({"generation": 2}, grpc.StatusCode.NOT_FOUND),
        ({"features_token": b""}, grpc.StatusCode.NOT_FOUND),
        ({"features_token": bytes(16)}, grpc.StatusCode.NOT_FOUND),
        ({"drafter_id": "another"}, grpc.StatusCode.NOT_FOUND),
        ({"first_pos": 150}, grpc.StatusCode.NOT_FOUND),
        ({"first_pos": 2**32 - 1}, grpc.StatusCode.NOT_FOUND),
        ({"count": 0}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"count": 2**32 - 1}, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_rows_that_are_not_there_or_not_the_askers_are_not_found(
    serve: Serve, fields: dict[str, object], status: grpc.StatusCode
) -> None:
    service, drafter, task = await held_session(serve, width=NARROW)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await fetch(service, asking(service, drafter, **fields))
    assert caught.value.code() is status
    assert len(await fetch(service, asking(service, drafter))) == 1
    service.gate.open()
    await task


@pytest.mark.asyncio
async def test_reads_without_end_do_not_lengthen_a_step(serve: Serve) -> None:
    service = await serve(MODEL, feature_width=NARROW, max_draft_wait_ms=0.0)
    held = await hold(service, after=5, features=layout(NARROW), target=TARGET)
    others = [await head(service, NARROW, name=f"other-{n}") for n in range(5)]
    reads: list[asyncio.Task[int]] = []
    for drafter in (held.drafter, *others):
        asked = asking(service, held.drafter, count=2, **shown_by(drafter))
        reads += [asyncio.create_task(num_rows(service, asked)) for _ in range(MAX_CALLS_PER_DRAFTER)]
    await service.inbox.until(lambda: service.inbox.kinds.count(Ask) >= MAX_FEATURE_READS)
    await service.stub.GetServerInfo(verify_pb2.VerifyServiceGetServerInfoRequest())  # all reads have come before it
    assert service.inbox.kinds.count(Ask) == MAX_FEATURE_READS
    while not all(each.done() for each in reads):
        await service.gate.pass_steps(1)
        await service.stub.GetServerInfo(verify_pb2.VerifyServiceGetServerInfoRequest())
    found = [await each for each in reads]
    assert found == [2] * MAX_CALLS_PER_DRAFTER + [0] * (len(reads) - MAX_CALLS_PER_DRAFTER)
    assert await held.finish() == OUTPUT[:60]


@pytest.mark.asyncio
async def test_reads_of_callers_that_left_count_until_the_engine_has_done_them(serve: Serve) -> None:
    service, drafter, task = await held_session(serve, width=NARROW)
    calls = service.servicer._feature_calls
    for _ in range(2 * MAX_FEATURE_READS):
        reading = asyncio.ensure_future(anext(calls.pieces(asking(service, drafter))))
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait([reading])
    assert service.inbox.kinds.count(Ask) == MAX_FEATURE_READS
    await service.gate.pass_steps(1)
    assert len(await fetch(service, asking(service, drafter))) == 1
    service.gate.open()
    await task


async def num_rows(service: Service, asked: verify_pb2.StreamFeaturesRequest) -> int:
    """Rows that a call brings before it ends or is refused."""
    found = 0
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for piece in service.stub.StreamFeatures(asked):
            found += piece.rows.shape[0]
    return found


@pytest.mark.asyncio
async def test_nobody_reads_the_rows_of_a_drafter_whose_name_he_took(serve: Serve) -> None:
    service, drafter, task = await held_session(serve, width=NARROW)
    service.gate.open()
    await task
    await drafter.until(lambda: not drafter.view.sessions)
    service.gate.close(after=4)
    task = asyncio.create_task(service.generate(request(PROMPT, PARAMS)))
    await service.gate.at_step()
    await drafter.until(lambda: drafter.view.sessions)
    thief = await head(service, NARROW, name="head")
    assert thief.enlist.drafter_id == drafter.enlist.drafter_id
    token = thief.enlisted.features_token
    assert len(token) == 16
    assert token != drafter.enlisted.features_token
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await fetch(service, asking(service, drafter, features_token=token))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert len(await fetch(service, asking(service, drafter))) == 1
    service.gate.open()
    await task


@pytest.mark.asyncio
async def test_calls_for_rows_are_bounded_for_each_drafter_and_for_all(serve: Serve) -> None:
    service, drafter, task = await held_session(serve, width=NARROW)

    async def refused(asked: verify_pb2.StreamFeaturesRequest) -> str:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(service.stub.StreamFeatures(asked)))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        return str(caught.value.details())

    calls = []
    gone = drafter
    for n in range(MAX_CALLS // MAX_CALLS_PER_DRAFTER):
        gone = await head(service, NARROW, name=f"other-{n}")
        asked = asking(service, drafter, **shown_by(gone))
        calls += [service.stub.StreamFeatures(asked) for _ in range(MAX_CALLS_PER_DRAFTER)]
        await service.stub.GetServerInfo(verify_pb2.VerifyServiceGetServerInfoRequest())  # all have come before it
        assert await refused(asked) == "8 StreamFeatures calls of this drafter are open; at most 8 may be"
    await gone.close()  # its calls still count
    assert await refused(asking(service, drafter)) == (
        "256 StreamFeatures calls of all drafters are open; at most 256 may be"
    )
    asked = asking(service, drafter, session=4711)
    for call in calls:
        call.cancel()
    service.gate.open()
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    while code is grpc.StatusCode.RESOURCE_EXHAUSTED:  # until the last of them have been noticed to be gone
        code = await service.stub.StreamFeatures(asked).code()
    assert code is grpc.StatusCode.NOT_FOUND
    await task


@pytest.mark.asyncio
async def test_a_server_that_keeps_no_rows_says_so(serve: Serve) -> None:
    service = await serve(MODEL)
    drafter = await service.draft()
    asked = verify_pb2.StreamFeaturesRequest(
        session=1, generation=1, boot_id=drafter.enlisted.boot_id, count=1, drafter_id=drafter.enlist.drafter_id
    )
    with pytest.raises(grpc.aio.AioRpcError, match="keeps no features") as caught:
        await anext(aiter(service.stub.StreamFeatures(asked)))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
