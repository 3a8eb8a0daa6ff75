"""Generate and what is served beside it, over a real channel: the engine is true, its forward pass a fake."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from outrider import rpc
from outrider.errors import Internal, InvalidArgument, ResourceExhausted, Unavailable
from outrider.sampling import SamplingParams
from outrider.v1 import common_pb2, verify_pb2
from outrider.wire import MAX_MESSAGE_BYTES, WIRE_VERSION, pack_ids
from tests.fake_drafters import Truth, perfect
from tests.fakes import ByteTokenizer, ToyModel
from tests.verify_service.conftest import FINGERPRINT, Serve, Service, error_of, tokens_of
from tests.verify_service.rig import prompt_of, request
from verify_service.app import SERVICE
from verify_service.commands import Ask, Cancel

MODEL = ToyModel(vocab_size=32, order=3)
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
LONG = SamplingParams(temperature=0.0, max_tokens=200)


@pytest.mark.asyncio
async def test_text_goes_in_and_the_same_text_comes_out_with_a_drafter_and_without(serve: Serve) -> None:
    tokenizer = ByteTokenizer()
    model = ToyModel(vocab_size=tokenizer.vocab_size, order=3)
    service = await serve(model, eos_token_ids=(tokenizer.end,))
    prompt = tokenizer.encode("Ein Satz, und noch einer.")
    output = model.greedy(prompt, 40)
    plain = await service.generate(request(prompt, SamplingParams(temperature=0.0, max_tokens=40)))
    drafter = await service.patient_draft(perfect(Truth([prompt + output])))
    drafted = await service.generate(request(prompt, SamplingParams(temperature=0.0, max_tokens=40)))
    for responses in (plain, drafted):
        assert tokens_of(responses) == output
        assert tokenizer.decode(tokens_of(responses)) == tokenizer.decode(output)
    assert drafted[-1].finish.speculation.accepted_tokens > 20
    await service.inbox.idle()
    assert drafter.view.num_accepted > 20


@pytest.mark.asyncio
async def test_a_choice_begins_with_what_is_fixed_and_ends_with_what_it_cost(serve: Serve) -> None:
    service = await serve(MODEL)
    responses = await service.generate(request([1, 2, 3], GREEDY))
    assert [response.HasField("start") for response in responses] == [True] + [False] * 19
    assert [response.HasField("finish") for response in responses] == [False] * 19 + [True]
    start, finish = responses[0].start, responses[-1].finish
    assert start.boot_id == (await service.stub.GetServerInfo(verify_pb2.VerifyServiceGetServerInfoRequest())).boot_id
    assert start.numerics_id == "toy"
    assert finish.reason == verify_pb2.FINISH_REASON_LENGTH
    assert (finish.prompt_tokens, finish.completion_tokens) == (3, 20)
    assert (finish.speculation.verify_steps, finish.speculation.committed_tokens) == (19, 19)


@pytest.mark.asyncio
async def test_a_seed_is_drawn_and_told_and_brings_the_same_answer_again(serve: Serve) -> None:
    service = await serve(MODEL)
    params = SamplingParams(temperature=1.0, max_tokens=20)
    first = await service.generate(request([5], params))
    seed = first[0].start.seed
    again = await service.generate(request([5], SamplingParams(temperature=1.0, max_tokens=20, seed=seed)))
    assert tokens_of(again) == tokens_of(first)
    assert again[0].start.seed == seed


@pytest.mark.asyncio
async def test_choices_come_on_one_stream_each_with_its_own_tokens(serve: Serve) -> None:
    service = await serve(MODEL)
    params = SamplingParams(temperature=1.0, seed=6, max_tokens=12)
    pb = request([5, 6], params, choices=4)
    pb.first_choice_index = 2
    responses = await service.generate(pb)
    for choice in range(2, 6):
        own = [response for response in responses if response.choice_index == choice]
        assert tokens_of(own, choice) == MODEL.decode([5, 6], params, seed=6, choice=choice, max_len=256)
        assert own[0].HasField("start")
        assert own[-1].HasField("finish")


@pytest.mark.asyncio
async def test_an_answer_broken_off_is_resumed_where_it_was(serve: Serve) -> None:
    service = await serve(MODEL)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=20)
    whole = tokens_of(await service.generate(request([5], params)))
    rest = await service.generate(request([5], params, resumed=whole[:7]))
    assert tokens_of(rest) == whole[7:]
    assert rest[-1].finish.completion_tokens == 20
    nothing = await service.generate(request([5], params, resumed=whole))
    assert [list(response.tokens) for response in nothing] == [[]]
    assert nothing[0].HasField("start")
    assert nothing[0].finish.reason == verify_pb2.FINISH_REASON_LENGTH


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (verify_pb2.GenerateRequest(), "prompt_tokens"),
        (request([32]), "prompt_tokens"),
        (request([1] * 256), "prompt_tokens"),
        (request([1], resumed=[77]), "resumed_tokens"),
        (request([1], choices=129), "num_choices"),
        (request([1], speculative=common_pb2.SpeculativeParams(algorithm=42)), "speculative.algorithm"),  # type: ignore[arg-type]
    ],
)
async def test_a_bad_request_is_refused_by_field_and_a_running_one_goes_on(
    serve: Serve, bad: verify_pb2.GenerateRequest, field: str
) -> None:
    service = await serve(MODEL)
    service.gate.close()
    running = asyncio.create_task(service.generate(request([1], GREEDY)))
    await service.gate.at_step()
    error = await error_of(service.generate(bad))
    assert isinstance(error, InvalidArgument)
    assert error.field == field
    service.gate.open()
    assert tokens_of(await running) == MODEL.greedy([1], 20)


@pytest.mark.asyncio
async def test_a_full_queue_says_when_to_come_again(serve: Serve) -> None:
    service = await serve(MODEL, max_running_requests=1, max_queued_requests=1)
    service.gate.close()
    running = [asyncio.create_task(service.generate(request([n], GREEDY))) for n in range(2)]
    await service.gate.at_step()
    refused = asyncio.create_task(error_of(service.generate(request([9], GREEDY))))
    await service.inbox.until(lambda: len(service.inbox.kinds) == 3)
    service.gate.open()
    error = await refused
    assert isinstance(error, ResourceExhausted)
    assert error.retry_after_s == 1.0
    assert error.message == (
        "the queue has no room for 1 more: 1 sessions wait, 0 can begin, and at most 1 may be left waiting; "
        "try again later"
    )
    assert service.servicer.totals.finished["refused"] == 1
    for n, task in enumerate(running):
        assert tokens_of(await task) == MODEL.greedy([n], 20)


@pytest.mark.asyncio
async def test_more_choices_than_run_and_wait_are_never_taken(serve: Serve) -> None:
    service = await serve(MODEL, max_running_requests=1, max_queued_requests=1)
    info = await service.stub.GetServerInfo(verify_pb2.VerifyServiceGetServerInfoRequest())
    assert info.limits.max_choices == 2
    error = await error_of(service.generate(request([1], GREEDY, choices=3)))
    assert isinstance(error, InvalidArgument)
    assert error.message == "num_choices is 3; it must be from 1 to 2"


@pytest.mark.asyncio
async def test_a_poisoned_row_is_internal_for_its_request_alone(serve: Serve) -> None:
    service = await serve(MODEL, nan_tokens=[31])
    clean = SamplingParams(temperature=0.0, max_tokens=20, logit_bias={31: -100.0})
    healthy = asyncio.create_task(service.generate(request([1], clean)))
    error = await error_of(service.generate(request([31], clean)))
    assert isinstance(error, Internal)
    assert error.message == "the model gave no finite logits for this request"
    assert tokens_of(await healthy) == MODEL.decode([1], clean, max_len=256)


async def begin(service: Service, params: SamplingParams = LONG) -> Any:
    """A call whose session is in the middle of its answer, with the engine held inside a step."""
    service.gate.close(after=5)
    call = service.stub.Generate(request(prompt_of(40, 32), params))
    await anext(aiter(call))
    await service.gate.at_step()
    assert service.num_free < service.engine.scheduler.pages.pool.num_pages
    return call


@pytest.mark.asyncio
@pytest.mark.parametrize("cache", [True, False])
async def test_a_cancelled_call_has_its_pages_back_within_one_step(serve: Serve, cache: bool) -> None:
    service = await serve(MODEL, disable_radix_cache=not cache)
    call = await begin(service)
    call.cancel()
    await service.inbox.until(lambda: Cancel in service.inbox.kinds)
    steps = service.runner.steps
    service.gate.open()
    await service.inbox.idle()
    assert service.num_free == service.engine.scheduler.pages.pool.num_pages
    assert service.runner.steps == steps + 1  # the one that was under way


@pytest.mark.asyncio
async def test_cancelled_while_it_waits_in_the_queue_a_request_never_runs(serve: Serve) -> None:
    service = await serve(MODEL, max_running_requests=1)
    first = await begin(service)
    queued = service.stub.Generate(request([3], LONG))
    await service.inbox.until(lambda: len(service.inbox.kinds) == 2)
    await service.gate.pass_steps(1)
    assert len(service.engine.scheduler.waiting) == 1
    queued.cancel()
    await service.inbox.until(lambda: Cancel in service.inbox.kinds)
    await service.gate.pass_steps(1)
    assert not service.engine.scheduler.waiting
    service.gate.open()
    assert len([response async for response in first]) > 100


@pytest.mark.asyncio
async def test_a_passed_deadline_ends_the_work_and_not_only_the_reply(serve: Serve) -> None:
    service = await serve(MODEL)
    service.gate.close()
    at_step, timeout_s = asyncio.create_task(service.gate.at_step()), 1
    while not at_step.done():  # to which a machine that stalls may come too late
        timeout_s *= 2
        late = await error_of(service.generate(request([1], LONG), timeout=timeout_s))
        assert late.status is grpc.StatusCode.DEADLINE_EXCEEDED
    await service.inbox.until(lambda: Cancel in service.inbox.kinds)
    service.gate.open()
    await service.inbox.idle()
    assert service.num_free == service.engine.scheduler.pages.pool.num_pages
    assert service.runner.steps == 1


@pytest.mark.asyncio
async def test_a_client_that_reads_nothing_is_let_go_when_it_leaves(serve: Serve) -> None:
    """The answers fill the connection, so the handler is stuck in a write, not in a wait."""
    service = await serve(MODEL, context=8192, pages=8192, disable_radix_cache=True)
    stub = await service.narrow_stub()
    service.gate.close(after=6000)
    call = stub.Generate(request([1], SamplingParams(temperature=0.0, max_tokens=8000)))
    await service.gate.at_step()
    call.cancel()
    await service.inbox.until(lambda: Cancel in service.inbox.kinds)
    service.gate.open()
    await service.inbox.idle()
    assert service.num_free == 8192


@pytest.mark.asyncio
async def test_draining_refuses_the_new_and_finishes_the_running(serve: Serve) -> None:
    service = await serve(MODEL)
    call = await begin(service)
    service.servicer.calls.draining = True
    assert not service.servicer.calls.idle.is_set()
    error = await error_of(service.generate(request([1], GREEDY)))
    assert isinstance(error, Unavailable)
    info = await service.stub.GetServerInfo(verify_pb2.VerifyServiceGetServerInfoRequest())
    assert info.state.draining
    service.gate.open()
    rest = [response async for response in call]
    assert rest[-1].HasField("finish")
    await service.servicer.calls.idle.wait()


@pytest.mark.asyncio
async def test_health_and_reflection_answer(serve: Serve) -> None:
    service = await serve(MODEL)
    health = health_pb2_grpc.HealthStub(service.channel)
    for name in ("", SERVICE):
        answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    reflection = reflection_pb2_grpc.ServerReflectionStub(service.channel)
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    async for answer in reflection.ServerReflectionInfo(iter([asked])):
        names = {listed.name for listed in answer.list_services_response.service}
        assert {SERVICE, "grpc.health.v1.Health"} <= names
    rpc.set_serving(service.health, [SERVICE], False)
    answer = await health.Check(health_pb2.HealthCheckRequest(service=SERVICE))
    assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.asyncio
async def test_server_info_tells_the_target_its_limits_and_what_it_has_done(serve: Serve) -> None:
    service = await serve(MODEL, max_running_requests=7, max_choices=5, quantization="int4")
    drafter = await service.patient_draft(perfect(Truth([[1, *MODEL.greedy([1], 20)]])))
    await service.generate(request([1], GREEDY))
    await drafter.until(lambda: drafter.view.closed)  # so it has the last verdict
    await service.inbox.idle()
    info = await service.stub.GetServerInfo(verify_pb2.VerifyServiceGetServerInfoRequest())
    assert info.wire_version == WIRE_VERSION
    assert (info.model.vocab_size, info.model.vocab_fingerprint) == (32, FINGERPRINT)
    assert info.model.quantization == "int4"
    assert info.limits == verify_pb2.RequestLimits(
        context_length=256, max_running_requests=7, max_queued_requests=1024, max_choices=5, max_total_tokens=1024
    )
    assert (info.state.total_pages, info.state.free_pages, info.state.running_requests) == (1024, 1024, 0)
    assert info.state.steps == service.runner.steps
    assert info.speculation.accepted_tokens == drafter.view.num_accepted > 0
    (state,) = info.drafters
    assert (state.drafter_id, state.sessions) == ("fake-0", 0)
    assert state.proposals["used"] == drafter.view.num_credits
    assert info.arguments["max-choices"] == "5"


@pytest.mark.asyncio
async def test_a_flushed_cache_shares_nothing(serve: Serve) -> None:
    service = await serve(MODEL)
    prompt = list(range(1, 20))

    async def cached() -> int:
        return (await service.generate(request(prompt, GREEDY)))[0].start.cached_tokens

    assert await cached() == 0
    assert await cached() > 0
    flushed = await service.stub.FlushCache(verify_pb2.FlushCacheRequest())
    assert flushed.freed_pages >= len(prompt)
    assert flushed.kept_pages == 0
    assert await cached() == 0


@pytest.mark.asyncio
async def test_flushes_that_wait_for_the_engine_are_one(serve: Serve) -> None:
    service = await serve(MODEL)
    await service.generate(request(list(range(1, 20)), GREEDY))
    service.gate.close(0)
    task = asyncio.create_task(service.generate(request([1], GREEDY)))
    await service.gate.at_step()
    context = cast("grpc.aio.ServicerContext", None)
    calls = [
        asyncio.create_task(service.servicer.FlushCache(verify_pb2.FlushCacheRequest(), context)) for _ in range(3)
    ]
    await service.inbox.until(lambda: Ask in service.inbox.kinds)
    calls.pop(0).cancel()
    service.gate.open()
    first, second = await asyncio.gather(*calls)
    assert first == second
    assert first.freed_pages > 0
    assert service.inbox.kinds.count(Ask) == 1
    await task
    await service.stub.FlushCache(verify_pb2.FlushCacheRequest())
    assert service.inbox.kinds.count(Ask) == 2


@pytest.mark.asyncio
async def test_prefixes_are_shared_within_a_salt(serve: Serve) -> None:
    service = await serve(MODEL)

    async def cached(salt: str, choices: int = 1) -> int:
        asked = request(list(range(1, 20)), GREEDY)
        asked.cache_salt, asked.num_choices = salt, choices
        starts = [response.start for response in await service.generate(asked) if response.HasField("start")]
        return min(start.cached_tokens for start in starts)

    assert await cached("mine") == 0
    assert await cached("") == 0
    assert await cached("yours") == 0
    assert await cached("mine") > 0
    assert await cached("", choices=2) > 0
    assert await cached("yours", choices=2) > 0


@pytest.mark.asyncio
async def test_a_response_tells_how_its_drafts_were_made(serve: Serve) -> None:
    service = await serve(MODEL)
    plain = await service.generate(request([1], GREEDY))
    assert not any(response.HasField("algorithm") for response in plain)
    await service.patient_draft(perfect(Truth([[1, *MODEL.greedy([1], 20)]])))
    drafted = await service.generate(request([1], GREEDY))
    for response in drafted:
        assert response.HasField("algorithm") == bool(response.num_drafted)
    assert {response.algorithm for response in drafted if response.num_drafted} == {common_pb2.ALGORITHM_NGRAM}


@pytest.mark.asyncio
async def test_nonsense_on_the_connection_gets_a_status_and_the_connection_lives(serve: Serve) -> None:
    service = await serve(MODEL)
    garbage = service.channel.unary_stream(f"/{SERVICE}/Generate", None, None)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await garbage(b"\xff\xff\xff").read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.channel.unary_unary(f"/{SERVICE}/Delete", None, None)(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    large = garbage(verify_pb2.GenerateRequest(prompt_tokens=bytes(MAX_MESSAGE_BYTES)).SerializeToString())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await large.read()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    unknown = verify_pb2.GenerateRequest(
        prompt_tokens=pack_ids([1]), sampling=GREEDY.to_proto()
    ).SerializeToString() + bytes([0xFA, 0x3F, 1, 65])  # field 1023, which nobody knows
    responses = [verify_pb2.GenerateResponse.FromString(answer) async for answer in garbage(unknown)]
    assert tokens_of(responses) == MODEL.greedy([1], 20)
