"""GenerateMany: calls on one stream are what they are alone; each ends by itself, and all end with the stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from outrider.auth import TokenFile
from outrider.sampling import SamplingParams
from outrider.statuses import code_of, error_of
from outrider.v1 import verify_pb2
from tests.fakes import ToyModel
from tests.files import replace
from tests.verify_service.conftest import Serve, Service, tokens_of
from tests.verify_service.rig import prompt_of, request
from verify_service import call_stream
from verify_service.call_stream import CallStream
from verify_service.calls import Calls
from verify_service.commands import Cancel, Submit
from verify_service.session import Session

MODEL = ToyModel(vocab_size=32, order=3)
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
LONG = SamplingParams(temperature=0.0, max_tokens=200)


class Caller:
    """The other end of one stream."""

    def __init__(self, stub: Any) -> None:
        self.rpc = stub.GenerateMany()
        self.frames: list[verify_pb2.GenerateManyResponse] = []
        self._number = 0

    async def begin(self, *requests: verify_pb2.GenerateRequest, **fields: Any) -> list[int]:
        """Begins calls, all in one message; returns their numbers."""
        first = self._number + 1
        self._number += len(requests)
        begins = [
            verify_pb2.GenerateCall(call=first + index, request=request, **fields)
            for index, request in enumerate(requests)
        ]
        await self.rpc.write(verify_pb2.GenerateManyRequest(begin=begins))
        return [begin.call for begin in begins]

    async def cancel(self, *numbers: int) -> None:
        """Gives calls up."""
        await self.rpc.write(verify_pb2.GenerateManyRequest(cancel=numbers))

    async def until_ended(self, *numbers: int) -> dict[int, list[verify_pb2.GenerateResponse]]:
        """Reads until these calls have ended; returns the responses of each so far."""
        while not set(numbers) <= self.ends().keys():
            frame = await self.rpc.read()
            assert isinstance(frame, verify_pb2.GenerateManyResponse)
            self.frames.append(frame)
        return {number: [o.response for o in self._outputs(number) if o.HasField("response")] for number in numbers}

    def ends(self) -> dict[int, verify_pb2.CallEnd]:
        """The calls that have ended, and how."""
        return {o.call: o.end for frame in self.frames for o in frame.outputs if o.HasField("end")}

    def _outputs(self, number: int) -> list[verify_pb2.CallOutput]:
        return [output for frame in self.frames for output in frame.outputs if output.call == number]


async def code_of_stream(caller: Caller) -> grpc.StatusCode:
    """The status that the stream ends with."""
    try:
        while isinstance(await caller.rpc.read(), verify_pb2.GenerateManyResponse):
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return await caller.rpc.code()


async def all_free(service: Service) -> None:
    """Returns when the engine has nothing to do; all pages must be free."""
    await service.inbox.idle()
    assert service.num_free == service.engine.scheduler.pages.pool.num_pages
    await service.servicer.calls.idle.wait()


@pytest.mark.asyncio
async def test_calls_on_a_stream_are_what_they_are_alone(serve: Serve) -> None:
    service = await serve(MODEL)
    sampled = SamplingParams(temperature=1.0, max_tokens=12, seed=7)
    asked = [
        request([1, 2, 3], GREEDY),
        request([5], sampled, choices=3),
        request([6], GREEDY),
    ]
    asked[2].logprobs, asked[2].top_logprobs = True, 2
    alone = [await service.generate(each) for each in asked]
    caller = Caller(service.stub)
    answers = await caller.until_ended(*await caller.begin(*asked))
    for expected, responses in zip(alone, answers.values(), strict=True):
        for choice in range(3):
            assert tokens_of(responses, choice) == tokens_of(expected, choice)
        assert [list(r.logprobs) for r in responses] == [list(r.logprobs) for r in expected]
        assert [r.HasField("start") for r in responses] == [r.HasField("start") for r in expected]
        assert [r.finish.reason for r in responses] == [r.finish.reason for r in expected]
    assert all(end.code == 0 for end in caller.ends().values())
    assert caller.ends().keys() == answers.keys()


@pytest.mark.asyncio
async def test_a_message_of_too_many_calls_ends_the_stream(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_stream, "MAX_ENTRIES", 3)
    service = await serve(MODEL)
    caller = Caller(service.stub)
    await caller.begin(*[request([1, 2, 3], GREEDY)] * 3)
    await caller.until_ended(1, 2, 3)
    await caller.rpc.write(verify_pb2.GenerateManyRequest(cancel=[1, 2, 3, 4]))
    with pytest.raises(grpc.aio.AioRpcError, match="begins and cancels 4 calls; at most 3") as caught:
        await caller.rpc.read()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.asyncio
async def test_what_a_step_says_to_all_is_one_message(serve: Serve) -> None:
    service = await serve(MODEL)
    service.gate.close()
    caller = Caller(service.stub)
    numbers = await caller.begin(*(request([n], GREEDY) for n in range(8)))
    await service.inbox.until(lambda: service.inbox.kinds.count(Submit) == 8)
    service.gate.open()
    await caller.until_ended(*numbers)
    most = max(len({output.call for output in frame.outputs}) for frame in caller.frames)
    assert most == 8
    assert len(caller.frames) < 8 * 20 / 2


@pytest.mark.asyncio
async def test_a_call_that_is_refused_ends_alone_and_says_why(serve: Serve) -> None:
    service = await serve(MODEL, nan_tokens=[31])
    caller = Caller(service.stub)
    clean = SamplingParams(temperature=0.0, max_tokens=20, logit_bias={31: -100.0})
    good, empty, poisoned = await caller.begin(request([1], clean), request([], GREEDY), request([31], clean))
    answers = await caller.until_ended(good, empty, poisoned)
    assert tokens_of(answers[good]) == MODEL.decode([1], clean, max_len=256)
    ends = caller.ends()
    error = error_of(code_of(ends[empty].code), ends[empty].message, ends[empty].details)
    assert (error.status, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "prompt_tokens")
    assert code_of(ends[poisoned].code) is grpc.StatusCode.INTERNAL
    assert answers[empty] == answers[poisoned] == []
    await all_free(service)


@pytest.mark.asyncio
async def test_a_call_given_up_has_its_pages_back_within_one_step(serve: Serve) -> None:
    service = await serve(MODEL)
    service.gate.close()
    caller = Caller(service.stub)
    gone, stays = await caller.begin(request(prompt_of(40, 32), LONG), request([3], LONG))
    await service.inbox.until(lambda: service.inbox.kinds.count(Submit) == 2)
    await service.gate.at_step()
    await service.gate.pass_steps(5)
    await caller.cancel(gone)
    await service.inbox.until(lambda: Cancel in service.inbox.kinds)
    assert len(service.engine.scheduler.running) == 2
    await service.gate.pass_steps(1)
    assert len(service.engine.scheduler.running) == 1
    service.gate.open()
    answers = await caller.until_ended(stays)
    assert tokens_of(answers[stays]) == MODEL.greedy([3], 200)
    assert gone not in caller.ends()
    await all_free(service)


@pytest.mark.asyncio
async def test_a_passed_deadline_ends_the_work(serve: Serve) -> None:
    service = await serve(MODEL)
    service.gate.close()
    caller = Caller(service.stub)
    at_step, timeout_ms, late = asyncio.create_task(service.gate.at_step()), 1000, 0
    while not at_step.done():  # to which a machine that stalls may come too late
        timeout_ms *= 2
        (late,) = await caller.begin(request([1], LONG), timeout_ms=timeout_ms)
        await caller.until_ended(late)
    assert code_of(caller.ends()[late].code) is grpc.StatusCode.DEADLINE_EXCEEDED
    await service.inbox.until(lambda: Cancel in service.inbox.kinds)
    service.gate.open()
    await all_free(service)
    assert service.runner.steps == 1  # the one that was under way


@pytest.mark.asyncio
@pytest.mark.parametrize("reads", [True, False])
async def test_a_caller_that_leaves_takes_its_calls_along(serve: Serve, reads: bool) -> None:
    service = await serve(MODEL)
    service.gate.close(after=5)
    caller = Caller(service.stub)
    await caller.begin(request([1], LONG), request([2], LONG))
    await service.gate.at_step()
    if reads:
        await caller.rpc.read()
    caller.rpc.cancel()
    await service.inbox.until(lambda: service.inbox.kinds.count(Cancel) == 2)
    steps = service.runner.steps
    service.gate.open()
    await all_free(service)
    assert service.runner.steps == steps + 1  # the one that was under way


@pytest.mark.asyncio
async def test_numbers_that_do_not_grow_end_the_stream_and_its_calls(serve: Serve) -> None:
    service = await serve(MODEL)
    service.gate.close(after=5)
    caller = Caller(service.stub)
    await caller.begin(request([1], LONG))
    await service.gate.at_step()
    again = verify_pb2.GenerateCall(call=1, request=request([2], LONG))
    await caller.rpc.write(verify_pb2.GenerateManyRequest(begin=[again]))
    assert await code_of_stream(caller) is grpc.StatusCode.INVALID_ARGUMENT
    await service.inbox.until(lambda: Cancel in service.inbox.kinds)
    steps = service.runner.steps
    service.gate.open()
    await all_free(service)
    assert service.runner.steps == steps + 1  # the one that was under way


@pytest.mark.asyncio
async def test_a_side_that_is_ended_lets_its_calls_finish(serve: Serve) -> None:
    service = await serve(MODEL)
    caller = Caller(service.stub)
    (only,) = await caller.begin(request([1], GREEDY))
    await caller.rpc.done_writing()
    assert tokens_of((await caller.until_ended(only))[only]) == MODEL.greedy([1], 20)
    assert await code_of_stream(caller) is grpc.StatusCode.OK


@pytest.mark.asyncio
async def test_draining_refuses_the_new_finishes_the_running_and_ends_the_stream(serve: Serve) -> None:
    service = await serve(MODEL)
    service.gate.close(after=5)
    caller = Caller(service.stub)
    (first,) = await caller.begin(request([1], LONG))
    await service.gate.at_step()
    service.servicer.calls.draining = True
    (second,) = await caller.begin(request([2], GREEDY))
    await caller.until_ended(second)
    assert code_of(caller.ends()[second].code) is grpc.StatusCode.UNAVAILABLE
    assert not service.servicer.calls.idle.is_set()
    service.gate.open()
    assert tokens_of((await caller.until_ended(first))[first]) == MODEL.greedy([1], 200)
    await service.servicer.calls.idle.wait()
    service.servicer.end_streams()
    assert await code_of_stream(caller) is grpc.StatusCode.OK


@pytest.mark.asyncio
async def test_who_reads_nothing_is_read_no_further(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that are refused cost nothing but their ends, of which only so many are kept."""
    monkeypatch.setattr(call_stream, "MAX_WAITING", 100)
    service = await serve(MODEL)
    taken = 0

    async def calls() -> AsyncIterator[verify_pb2.GenerateManyRequest]:
        nonlocal taken
        for number in range(1, 10_000):
            taken = number
            yield verify_pb2.GenerateManyRequest(begin=[verify_pb2.GenerateCall(call=number)])
            await asyncio.sleep(0)

    frames = CallStream(service.servicer.calls, None, ()).frames(calls())
    first = await anext(frames)
    for _ in range(1000):
        await asyncio.sleep(0)
    assert 100 < taken < 200
    assert first.outputs[0].end.code
    await frames.aclose()


