"""What a drafter gets that breaks a rule, and that nobody else gets anything of it."""

from __future__ import annotations

import asyncio
import gc
import struct
import weakref
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from outrider import rpc
from outrider.errors import ResourceExhausted
from outrider.v1 import common_pb2, verify_pb2
from outrider.wire import WIRE_VERSION, pack_ids
from tests.drafter_view import Draft
from tests.fake_drafters import Truth, perfect
from tests.verify_service.conftest import Serve, tokens_of
from tests.verify_service.held import LONG, MODEL, OUTPUT, PROMPT, TEXT, Held, hold
from tests.verify_service.rig import request
from verify_service import hosts, speculate
from verify_service.app import SERVICE
from verify_service.commands import DrafterJoined, DrafterLeft, ProposalsArrived, Submit
from verify_service.drafter import MAX_EXPLAINED

NODES = [5, 6]


def proposal(held: Held, **fields: Any) -> verify_pb2.Proposal:
    """A sound proposal of two nodes, but for `fields`."""
    sound = {
        "session": held.seen.session,
        "generation": held.seen.generation,
        "proposal_id": 1,
        "base_len": len(held.seen.tokens),
        "tokens": pack_ids(NODES),
        "parents": pack_ids([-1, 0]),
    }
    return verify_pb2.Proposal(**{**sound, **fields})


