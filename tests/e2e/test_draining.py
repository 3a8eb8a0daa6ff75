"""SIGTERM to a verify service: what runs is finished, nothing new begins, and it leaves."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.rpc import create_channel
from outrider.v1 import common_pb2, verify_pb2, verify_pb2_grpc
from outrider.wire import pack_ids
from tests.e2e.cluster import Replica
from tests.e2e.proxy import Proxy
from tests.e2e.small_model import write_small_model
from tests.polling import until_async

pytestmark = pytest.mark.slow
SERVED = "", "outrider.v1.VerifyService", "outrider.v1.AdminService"
NUM_CHOICES = 8  # with MAX_TOKENS each more than flow control lets through while nobody reads
MAX_TOKENS = 900
SAMPLING = common_pb2.SamplingParams(max_tokens=MAX_TOKENS, temperature=0.8, seed=1, ignore_eos=True)
LONG = verify_pb2.GenerateRequest(prompt_tokens=pack_ids([5, 6, 7]), sampling=SAMPLING, num_choices=NUM_CHOICES)


@pytest_asyncio.fixture
async def replica(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Replica]:
    """A verify service that gives running calls a minute."""
    model = write_small_model(tmp_path_factory.mktemp("small"))
    async with Proxy("") as front, Proxy("") as back:
        replica = Replica(model, ("--shutdown-grace-s=60",), front, back, [])
        await replica.start()
        try:
            yield replica
        finally:
            await replica.stop()


@pytest.mark.asyncio
async def test_what_runs_is_finished_and_a_second_signal_ends_it(replica: Replica) -> None:
    for hurried in (False, True):
        if replica.process is None:
            await replica.start()
        async with create_channel(replica.front.address) as far, create_channel(replica.address) as near:
            stub = verify_pb2_grpc.VerifyServiceStub(far)
            responses = aiter(stub.Generate(LONG, timeout=120.0))
            await anext(responses)
            replica.front.hold_answers()
            await _terminate(replica, near)
            if hurried:
                assert replica.process is not None
                replica.process.popen.send_signal(signal.SIGTERM)
            ended = asyncio.create_task(_exit_code(replica))
            replica.front.heal()
            finished, error = await _read_on(responses)
            if hurried:
                assert error is not None
                assert error.code() is grpc.StatusCode.UNAVAILABLE
                assert finished < NUM_CHOICES
            else:
                assert error is None
                assert finished == NUM_CHOICES
            assert await ended == 0
            await replica.stop()


async def _exit_code(replica: Replica) -> int:
    """The exit code of the process, once it has ended by itself."""
    assert replica.process is not None
    return await asyncio.to_thread(replica.process.popen.wait, 100)


async def _health(near: grpc.aio.Channel) -> dict[str, int]:
    """Health state by service."""
    listed = await health_pb2_grpc.HealthStub(near).List(health_pb2.HealthListRequest(), timeout=60.0)
    return {name: state.status for name, state in listed.statuses.items()}


async def _terminate(replica: Replica, near: grpc.aio.Channel) -> None:
    """Sends the first signal: health says so of all services, and new requests are refused."""
    assert replica.process is not None
    assert await _health(near) == dict.fromkeys(SERVED, health_pb2.HealthCheckResponse.SERVING)
    replica.process.popen.send_signal(signal.SIGTERM)
    health = health_pb2_grpc.HealthStub(near)
    check = health_pb2.HealthCheckRequest()
    await until_async(
        lambda: health.Check(check, timeout=60.0), "verify does not drain",
        done=lambda answer: answer.status == health_pb2.HealthCheckResponse.NOT_SERVING,
    )  # fmt: skip
    assert await _health(near) == dict.fromkeys(SERVED, health_pb2.HealthCheckResponse.NOT_SERVING)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await verify_pb2_grpc.VerifyServiceStub(near).Generate(LONG, timeout=60.0).read()
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert (await replica.info()).state.draining


async def _read_on(responses: AsyncIterator[verify_pb2.GenerateResponse]) -> tuple[int, grpc.aio.AioRpcError | None]:
    """How many choices were finished, and with what the stream ended."""
    finished = 0
    try:
        async for response in responses:
            finished += response.HasField("finish")
    except grpc.aio.AioRpcError as error:
        return finished, error
    return finished, None
