"""The Speculate stream: every message of it, well meant and not, over a real channel with fake drafters."""

from __future__ import annotations

import asyncio
import random
import struct
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from outrider import rpc
from outrider.errors import FailedPrecondition, InvalidArgument, OutriderError, ResourceExhausted
from outrider.sampling import SamplingParams
from outrider.v1 import common_pb2, verify_pb2
from outrider.wire import WIRE_VERSION, pack_ids
from tests.fake_drafters import Draft, FakeDrafter, Seen, Truth, declining, early, perfect, random_trees, silent, wrong
from tests.fakes import ToyModel
from tests.verify_service.conftest import FINGERPRINT, Serve, Service, layout
from tests.verify_service.rig import request
from tests.verify_service.test_service import tokens_of
from verify_service import speculate
from verify_service.app import SERVICE
from verify_service.commands import DrafterJoined, DrafterLeft, ProposalsArrived, Released

MODEL = ToyModel(vocab_size=32, order=3)
PROMPT = [4, 2]
OUTPUT = MODEL.greedy(PROMPT, 100)
TEXT = PROMPT + OUTPUT
LONG = SamplingParams(temperature=0.0, max_tokens=60)


class Held:
    """A session held at the gate of a step, and its drafter."""

    def __init__(self, service: Service, drafter: FakeDrafter, task: asyncio.Task[Any]) -> None:
        self.service = service
        self.drafter = drafter
        self.task = task

    @property
    def seen(self) -> Seen:
        (seen,) = self.drafter.view.sessions.values()
        return seen

    async def propose(self, *drafts: Draft) -> None:
        """Sends proposals and waits until the engine's inbox has them."""
        await self.send(*(self.drafter.view.propose(self.seen, draft) for draft in drafts))

    async def send(self, *proposals: verify_pb2.Proposal) -> None:
        before = self.service.inbox.kinds.count(ProposalsArrived)
        self.drafter.send(*proposals)
        await self.service.inbox.until(lambda: self.service.inbox.kinds.count(ProposalsArrived) > before)

    async def finish(self) -> list[int]:
        """Lets everything run; returns the answer."""
        self.service.gate.open()
        tokens = tokens_of(await self.task)
        await self.service.inbox.idle()
        return tokens


async def hold(service: Service, *, after: int = 0, params: SamplingParams = LONG, **drafter: Any) -> Held:
    """A session with a drafter that is silent by itself, held before its step number `after` + 1."""
    fake = await service.draft(silent, **drafter)
    service.gate.close(after)
    task = asyncio.create_task(service.generate(request(PROMPT, params)))
    await service.gate.at_step()
    await fake.until(lambda: fake.view.sessions)
    return Held(service, fake, task)


async def refusal(service: Service, **settings: Any) -> OutriderError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.draft(**settings)
    return rpc.error_from_rpc(caught.value)


# ---- enlisting


@pytest.mark.asyncio
async def test_who_enlists_is_told_the_target_and_its_own_limits(serve: Serve) -> None:
    service = await serve(MODEL, max_proposal_nodes=20, max_verify_nodes=9, max_running_requests=4)
    fake = await service.draft(target=common_pb2.ModelInfo(vocab_fingerprint=FINGERPRINT, vocab_size=32))
    enlisted = fake.enlisted
    assert enlisted.target.vocab_size == 32
    assert enlisted.features.kind == common_pb2.FEATURE_KIND_NONE
    assert enlisted.limits == verify_pb2.DrafterLimits(
        max_proposal_nodes=20,
        max_assumed_tokens=64,
        max_proposals_per_session=8,
        drafter_outbox_bytes=8 * 2**20,
        max_sessions=4,
        max_verify_nodes=9,
    )
    info = await service.stub.GetServerInfo(verify_pb2.VerifyServiceGetServerInfoRequest())
    assert enlisted.boot_id == info.boot_id
    assert [state.drafter_id for state in info.drafters] == ["fake-0"]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("settings", "field", "values"),
    [
        ({"wire_version": WIRE_VERSION + 1}, "wire_version", (WIRE_VERSION, WIRE_VERSION + 1)),
        ({"target": common_pb2.ModelInfo(vocab_fingerprint="else")}, "vocab_fingerprint", (FINGERPRINT, "else")),
        ({"target": common_pb2.ModelInfo(vocab_size=33)}, "vocab_size", (32, 33)),
        ({"target": common_pb2.ModelInfo(hidden_size=9), "features": layout(8)}, "hidden_size", (8, 9)),
        (
            {
                "target": common_pb2.ModelInfo(hidden_size=8),
                "features": common_pb2.FeatureLayout(kind=common_pb2.FEATURE_KIND_AUX, aux_layers=[1]),
            },
            "features.kind",
            ("FEATURE_KIND_LAST", "FEATURE_KIND_AUX"),
        ),
    ],
)
async def test_who_does_not_fit_is_refused_with_both_values(
    serve: Serve, settings: dict[str, Any], field: str, values: tuple[object, object]
) -> None:
    service = await serve(MODEL, feature_width=8)
    error = await refusal(service, **settings)
    assert isinstance(error, FailedPrecondition)
    assert error.field == f"enlist.{field}"
    for value in values:
        assert repr(value) in error.message
    assert tokens_of(await service.generate(request(PROMPT))) == OUTPUT[:20]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"algorithm": common_pb2.ALGORITHM_UNSPECIFIED}, "enlist.algorithm"),
        ({"algorithm": 77}, "enlist.algorithm"),
        ({"name": ""}, "enlist.drafter_id"),
        ({"name": "x" * 257}, "enlist.drafter_id"),
        ({"max_sessions": 0}, "enlist.max_sessions"),
    ],
)
async def test_nonsense_in_enlist_is_named(serve: Serve, settings: dict[str, Any], field: str) -> None:
    service = await serve(MODEL)
    error = await refusal(service, **settings)
    assert isinstance(error, InvalidArgument)
    assert error.field == field