MALFORMED: dict[str, tuple[dict[str, Any], str]] = {
    "a parent behind its child": ({"parents": pack_ids([1, -1])}, "parents[0] is 1; it must be -1, the root"),
    "a node that is its own parent": ({"parents": pack_ids([-1, 1])}, "parents[1] is 1"),
    "a parent before the root": ({"parents": pack_ids([-2, 0])}, "parents[0] is -2"),
    "two siblings with one token": (
        {"tokens": pack_ids([5, 5]), "parents": pack_ids([-1, -1])},
        "tokens[1] repeats token 5 of its sibling 0",
    ),
    "too few parents": ({"parents": pack_ids([-1])}, "2 tokens but 1 parents"),
    "bytes that are no ids": ({"tokens": b"12345"}, "tokens: 5 bytes"),
    "a token outside the vocabulary": ({"tokens": pack_ids([5, 32])}, "tokens[1] is 32"),
    "a negative token": ({"tokens": pack_ids([-1, 5])}, "tokens[0] is -1"),
    "an assumed token outside the vocabulary": ({"assumed": pack_ids([99])}, "assumed[0] is 99"),
    "a base_len inside the prompt": ({"base_len": 1}, "base_len is 1; it must be from the prompt's 2"),
    "a base_len not committed yet": ({"base_len": 4}, "base_len is 4; it must be from the prompt's 2 to 3"),
    "a base_len that no int holds": ({"base_len": 2**32 - 1}, "base_len is 4294967295"),
    "too many assumed tokens": ({"assumed": pack_ids([1] * 6)}, "assumed has 6 tokens; at most 5 are taken"),
    "too many nodes": (
        {"tokens": pack_ids([1] * 8), "parents": pack_ids(np.arange(-1, 7))},
        "8 nodes; at most 7 are taken",
    ),
    "scores of other nodes": ({"scores": b"\0\0\0"}, "2 nodes but 3 scores"),
    "bits of other nodes": ({"from_prediction": b"\0\0"}, "from_prediction has 2 bytes; 2 nodes need 1"),
    "no id": ({"proposal_id": 0}, "proposal_id is 0; ids begin at 1"),
    "a huge array": ({"tokens": struct.pack("<i", 7) * 100_000}, "100000 tokens but 2 parents"),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", MALFORMED)
async def test_a_malformed_proposal_loses_the_drafter_its_session_and_nobody_else_anything(
    serve: Serve, kind: str
) -> None:
    fields, detail = MALFORMED[kind]
    service = await serve(MODEL, max_proposal_nodes=7, max_assumed_tokens=5, max_draft_wait_ms=0.0)
    held = await hold(service)
    victim = held.seen.key
    spare = await service.draft(perfect(Truth([TEXT])), name="spare")
    await held.send(proposal(held, **fields))
    await service.gate.pass_steps(1)
    await held.drafter.until(lambda: held.drafter.view.closed)
    assert held.drafter.view.closed == {victim: verify_pb2.CLOSE_REASON_QUARANTINED}
    (rejected,) = held.drafter.view.rejected
    assert rejected.reason == verify_pb2.REJECT_REASON_MALFORMED
    assert rejected.proposal_id == fields.get("proposal_id", 1)
    assert detail in rejected.detail
    await service.gate.pass_steps(1)
    await spare.until(lambda: spare.view.sessions)
    assert list(spare.view.sessions) == [(victim[0], 2)]
    # The stream goes on, for sessions that are its own and sound.
    held.drafter.policy = perfect(Truth([TEXT]))
    await spare.close()
    await service.inbox.until(lambda: DrafterLeft in service.inbox.kinds)
    service.gate.open()
    again, first = await asyncio.gather(service.generate(request(PROMPT, LONG)), held.task)
    assert tokens_of(again) == tokens_of(first) == OUTPUT[:60]
    await service.inbox.idle()
    assert victim[0] not in {key[0] for key in held.drafter.view.closed if key != victim}
    assert not held.drafter.has_ended


@pytest.mark.asyncio
async def test_a_replayed_proposal_is_verified_once(serve: Serve) -> None:
    service = await serve(MODEL, max_draft_wait_ms=0.0)
    held = await hold(service)
    sent = held.drafter.view.propose(held.seen, Draft(OUTPUT[1:4], assumed=OUTPUT[:1]))
    await held.send(sent, sent)
    await held.send(sent)
    assert await held.finish() == OUTPUT[:60]
    assert held.drafter.view.num_credits == 1
    assert [rejected.reason for rejected in held.drafter.view.rejected] == [verify_pb2.REJECT_REASON_REPLAYED] * 2


@pytest.mark.asyncio
async def test_of_stale_proposals_the_first_few_are_explained(serve: Serve) -> None:
    service = await serve(MODEL, max_draft_wait_ms=0.0)
    held = await hold(service)
    wrong = (OUTPUT[0] + 1) % 32
    count = MAX_EXPLAINED + 2
    numbers = range(1, count + 1)
    await held.send(*(proposal(held, proposal_id=n, base_len=2, assumed=pack_ids([wrong])) for n in numbers))
    await service.gate.pass_steps(1)
    await held.drafter.until(lambda: len(held.drafter.view.rejected) == count)
    assert {rejected.reason for rejected in held.drafter.view.rejected} == {verify_pb2.REJECT_REASON_STALE}
    explained = [f"assumed[0] is {wrong}; {OUTPUT[0]} is committed at 2"] * MAX_EXPLAINED
    assert [rejected.detail for rejected in held.drafter.view.rejected] == [*explained, "", ""]
    assert await held.finish() == OUTPUT[:60]


@pytest.mark.asyncio
@pytest.mark.parametrize("fields", [{"session": 4711}, {"generation": 0}, {"generation": 2}])
async def test_a_proposal_for_what_is_not_its_own_is_foreign_whatever_else_is_wrong_with_it(
    serve: Serve, fields: dict[str, int]
) -> None:
    service = await serve(MODEL, max_draft_wait_ms=0.0)
    held = await hold(service)
    await held.send(proposal(held, tokens=pack_ids([99, 99]), **fields))
    await service.gate.pass_steps(1)
    await held.drafter.until(lambda: held.drafter.view.rejected)
    assert held.drafter.view.rejected[0].reason == verify_pb2.REJECT_REASON_FOREIGN
    assert held.seen.key == (held.seen.session, 1)
    assert await held.finish() == OUTPUT[:60]


@pytest.mark.asyncio
async def test_another_drafters_session_is_as_foreign_as_one_that_does_not_exist(serve: Serve) -> None:
    service = await serve(MODEL, max_draft_wait_ms=0.0)
    held = await hold(service)
    stranger = await service.draft(name="stranger")
    stranger.send(proposal(held, tokens=pack_ids(OUTPUT[:2])), proposal(held, session=4711))
    await service.inbox.until(lambda: ProposalsArrived in service.inbox.kinds)
    await service.gate.pass_steps(1)
    await stranger.until(lambda: len(stranger.view.rejected) == 2)
    own, none = stranger.view.rejected
    assert own.reason == none.reason == verify_pb2.REJECT_REASON_FOREIGN
    assert own.detail == none.detail == ""
    assert await held.finish() == OUTPUT[:60]
    assert held.drafter.view.num_credits == 0


@pytest.mark.asyncio
async def test_of_too_many_proposals_the_newest_are_kept(serve: Serve) -> None:
    service = await serve(MODEL, max_proposals_per_session=3, max_draft_wait_ms=0.0)
    held = await hold(service)
    await held.propose(*(Draft(OUTPUT[1:3], assumed=OUTPUT[:1]) for _ in range(8)))
    assert await held.finish() == OUTPUT[:60]
    crowded = [r.proposal_id for r in held.drafter.view.rejected if r.reason == verify_pb2.REJECT_REASON_CROWDED]
    assert crowded == [1, 2, 3, 4, 5]
    credits = [credit.proposal_id for frame in held.drafter.rounds for v in frame.verdicts for credit in v.credits]
    assert credits == [8]


@pytest.mark.asyncio
async def test_a_flood_ends_its_own_stream_and_no_other(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "_FIRST_S", 60.0)  # for which it does not come back
    monkeypatch.setattr(hosts, "_HELD_S", 0.0)
    service = await serve(MODEL, max_draft_wait_ms=0.0)
    held = await hold(service)
    good = await service.draft(perfect(Truth([TEXT])), name="good", max_sessions=1)
    flood = [proposal(held, generation=9, proposal_id=number) for number in range(3000)]
    for _ in range(4):
        held.drafter.send(*flood)
    service.gate.open()
    error = await held.drafter.finished()
    assert error is not None
    assert isinstance(rpc.error_from_rpc(error), ResourceExhausted)
    assert tokens_of(await held.task) == OUTPUT[:60]
    assert tokens_of(await service.generate(request(PROMPT, LONG))) == OUTPUT[:60]
    await service.inbox.idle()
    assert good.view.generations
    assert [drafter.drafter_id for drafter in service.engine.drafters] == ["good"]
    with pytest.raises(grpc.aio.AioRpcError, match="was thrown out; its next one may enlist in") as refused:
        await service.draft(name="again")
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["late declines", "releases", "few that are kept"])
async def test_what_is_never_wrong_by_itself_is_a_flood_too(serve: Serve, kind: str) -> None:
    service = await serve(MODEL, max_draft_wait_ms=0.0)
    held = await hold(service)
    await service.gate.pass_steps(2)
    release = verify_pb2.Release(session=4711, generation=1)
    numbers = iter(range(1, 20_000))
    junk = {"base_len": held.seen.prompt_len, "tokens": b"", "parents": b""}
    for _ in range(3):
        if kind == "releases":
            releases = verify_pb2.Releases(releases=[release] * 3000)
            held.drafter.send_frame(verify_pb2.SpeculateRequest(releases=releases))
        else:
            if kind == "few that are kept":
                junk = {"generation": 9}
                held.drafter.send(proposal(held, proposal_id=next(numbers), tokens=b"", parents=b""))
            held.drafter.send(*(proposal(held, proposal_id=next(numbers), **junk) for _ in range(3000)))
    service.gate.open()
    error = await held.drafter.finished()
    assert error is not None
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert tokens_of(await held.task) == OUTPUT[:60]


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["flood", "large frame"])
async def test_what_a_stream_held_goes_with_it_and_waits_for_no_collector(serve: Serve, how: str) -> None:
    service = await serve(MODEL, max_draft_wait_ms=0.0)
    held = await hold(service)
    gc.collect()
    gc.disable()
    try:
        (stream,) = (weakref.ref(stream) for stream in service.servicer._streams)
        held.drafter.send(*[proposal(held, generation=9)] * (5000 if how == "flood" else 16_385))
        service.gate.open()
        assert await held.drafter.finished() is not None
        await held.task
        await service.inbox.idle()
        async with asyncio.timeout(60):
            while stream() is not None:  # noqa: ASYNC110  gRPC has a hand on it for a moment
                await asyncio.sleep(0)
    finally:
        gc.enable()