@pytest.mark.asyncio
async def test_one_message_of_many_calls_is_held_back_too(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_stream, "MAX_WAITING", 100)
    monkeypatch.setattr(call_stream, "CALLS_PER_TURN", 10)
    service = await serve(MODEL)
    everything = verify_pb2.GenerateManyRequest(begin=[verify_pb2.GenerateCall(call=n) for n in range(1, 1001)])

    async def calls() -> AsyncIterator[verify_pb2.GenerateManyRequest]:
        yield everything

    ended: list[int] = []
    async for frame in CallStream(service.servicer.calls, None, ()).frames(calls()):
        assert len(frame.outputs) <= 110
        ended += [output.call for output in frame.outputs]
        for _ in range(200):
            await asyncio.sleep(0)  # nobody reads for a while
    assert ended == list(range(1, 1001))


@pytest.mark.asyncio
async def test_calls_begun_and_given_up_during_one_step_do_not_pile_up(serve: Serve) -> None:
    service = await serve(MODEL, max_running_requests=2, max_queued_requests=10)
    service.gate.close()
    caller = Caller(service.stub)
    (first,) = await caller.begin(request([1], GREEDY))
    await service.gate.at_step()
    num_exhausted = 0
    for _ in range(20):
        numbers = await caller.begin(*([request([2], LONG)] * 10))
        (probe,) = await caller.begin(verify_pb2.GenerateRequest())  # ends when all before it have begun
        await caller.until_ended(probe)
        await caller.cancel(*numbers)
        ends = caller.ends()
        num_exhausted += sum(number in ends for number in numbers)
    assert service.inbox.kinds.count(Submit) <= 13
    assert service.inbox.num_waiting <= 24
    assert service.servicer.totals.finished["refused"] >= num_exhausted >= 180
    service.gate.open()
    assert tokens_of((await caller.until_ended(first))[first]) == MODEL.greedy([1], 20)
    (last,) = await caller.begin(request([3], GREEDY))
    assert tokens_of((await caller.until_ended(last))[last]) == MODEL.greedy([3], 20)
    await caller.rpc.done_writing()
    await all_free(service)


