"""Calls to one verify service: on one stream where it knows such, each alone where not; none in another's way."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import grpc
import pytest

from gateway import calls
from gateway.call_failures import Broken, NotOffered
from gateway.calls import Call, ReplicaCalls
from gateway.replica import Replica, ServerInfo
from outrider.args import GatewayArgs
from outrider.auth import AuthInterceptor, token_file
from outrider.dialing import dialer_of
from outrider.errors import DeadlineExceeded, Internal, InvalidArgument, NotFound, OutriderError, ResourceExhausted
from outrider.rpc import bind, create_channel, create_server
from outrider.tracing import set_call_metadata
from outrider.v1 import common_pb2, verify_pb2, verify_pb2_grpc
from outrider.wire import pack_ids
from tests.files import replace
from tests.gateway.fakes import FakeVerify, serving

LONG = list(range(10, 40))


def fake(folder: Path, **settings: Any) -> FakeVerify:
    """A verify service that says LONG."""
    return FakeVerify(folder, vocab_size=300, say=lambda request, choice: LONG, **settings)


def ask(**fields: Any) -> verify_pb2.GenerateRequest:
    """A request."""
    sampling = common_pb2.SamplingParams(seed=1, max_tokens=100)
    return verify_pb2.GenerateRequest(prompt_tokens=pack_ids([3, 4]), num_choices=1, sampling=sampling, **fields)


@contextlib.asynccontextmanager
async def calls_to(verify: FakeVerify, folder: Path) -> AsyncGenerator[ReplicaCalls]:
    """Calls over a channel of their own."""
    async with serving(verify, f"unix:{folder}/verify") as address, create_channel(address) as channel:
        yield ReplicaCalls(channel)


async def read(call: Call) -> list[int]:
    """All tokens of a call, which is closed then."""
    tokens: list[int] = []
    try:
        while responses := await call.take():
            tokens += [token for response in responses for token in response.tokens]
    finally:
        call.close()
    return tokens


@pytest.mark.asyncio
async def test_calls_share_a_stream(tmp_path: Path) -> None:
    verify = fake(tmp_path)
    async with calls_to(verify, tmp_path) as made:
        answers = await asyncio.gather(*(read(made.begin(ask(), 60)) for _ in range(20)))
    assert answers == [LONG] * 20
    assert verify.streams == 1


@pytest.mark.asyncio
async def test_a_message_begins_and_cancels_no_more_calls_than_verify_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "MAX_ENTRIES", 3)
    verify = fake(tmp_path, hold_after=1)
    async with calls_to(verify, tmp_path) as made:
        begun = [made.begin(ask(), 60) for _ in range(10)]
        for call in begun:
            await call.take()
        for call in begun[:8]:
            call.close()
        while verify.cancelled < 8:  # noqa: ASYNC110
            await asyncio.sleep(0)
        verify.release.set()
        for call in begun[8:]:
            await read(call)
    assert max(verify.entries) == 3
    assert sum(verify.entries) == 18


@pytest.mark.asyncio
async def test_a_call_that_nobody_reads_holds_up_no_other(tmp_path: Path) -> None:
    verify = fake(tmp_path, context_length=10_000)
    verify.say = lambda request, choice: LONG if request.request_id else [7] * 9_000
    async with calls_to(verify, tmp_path) as made:
        long = ask()
        long.sampling.max_tokens = 9_000
        unread = made.begin(long, 60)
        async with asyncio.timeout(30):
            while verify.responses_sent < 2_900:  # noqa: ASYNC110  of 3,000
                await asyncio.sleep(0)
        assert await read(made.begin(ask(request_id="x"), 60)) == LONG
        assert len(await read(unread)) == 9_000


@pytest.mark.asyncio
async def test_a_closed_call_is_cancelled_and_a_finished_one_is_not(tmp_path: Path) -> None:
    verify = fake(tmp_path, hold_after=1)
    async with calls_to(verify, tmp_path) as made:
        call, other = made.begin(ask(), 60), made.begin(ask(), 60)
        await call.take()
        call.close()
        while not verify.cancelled:  # noqa: ASYNC110
            await asyncio.sleep(0)
        verify.release.set()
        assert await read(other) == LONG
        await verify.idle.wait()
        assert verify.cancelled == 1


@pytest.mark.asyncio
async def test_a_call_closed_before_it_was_sent_is_never_made(tmp_path: Path) -> None:
    verify = fake(tmp_path)
    async with calls_to(verify, tmp_path) as made:
        made.begin(ask(request_id="first"), 60).close()
        assert await read(made.begin(ask(request_id="second"), 60)) == LONG
    assert [request.request_id for request in verify.requests] == ["second"]


@pytest.mark.asyncio
@pytest.mark.parametrize("error", [InvalidArgument("no", field="prompt_tokens"), ResourceExhausted("full")])
async def test_a_status_is_for_its_call_alone(tmp_path: Path, error: OutriderError) -> None:
    verify = fake(tmp_path, hold_after=1)
    async with calls_to(verify, tmp_path) as made:
        good = made.begin(ask(), 60)
        await verify.holding.wait()
        verify.refuse = error
        with pytest.raises(type(error)) as caught:
            await read(made.begin(ask(), 60))
        assert (caught.value.message, caught.value.field) == (error.message, error.field)
        verify.release.set()
        assert await read(good) == LONG


@pytest.mark.asyncio
async def test_time_runs_out_for_one_call(tmp_path: Path) -> None:
    verify = fake(tmp_path, hold_after=1)
    async with calls_to(verify, tmp_path) as made:
        good = made.begin(ask(), 60)
        with pytest.raises(DeadlineExceeded):
            await read(made.begin(ask(), 0.05))
        verify.release.set()
        assert await read(good) == LONG


@pytest.mark.asyncio
async def test_the_end_of_the_stream_breaks_its_calls_and_the_next_opens_another(tmp_path: Path) -> None:
    verify = fake(tmp_path, hold_after=1)
    async with create_channel(f"unix:{tmp_path}/verify") as channel:
        made = ReplicaCalls(channel)
        async with serving(verify, f"unix:{tmp_path}/verify"):
            one, two = made.begin(ask(), 60), made.begin(ask(), 60)
            await one.take()
            await two.take()
        for call in (one, two):
            with pytest.raises(Broken):
                await read(call)
        async with serving(fake(tmp_path), f"unix:{tmp_path}/verify"):
            while True:
                with contextlib.suppress(Broken):  # until the channel has noticed that the old connection is gone
                    assert await read(made.begin(ask(), 60)) == LONG
                    break


class FailingStream(FakeVerify):
    """A fake whose streams fail, by default as grpc.aio says of a write that meets a call's end."""

    answers = 0  # frames before that
    says = "Internal error from Core"
    code = grpc.StatusCode.INTERNAL

    async def GenerateMany(self, request_iterator: Any, context: Any) -> AsyncGenerator[Any]:
        """Takes a frame and fails."""
        await anext(request_iterator)
        for _ in range(self.answers):
            yield verify_pb2.GenerateManyResponse()
        await context.abort(self.code, self.says)