@pytest.mark.asyncio
async def test_a_frame_of_too_many_releases_ends_the_stream(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "_FIRST_S", 60.0)  # for which it does not come back
    monkeypatch.setattr(hosts, "_HELD_S", 0.0)
    monkeypatch.setattr(speculate, "MAX_ENTRIES", 10)
    service = await serve(MODEL, max_draft_wait_ms=0.0)
    held = await hold(service)
    held.drafter.send_frame(
        verify_pb2.SpeculateRequest(releases=verify_pb2.Releases(releases=[verify_pb2.Release()] * 11))
    )
    error = await held.drafter.finished()
    assert error is not None
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "11 releases; at most 10" in (error.details() or "")
    with pytest.raises(grpc.aio.AioRpcError, match="was thrown out"):
        await service.draft(name="again")
    assert await held.finish() == OUTPUT[:60]


@pytest.mark.asyncio
async def test_large_frames_wait_outside_while_the_engine_is_busy(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames are a third of what may be in flight: three are taken during a step, and all in the end."""
    service = await serve(MODEL, max_draft_wait_ms=0.0)
    held = await hold(service)
    large = proposal(held, session=4711, assumed=pack_ids([1] * 1000))
    frame = verify_pb2.SpeculateRequest(proposals=verify_pb2.Proposals(proposals=[large]))
    monkeypatch.setattr(speculate, "BYTES_IN_FLIGHT", 3 * speculate.held_bytes(frame))
    for _ in range(10):
        held.drafter.send(large)
    running = asyncio.create_task(service.generate(request(PROMPT, LONG)))
    await service.inbox.until(lambda: service.inbox.kinds.count(Submit) == 2)
    await service.inbox.until(lambda: service.inbox.kinds.count(ProposalsArrived) >= 3)
    for _ in range(20):  # time for more to come
        await service.stub.GetServerInfo(verify_pb2.VerifyServiceGetServerInfoRequest())
    assert service.inbox.kinds.count(ProposalsArrived) == 3
    service.gate.open()
    assert tokens_of(await running) == tokens_of(await held.task) == OUTPUT[:60]
    await held.drafter.until(lambda: len(held.drafter.view.rejected) == 10)


@pytest.mark.asyncio
async def test_a_frame_of_too_many_proposals_ends_the_stream(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculate, "MAX_ENTRIES", 10)
    service = await serve(MODEL, max_draft_wait_ms=0.0)
    held = await hold(service)
    held.drafter.send(*(proposal(held) for _ in range(11)))
    error = await held.drafter.finished()
    assert error is not None
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "11 proposals; at most 10" in (error.details() or "")
    assert await held.finish() == OUTPUT[:60]


@pytest.mark.asyncio
async def test_bytes_that_are_no_frame_end_the_stream_and_the_session_goes_on(serve: Serve) -> None:
    service = await serve(MODEL, max_draft_wait_ms=0.0)
    call = service.channel.stream_stream(f"/{SERVICE}/Speculate", None, None)(None)
    enlist = verify_pb2.Enlist(
        drafter_id="raw", wire_version=WIRE_VERSION, algorithm=common_pb2.ALGORITHM_NGRAM, max_sessions=1
    )
    await call.write(verify_pb2.SpeculateRequest(enlist=enlist).SerializeToString())
    answer = await call.read()
    assert isinstance(answer, bytes)
    assert verify_pb2.SpeculateResponse.FromString(answer).HasField("enlisted")
    await service.inbox.until(lambda: DrafterJoined in service.inbox.kinds)
    await call.write(b"\xff\xff\xff\xff")
    with pytest.raises(grpc.aio.AioRpcError, match="no message of this method") as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await service.inbox.until(lambda: DrafterLeft in service.inbox.kinds)
    assert tokens_of(await service.generate(request(PROMPT, LONG))) == OUTPUT[:60]