@pytest.mark.asyncio
async def test_a_token_that_was_taken_back_begins_no_more_calls(serve: Serve, tmp_path: Path) -> None:
    service = await serve(MODEL)
    path = tmp_path / "tokens"
    path.write_text("the-token-of-before")
    tokens = TokenFile(str(path), "--token-file")
    asked: asyncio.Queue[verify_pb2.GenerateManyRequest] = asyncio.Queue()

    async def requests() -> AsyncIterator[verify_pb2.GenerateManyRequest]:
        while True:
            yield await asked.get()

    frames = CallStream(service.servicer.calls, tokens, tokens.metadata()).frames(requests())

    async def end_of(number: int) -> verify_pb2.CallEnd:
        begin = verify_pb2.GenerateCall(call=number, request=request([1], GREEDY))
        asked.put_nowait(verify_pb2.GenerateManyRequest(begin=[begin]))
        while True:
            for output in (await anext(frames)).outputs:
                if output.HasField("end"):
                    return output.end

    assert (await end_of(1)).code == 0
    replace(path, "a-token-of-afterwards")
    assert code_of((await end_of(2)).code) is grpc.StatusCode.UNAUTHENTICATED
    await frames.aclose()


@pytest.mark.asyncio
async def test_calls_that_have_ended_are_left_by_a_caller_that_goes_while_that_is_written(serve: Serve) -> None:
    service = await serve(MODEL)

    async def calls() -> AsyncIterator[verify_pb2.GenerateManyRequest]:
        begin = [verify_pb2.GenerateCall(call=number, request=request([number], GREEDY)) for number in (1, 2)]
        yield verify_pb2.GenerateManyRequest(begin=begin)
        await asyncio.Event().wait()

    frames = CallStream(service.servicer.calls, None, ()).frames(calls())
    ended: set[int] = set()
    while len(ended) < 2:
        frame = await anext(frames)
        ended |= {output.call for output in frame.outputs if output.HasField("end")}
    await frames.aclose()
    await all_free(service)