@pytest.mark.asyncio
@pytest.mark.parametrize(("answers", "says"), [(0, "out of order"), (1, "out of order"), (1, FailingStream.says)])
async def test_a_stream_that_fails_breaks_its_calls_so_that_they_go_on_elsewhere(
    tmp_path: Path, answers: int, says: str
) -> None:
    verify = FailingStream(tmp_path, vocab_size=300)
    verify.answers, verify.says = answers, says
    async with calls_to(verify, tmp_path) as made:
        with pytest.raises(Broken) as caught:
            await read(made.begin(ask(), 60))
    assert not caught.value.engine


@pytest.mark.asyncio
@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code.name not in {"OK", "UNIMPLEMENTED"}])
async def test_no_status_of_a_stream_is_an_answer_to_its_calls(tmp_path: Path, code: grpc.StatusCode) -> None:
    """A stream lives for hours: proxies end it, or what another client sent."""
    verify = FailingStream(tmp_path, vocab_size=300)
    verify.answers, verify.says, verify.code = 1, "longer than a proxy lets it be", code
    async with calls_to(verify, tmp_path) as made:
        one, other = made.begin(ask(), 60), made.begin(ask(), 60)
        for call in (one, other):
            with pytest.raises(Broken):
                await read(call)


@pytest.mark.asyncio
@pytest.mark.parametrize("ours", [True, False])
async def test_only_verifys_own_word_of_a_fault_is_final(tmp_path: Path, ours: bool) -> None:
    """gRPC says INTERNAL too, of a stream that was reset on its way."""

    class Failing(FakeVerify):
        async def Generate(self, request: verify_pb2.GenerateRequest, context: Any) -> AsyncGenerator[Any]:
            if ours:
                raise Internal("the model gave no finite logits")
            await context.abort(grpc.StatusCode.INTERNAL, "RST_STREAM with error code 2")
            yield

    async with calls_to(Failing(tmp_path, vocab_size=300), tmp_path) as made:
        for alone in (False, True):
            with pytest.raises(Internal if ours else Broken) as caught:
                await read(made.begin(ask(), 60, alone=alone))
            assert not ours or str(caught.value) == "the model gave no finite logits"