@pytest.mark.asyncio
async def test_enlist_comes_first_and_once_and_every_frame_carries_something(serve: Serve) -> None:
    service = await serve(MODEL)
    proposals_first = verify_pb2.SpeculateRequest(proposals=verify_pb2.Proposals())
    call = service.stub.Speculate(iter([proposals_first]))
    with pytest.raises(grpc.aio.AioRpcError, match="the first frame must be `enlist`"):
        await call.read()
    call = service.stub.Speculate(iter([]))
    with pytest.raises(grpc.aio.AioRpcError, match="the stream ended before `enlist`"):
        await call.read()
    for frame, message in (
        (verify_pb2.SpeculateRequest(enlist=verify_pb2.Enlist()), "`enlist` may only be the first frame"),
        (verify_pb2.SpeculateRequest(), "a frame must carry a message"),
    ):
        fake = await service.draft()
        fake.send_frame(frame)
        error = await fake.finished()
        assert error is not None
        assert (error.code(), error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, message)


@pytest.mark.asyncio
async def test_who_never_enlists_is_not_waited_for_for_ever(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculate, "ENLIST_TIMEOUT_S", 0.01)
    service = await serve(MODEL)
    call = service.stub.Speculate()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


# ---- proposals


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
        session=held.seen.session, generation=1, proposal_id=1, reason=verify_pb2.REJECT_REASON_STALE
    )
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
    await service.inbox.idle()
    assert service.engine.scheduler.num_preemptions > 0
    assert verify_pb2.NEXT_KIND_NONE in fake.view.kinds
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


# ---- what a drafter does wrong

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
    "a parent behind its child": ({"parents": pack_ids([1, -1])}, r"parents[0] is 1; it must be from -1 to -1"),
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
    assert (rejected.reason, rejected.proposal_id) == (verify_pb2.REJECT_REASON_MALFORMED, 1)
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
async def test_a_flood_ends_its_own_stream_and_no_other(serve: Serve) -> None:
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


@pytest.mark.asyncio
async def test_a_frame_of_too_many_proposals_ends_the_stream(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculate, "MAX_PROPOSALS_PER_FRAME", 10)
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
    call = service.channel.stream_stream(f"/{SERVICE}/Speculate")()
    enlist = verify_pb2.Enlist(
        drafter_id="raw", wire_version=WIRE_VERSION, algorithm=common_pb2.ALGORITHM_NGRAM, max_sessions=1
    )
    await call.write(verify_pb2.SpeculateRequest(enlist=enlist).SerializeToString())
    assert verify_pb2.SpeculateResponse.FromString(await call.read()).HasField("enlisted")
    await service.inbox.until(lambda: DrafterJoined in service.inbox.kinds)
    await call.write(b"\xff\xff\xff\xff")
    with pytest.raises(grpc.aio.AioRpcError):
        await call.read()
    await service.inbox.until(lambda: DrafterLeft in service.inbox.kinds)
    assert tokens_of(await service.generate(request(PROMPT, LONG))) == OUTPUT[:60]


# ---- sessions that change hands


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
    slow.reads.set()
    error = await slow.finished()
    assert error is not None
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "bytes wait to be read" in (error.details() or "")
    assert tokens_of(await service.generate(request(PROMPT, LONG))) == OUTPUT[:60]