def compiled_late(calls: Calls, compiled: asyncio.Event, monkeypatch: pytest.MonkeyPatch) -> verify_pb2.GenerateRequest:
    """A request whose grammar takes until the event is set, and is none then."""

    async def slowly(asked: verify_pb2.GenerateRequest) -> list[Session]:
        await compiled.wait()
        asked.sampling.ClearField("grammar")
        return calls._factory.build(asked)

    monkeypatch.setattr(calls._factory, "build_with_grammar", slowly)
    asked = request([1], GREEDY)
    asked.sampling.grammar.regex = "a"
    return asked


@pytest.mark.asyncio
async def test_calls_whose_grammars_are_compiled_are_bounded_and_waited_for(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = await serve(MODEL, max_running_requests=1, max_queued_requests=1)
    calls, compiled = service.servicer.calls, asyncio.Event()
    asked = compiled_late(calls, compiled, monkeypatch)
    caller = Caller(service.stub)
    first, second, third = await caller.begin(asked, asked, asked)
    await caller.until_ended(third)
    assert code_of(caller.ends()[third].code) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert not calls.idle.is_set()
    calls.draining = True
    compiled.set()
    assert tokens_of((await caller.until_ended(first, second))[second]) == MODEL.greedy([1], 20)
    await calls.idle.wait()


@pytest.mark.asyncio
async def test_a_grammar_that_takes_longer_than_the_grace_is_told_so(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = await serve(MODEL)
    calls, compiled = service.servicer.calls, asyncio.Event()
    asked = compiled_late(calls, compiled, monkeypatch)
    caller = Caller(service.stub)
    (only,) = await caller.begin(asked)
    (probe,) = await caller.begin(verify_pb2.GenerateRequest())  # ends when the one before it has begun
    await caller.until_ended(probe)
    calls.stopped = True
    compiled.set()
    await caller.until_ended(only)
    assert code_of(caller.ends()[only].code) is grpc.StatusCode.UNAVAILABLE
