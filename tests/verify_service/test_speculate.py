"""The Speculate stream: proposals, hints and sessions that change hands, over a real channel with fake drafters."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict

import grpc
import grpc.aio
import pytest

from outrider.sampling import SamplingParams
from outrider.v1 import verify_pb2
from outrider.wire import pack_ids
from tests.drafter_view import Draft, Seen
from tests.fake_drafters import Truth, declining, early, perfect, random_trees, silent, wrong
from tests.verify_service.conftest import Serve, tokens_of
from tests.verify_service.held import LONG, MODEL, OUTPUT, PROMPT, TEXT, hold
from tests.verify_service.rig import request
from verify_service.commands import Cancel, DrafterLeft, Released


@pytest.mark.asyncio
async def test_an_early_proposal_is_verified_as_soon_as_what_it_assumes_has_come_true(serve: Serve) -> None:
    service = await serve(MODEL, max_draft_wait_ms=0.0)
    held = await hold(service)  # in the step that computes the prompt
    await held.propose(
        Draft(OUTPUT[2:5], assumed=[OUTPUT[0], OUTPUT[1] ^ 1]),  # a guess that fails
        Draft(OUTPUT[1:4], assumed=OUTPUT[:1]),
        Draft(OUTPUT[6:9], assumed=OUTPUT[:6]),  # pends for a step more
    )
    await service.gate.pass_steps(1)
    await held.drafter.until(lambda: held.seen.steps)
    assert held.seen.next.kind == verify_pb2.NEXT_KIND_PROPOSAL
    assert (held.seen.next.proposal_id, held.seen.next.root_node, held.seen.next.nodes_kept) == (2, -1, 3)
    assert [(r.proposal_id, r.reason) for r in held.drafter.view.rejected] == []
    await service.gate.pass_steps(1)
    await held.drafter.until(lambda: held.seen.steps == 2)
    assert service.runner.widest == 4
    assert held.seen.tokens == TEXT[:7]
    (credit,) = held.drafter.rounds[-1].verdicts[0].credits
    assert (credit.proposal_id, credit.nodes_verified, list(credit.accepted_nodes)) == (2, 3, [0, 1, 2])
    assert held.drafter.view.rejected[0] == verify_pb2.Rejected(
        session=held.seen.session, generation=1, proposal_id=1, reason=verify_pb2.REJECT_REASON_STALE,
        detail=f"assumed[1] is {OUTPUT[1] ^ 1}; {OUTPUT[1]} is committed at 3",
    )  # fmt: skip
    await service.gate.pass_steps(1)  # plain: the third proposal is one token ahead still
    await held.drafter.until(lambda: held.seen.next.proposal_id == 3)
    assert await held.finish() == OUTPUT[:60]
    assert held.drafter.view.num_accepted == 6


@pytest.mark.asyncio
async def test_a_proposal_overtaken_by_plain_decoding_is_rerooted(serve: Serve) -> None:
    service = await serve(MODEL, max_draft_wait_ms=0.0)
    held = await hold(service, after=2)
    # It saw the prompt alone; since then two tokens came, the first two nodes of one of its branches.
    other = next(token for token in range(32) if token not in OUTPUT[:6])
    tokens = [other, *OUTPUT[:6], other]
    parents = [-1, -1, 1, 2, 3, 4, 5, 2]
    before = verify_pb2.Proposal(
        session=held.seen.session,
        generation=1,
        proposal_id=1,
        base_len=2,
        tokens=pack_ids(tokens),
        parents=pack_ids(parents),
    )
    held.drafter.view.propose(held.seen, Draft(tokens, parents)).proposal_id = 1
    held.seen.sent[1].base_len = 2
    await held.send(before)
    await service.gate.pass_steps(1)
    await held.drafter.until(lambda: held.seen.next.kind == verify_pb2.NEXT_KIND_PROPOSAL)
    assert (held.seen.next.root_node, held.seen.next.nodes_kept) == (3, 3)
    await service.gate.pass_steps(1)
    await held.drafter.until(lambda: held.drafter.view.num_credits)
    (credit,) = held.drafter.rounds[-1].verdicts[0].credits
    assert (credit.root_node, list(credit.accepted_nodes)) == (3, [4, 5, 6])
    assert await held.finish() == OUTPUT[:60]


@pytest.mark.asyncio
async def test_whom_verify_waits_for_is_told(serve: Serve) -> None:
    service = await serve(MODEL)
    truth = Truth([TEXT])

    def policy(seen: Seen) -> list[Draft]:
        return perfect(truth, 3)(seen) if len(seen.tokens) < 20 else declining(seen)

    fake = await service.patient_draft(policy)
    assert tokens_of(await service.generate(request(PROMPT, LONG))) == OUTPUT[:60]
    await fake.until(lambda: fake.view.closed)
    assert {verify_pb2.NEXT_KIND_WAITING, verify_pb2.NEXT_KIND_NONE} <= fake.view.kinds
    assert fake.view.num_accepted >= 12


@pytest.mark.asyncio
async def test_who_let_waits_run_out_is_told_of_plain_steps_instead(serve: Serve) -> None:
    service = await serve(MODEL, max_draft_wait_ms=0.0)
    held = await hold(service)
    for _ in range(6):
        await service.gate.pass_steps(1)
    await held.drafter.until(lambda: verify_pb2.NEXT_KIND_PLAIN in held.drafter.view.kinds)
    assert await held.finish() == OUTPUT[:60]


@pytest.mark.asyncio
async def test_a_preempted_session_stays_its_drafters_and_is_told_that_no_step_starts(serve: Serve) -> None:
    service = await serve(MODEL, context=80, pages=90, disable_radix_cache=True)
    truth = Truth([[n, 2, *MODEL.greedy([n, 2], 70)] for n in range(3)])
    fake = await service.patient_draft(perfect(truth, 2))
    params = SamplingParams(temperature=0.0, max_tokens=70)
    answers = await asyncio.gather(*(service.generate(request([n, 2], params)) for n in range(3)))
    for text, responses in zip(truth.texts, answers, strict=True):
        assert tokens_of(responses) == text[2:]
    await fake.until(lambda: len(fake.view.closed) == 3)
    await service.inbox.idle()
    assert service.engine.scheduler.num_preemptions > 0
    told: dict[int, list[verify_pb2.NextKind]] = defaultdict(list)
    for verdict in (verdict for frame in fake.rounds for verdict in frame.verdicts):
        told[verdict.session].append(verdict.next.kind)
    assert any(verify_pb2.NEXT_KIND_NONE in kinds[:-1] for kinds in told.values())  # the last one's is the end
    assert set(fake.view.generations.values()) == {1}


@pytest.mark.asyncio
@pytest.mark.parametrize("policy", ["wrong", "random", "early", "perfect", "declining", "silent"])
async def test_no_policy_changes_an_answer(serve: Serve, policy: str) -> None:
    rng, truth = random.Random(3), Truth([TEXT])
    service = await serve(MODEL)
    make = {
        "wrong": wrong(truth, 32),
        "random": random_trees(truth, 32, rng),
        "early": early(truth, 32, rng),
        "perfect": perfect(truth),
        "declining": declining,
        "silent": silent,
    }
    # Whom one waits for patiently must answer each time.
    enlist = service.patient_draft if policy in ("wrong", "random", "declining") else service.draft
    await enlist(make[policy])
    params = SamplingParams(temperature=1.0, seed=8, max_tokens=60)
    greedy, sampled = await asyncio.gather(
        service.generate(request(PROMPT, LONG)), service.generate(request(PROMPT, params))
    )
    assert tokens_of(greedy) == OUTPUT[:60]
    assert tokens_of(sampled) == MODEL.decode(PROMPT, params, seed=8, max_len=256)


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["dies", "leaves", "releases"])
async def test_a_session_goes_to_the_next_drafter(serve: Serve, how: str) -> None:
    service = await serve(MODEL, max_draft_wait_ms=0.0)
    held = await hold(service, after=3)
    await held.propose(Draft(OUTPUT[3:5]))
    second = await service.draft(perfect(Truth([TEXT])), name="second")
    if how == "dies":
        await held.drafter.close()
    elif how == "leaves":
        held.drafter.half_close()
    else:
        held.drafter.release(held.seen)
    gone = Released if how == "releases" else DrafterLeft
    await service.inbox.until(lambda: gone in service.inbox.kinds)
    if how == "leaves":
        assert await held.drafter.finished() is None
    await service.gate.pass_steps(2)
    await second.until(lambda: second.view.sessions)
    ((session, generation),) = second.view.sessions
    assert generation == 2
    opened = second.rounds[0].opened[0]
    assert opened.session == session
    assert opened.prompt_len == 2
    assert len(opened.tokens) // 4 + opened.remaining_tokens == 62
    service.gate.open()
    assert tokens_of(await held.task) == OUTPUT[:60]
    await service.inbox.idle()
    if how == "releases":
        assert held.drafter.view.closed == {(session, 1): verify_pb2.CLOSE_REASON_REASSIGNED}


@pytest.mark.asyncio
async def test_what_is_cancelled_is_closed_to_its_drafter(serve: Serve) -> None:
    service = await serve(MODEL, max_draft_wait_ms=0.0)
    fake = await service.draft()
    service.gate.close(after=3)
    call = service.stub.Generate(request(PROMPT, LONG))
    await anext(aiter(call))
    await service.gate.at_step()
    call.cancel()
    await service.inbox.until(lambda: Cancel in service.inbox.kinds)
    service.gate.open()
    await fake.until(lambda: fake.view.closed)
    assert list(fake.view.closed.values()) == [verify_pb2.CLOSE_REASON_CANCELLED]


@pytest.mark.asyncio
async def test_who_reads_too_slowly_loses_a_session_and_who_reads_nothing_the_stream(serve: Serve) -> None:
    service = await serve(
        MODEL, context=12_000, pages=2**17, drafter_outbox_bytes=60_000, max_draft_wait_ms=0.0,
        chunked_prefill_size=12_000, disable_radix_cache=True,
    )  # fmt: skip
    slow = await service.draft(name="slow", narrow=True)
    slow.reads.clear()
    drafter = service.drafter(slow)
    short = SamplingParams(temperature=0.0, max_tokens=2)
    number = 0
    while service.drafter(slow) is not None:
        number += 1
        assert number < 100
        prompt = [number % 32] + [3] * 10_000
        assert tokens_of(await service.generate(request(prompt, short))) == MODEL.greedy(prompt, 2)
        assert drafter is not None
        assert drafter.outbox.num_bytes < 2 * 60_000
    await service.inbox.until(lambda: DrafterLeft in service.inbox.kinds)  # its stream holds nothing any more
    slow.reads.set()
    error = await slow.finished()
    assert error is not None
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "bytes wait to be read" in (error.details() or "")
    assert tokens_of(await service.generate(request(PROMPT, LONG))) == OUTPUT[:60]