@pytest.mark.asyncio
async def test_an_end_with_details_that_are_none_ends_its_call(tmp_path: Path) -> None:
    class Garbled(FakeVerify):
        async def GenerateMany(self, request_iterator: Any, context: Any) -> AsyncGenerator[Any]:
            async for frame in request_iterator:
                for begin in frame.begin:
                    end = verify_pb2.CallEnd(code=5, message="no such thing", details=b"\xff\xff")
                    yield verify_pb2.GenerateManyResponse(outputs=[verify_pb2.CallOutput(call=begin.call, end=end)])

    async with calls_to(Garbled(tmp_path, vocab_size=300), tmp_path) as made:
        for _ in range(2):  # on the one stream
            with pytest.raises(NotFound, match="no such thing"):
                await read(made.begin(ask(), 10))


@pytest.mark.asyncio
async def test_a_call_whose_stream_ended_at_once_for_a_reason_that_was_lost_is_made_alone(tmp_path: Path) -> None:
    verify = FailingStream(tmp_path, vocab_size=300, say=lambda request, choice: LONG)
    async with calls_to(verify, tmp_path) as made:
        with pytest.raises(NotOffered):
            await read(made.begin(ask(), 60))
        assert await read(made.begin(ask(), 60, alone=True)) == LONG
        assert not made.each_alone


@pytest.mark.asyncio
async def test_a_service_that_knows_no_streams_is_asked_again_when_another_process_answers(tmp_path: Path) -> None:
    verify = fake(tmp_path, knows_many=False)
    async with serving(verify, f"unix:{tmp_path}/verify") as address, create_channel(address) as channel:
        replica = Replica.at(address, channel)
        replica.learn(ServerInfo(boot_id="old"))
        while not replica.calls.each_alone:  # a stream's end may come without its reason
            with pytest.raises(NotOffered):
                await read(replica.calls.begin(ask(), 60))
        assert await read(replica.calls.begin(ask(), 60)) == LONG
        verify.knows_many = True
        replica.learn(ServerInfo(boot_id="old"))
        assert await read(replica.calls.begin(ask(), 60)) == LONG
        assert verify.streams == 0
        replica.learn(ServerInfo(boot_id="new"))
        assert await read(replica.calls.begin(ask(), 60)) == LONG
        assert verify.streams == 1


@pytest.mark.asyncio
async def test_large_requests_and_answers_go_by_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_LARGE_BYTES", 1000)
    verify = fake(tmp_path)
    async with calls_to(verify, tmp_path) as made:
        assert await read(made.begin(ask(prediction_tokens=bytes(1200)), 60)) == LONG
        assert await read(made.begin(ask(prompt_logprobs=True), 60)) == LONG
        assert verify.streams == 0
        assert await read(made.begin(ask(prediction_tokens=bytes(12)), 60)) == LONG
    assert verify.streams == 1


@pytest.mark.asyncio
async def test_a_new_token_opens_a_new_stream_and_the_old_one_ends_after_its_calls(tmp_path: Path) -> None:
    """Which calls go by which token is verify's to see: the fake takes only what the file has when a stream begins."""
    path = tmp_path / "tokens"
    path.write_text("the-token-of-before")
    verify = fake(tmp_path, hold_after=1)
    server = create_server(auth=AuthInterceptor(token_file(str(path), "--token-file")))
    verify_pb2_grpc.add_VerifyServiceServicer_to_server(verify, server)
    address = bind(server, f"unix:{tmp_path}/verify")
    await server.start()
    ours = tmp_path / "ours"
    ours.write_text("the-token-of-before")
    args = GatewayArgs(verify_address=(address,), token_file=str(ours))
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(server.stop, None)
        channel = await stack.enter_async_context(dialer_of(args, (address,), args.token_file)(address))
        made = ReplicaCalls(channel)
        old = made.begin(ask(), 60)
        await old.take()
        replace(path, "a-token-of-afterwards")
        replace(ours, "a-token-of-afterwards")
        new = made.begin(ask(), 60)
        await new.take()
        verify.release.set()
        assert await read(new) == await read(old) == LONG[1:]
        assert verify.streams == 2
        replace(ours, "a-token-that-is-wrong")
        with contextlib.suppress(NotOffered), pytest.raises(Broken):
            await read(made.begin(ask(), 60))
        with pytest.raises(Broken):
            await read(made.begin(ask(), 60, alone=True))


@pytest.mark.asyncio
async def test_a_trace_goes_with_its_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[verify_pb2.GenerateCall] = []
    stream = calls._Stream
    frame_of = stream._frame

    def noted(self: Any) -> verify_pb2.GenerateManyRequest:
        frame = frame_of(self)
        begun.extend(frame.begin)
        return frame

    monkeypatch.setattr(stream, "_frame", noted)
    verify = fake(tmp_path)
    async with calls_to(verify, tmp_path) as made:
        set_call_metadata("request", "00-trace")
        assert await read(made.begin(ask(), 60)) == LONG
    (begin,) = begun
    assert begin.traceparent == "00-trace"
    assert begin.timeout_ms == 60_000
