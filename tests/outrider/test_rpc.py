"""Errors, health and reflection over a real Unix socket."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import uvloop
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from outrider import errors, rpc
from outrider.args import DraftArgs
from outrider.errors import BY_STATUS, InvalidArgument, NotFound, OutriderError, ResourceExhausted, StartupError
from outrider.health_service import MAX_WATCHERS
from outrider.serving import check_free, listen
from outrider.v1 import common_pb2
from outrider.wire import MAX_MESSAGE_BYTES
from tests.e2e.proxy import Proxy
from tests.leaving_peer import leaving_peer

SERVICE = "outrider.v1.DraftService"

Handler = Callable[..., Any]


@asynccontextmanager
async def serving(address: str, **handlers: grpc.RpcMethodHandler) -> AsyncIterator[grpc.aio.Channel]:
    """A server with these methods of SERVICE, and a channel to it."""
    server = rpc.create_server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    health = rpc.add_health_and_reflection(server, [SERVICE])
    rpc.bind(server, address)
    await server.start()
    rpc.set_serving(health, [SERVICE], True)
    async with rpc.create_channel(address) as channel:
        yield channel
    await server.stop(0)


def unary(error: Exception) -> grpc.RpcMethodHandler:
    async def handle(request: bytes, context: Any) -> bytes:
        raise error

    return grpc.unary_unary_rpc_method_handler(handle)


def server_stream(error: Exception) -> grpc.RpcMethodHandler:
    async def handle(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        raise error

    return grpc.unary_stream_rpc_method_handler(handle)


def client_stream(error: Exception) -> grpc.RpcMethodHandler:
    async def handle(requests: AsyncIterator[bytes], context: Any) -> bytes:
        async for _ in requests:
            raise error
        return b""

    return grpc.stream_unary_rpc_method_handler(handle)


def both_stream(error: Exception) -> grpc.RpcMethodHandler:
    async def handle(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for _ in requests:
            yield b"first"
            raise error

    return grpc.stream_stream_rpc_method_handler(handle)


async def call(channel: grpc.aio.Channel, kind: str, method: str = "Method") -> list[bytes]:
    """The responses to one request, however the method takes and gives them."""
    path = f"/{SERVICE}/{method}"
    if kind == "unary":
        return [await channel.unary_unary(path, None, None)(b"")]
    if kind == "client_stream":
        return [await channel.stream_unary(path, None, None)(iter([b""]))]
    if kind == "server_stream":
        return [response async for response in channel.unary_stream(path, None, None)(b"")]
    return [response async for response in channel.stream_stream(path, None, None)(iter([b""]))]


KINDS = {"unary": unary, "server_stream": server_stream, "client_stream": client_stream, "both_stream": both_stream}


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_our_errors_come_back_as_themselves(kind: str, tmp_path: Path) -> None:
    error = ResourceExhausted("the queue is full", field="prompt_tokens", retry_after_s=2.5)
    async with serving(f"unix:{tmp_path}/a.sock", Method=KINDS[kind](error)) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call(channel, kind)
    assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    ours = rpc.error_from_rpc(failed.value)
    assert isinstance(ours, ResourceExhausted)
    assert (ours.message, ours.field, ours.retry_after_s) == ("the queue is full", "prompt_tokens", 2.5)


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_unexpected_errors_tell_the_peer_nothing(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(f"unix:{tmp_path}/a.sock", Method=KINDS[kind](RuntimeError("a secret"))) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call(channel, kind)
    assert failed.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in f"{failed.value.details()}{failed.value.trailing_metadata()}"


@pytest.mark.asyncio
async def test_metadata_over_its_limit_is_always_refused(tmp_path: Path) -> None:
    async with serving(f"unix:{tmp_path}/a.sock", Method=unary(TimeoutError())) as channel:
        for _ in range(16):
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await channel.unary_unary(f"/{SERVICE}/Method", None, None)(b"", metadata=(("x", "y" * 16_384),))
            assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.asyncio
async def test_a_timeout_is_a_deadline(tmp_path: Path) -> None:
    async with serving(f"unix:{tmp_path}/a.sock", Method=unary(TimeoutError())) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call(channel, "unary")
    assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", list(BY_STATUS.values()))
async def test_every_kind_of_error_crosses_the_wire(kind: type[OutriderError], tmp_path: Path) -> None:
    async with serving(f"unix:{tmp_path}/a.sock", Method=unary(kind("why"))) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call(channel, "unary")
    assert type(rpc.error_from_rpc(failed.value)) is kind
    assert failed.value.details() == "why"


@pytest.mark.asyncio
async def test_a_field_is_a_bad_request_detail(tmp_path: Path) -> None:
    async with serving(f"unix:{tmp_path}/a.sock", Method=unary(InvalidArgument("no", field="top_p"))) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call(channel, "unary")
    assert rpc.error_from_rpc(failed.value).field == "top_p"


@pytest.mark.asyncio
@pytest.mark.parametrize("character", ["x", "\u20ac", "\ud800"])
async def test_a_message_too_long_for_headers_is_cut_and_the_status_stays(character: str, tmp_path: Path) -> None:
    long = NotFound("it is called " + 2**20 * character, field="name")
    async with serving(f"unix:{tmp_path}/a.sock", Method=unary(long)) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call(channel, "unary")
    error = rpc.error_from_rpc(failed.value)
    assert isinstance(error, NotFound)
    assert error.field == "name"
    assert error.message.startswith("it is called ")
    assert len(error.message) <= 1000


@pytest.mark.asyncio
async def test_an_unknown_method_is_unimplemented_and_an_absent_server_unavailable(tmp_path: Path) -> None:
    async with serving(f"unix:{tmp_path}/a.sock", Method=unary(NotFound("x"))) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call(channel, "unary", "Another")
        assert isinstance(rpc.error_from_rpc(failed.value), errors.Unimplemented)
    async with rpc.create_channel(f"unix:{tmp_path}/nobody.sock") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call(channel, "unary")
        assert isinstance(rpc.error_from_rpc(failed.value), errors.Unavailable)


@pytest.mark.asyncio
async def test_a_call_that_a_leaving_peer_did_not_look_at_is_made_once(tmp_path: Path) -> None:
    async with leaving_peer(f"{tmp_path}/a.sock") as peer, rpc.create_channel(f"unix:{tmp_path}/a.sock") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call(channel, "unary")
    assert isinstance(rpc.error_from_rpc(failed.value), errors.Unavailable)
    assert peer.calls == [1]


@pytest.mark.asyncio
async def test_a_message_over_the_limit_is_refused_and_the_channel_goes_on(tmp_path: Path) -> None:
    async def length(request: bytes, context: Any) -> bytes:
        return str(len(request)).encode()

    method = grpc.unary_unary_rpc_method_handler(length)
    async with serving(f"unix:{tmp_path}/a.sock", Method=method) as channel:
        send = channel.unary_unary(f"/{SERVICE}/Method", None, None)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await send(bytes(MAX_MESSAGE_BYTES + 1))
        assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await send(bytes(MAX_MESSAGE_BYTES)) == str(MAX_MESSAGE_BYTES).encode()


@pytest.mark.asyncio
async def test_bytes_that_are_no_message_are_an_error_and_the_channel_goes_on(tmp_path: Path) -> None:
    async def echo(request: common_pb2.ModelInfo, context: Any) -> common_pb2.ModelInfo:
        return request

    method = grpc.unary_unary_rpc_method_handler(
        echo, common_pb2.ModelInfo.FromString, common_pb2.ModelInfo.SerializeToString
    )
    async with serving(f"unix:{tmp_path}/a.sock", Method=method) as channel:
        send = channel.unary_unary(f"/{SERVICE}/Method", None, None)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await send(b"\xff\xff\xff")
        assert isinstance(rpc.error_from_rpc(failed.value), InvalidArgument)
        assert await send(b"") == b""


@pytest.mark.asyncio
async def test_health_and_reflection_answer(tmp_path: Path) -> None:
    async with serving(f"unix:{tmp_path}/a.sock", Method=unary(NotFound("x"))) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", SERVICE):
            reply = await health.Check(health_pb2.HealthCheckRequest(service=service))
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = [reflection_pb2.ServerReflectionRequest(list_services="")]
        async for listed in reflection.ServerReflectionInfo(iter(asked)):
            names = {service.name for service in listed.list_services_response.service}
            assert {SERVICE, "grpc.health.v1.Health"} <= names


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("symbol", "file"),
    [
        ("outrider.v1.VerifyService", "outrider/v1/verify.proto"),
        ("outrider.v1.VerifyService.Generate", "outrider/v1/verify.proto"),
        ("outrider.v1.GenerateRequest.request_id", "outrider/v1/verify.proto"),
        ("grpc.health.v1.Health.Check", "grpc_health/v1/health.proto"),
        ("outrider.v1.VerifyService.Nothing", None),
        ("outrider.v1.Nothing.Generate", None),
        ("outrider.v1.GenerateRequest.nothing", None),
        ("nothing", None),
        ("", None),
    ],
)
async def test_reflection_finds_the_file_of_a_name(tmp_path: Path, symbol: str, file: str | None) -> None:
    async with serving(f"unix:{tmp_path}/a.sock", Method=unary(NotFound("x"))) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = [reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol)]
        (found,) = [answer async for answer in stub.ServerReflectionInfo(iter(asked))]
    if file is None:
        assert found.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
    else:
        first = FileDescriptorProto.FromString(found.file_descriptor_response.file_descriptor_proto[0])
        assert first.name == file


@pytest.mark.asyncio
async def test_not_serving_until_told(tmp_path: Path) -> None:
    server = rpc.create_server()
    servicer = rpc.add_health_and_reflection(server, [SERVICE])
    rpc.bind(server, f"unix:{tmp_path}/a.sock")
    await server.start()
    async with rpc.create_channel(f"unix:{tmp_path}/a.sock") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await health.Check(health_pb2.HealthCheckRequest(service="another"))
        assert failed.value.code() is grpc.StatusCode.NOT_FOUND
        for service in ("", SERVICE):
            reply = await health.Check(health_pb2.HealthCheckRequest(service=service))
            assert reply.status == health_pb2.HealthCheckResponse.NOT_SERVING
        watching = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watching.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        rpc.set_serving(servicer, [SERVICE], True)
        assert (await watching.read()).status == health_pb2.HealthCheckResponse.SERVING
        watching.cancel()
    await server.stop(0)


@pytest.mark.asyncio
async def test_strangers_watch_little(tmp_path: Path) -> None:
    """Health is open to them; what they watch is kept."""
    async with serving(f"unix:{tmp_path}/a.sock") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await health.Watch(health_pb2.HealthCheckRequest(service="x" * 257)).read()
        assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        unknown = [health.Watch(health_pb2.HealthCheckRequest(service="x" * 256)) for _ in range(MAX_WATCHERS)]
        for watching in unknown:
            assert (await watching.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await health.Watch(health_pb2.HealthCheckRequest()).read()
        assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for watching in unknown:
            watching.cancel()


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["unix:{}/a.sock", "unix-abstract:{}"])
async def test_a_socket_that_somebody_serves_is_not_taken(tmp_path: Path, kind: str) -> None:
    address = kind.format(tmp_path)
    check_free(address)
    async with serving(address):
        with pytest.raises(StartupError, match="another process serves there"):
            check_free(address)
        second = rpc.create_server()
        with pytest.raises(StartupError, match="another process serves there"):
            listen(second, DraftArgs(), address)
        await second.stop(0)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(f"{tmp_path}/left.sock")
    check_free(f"unix:{tmp_path}/left.sock")  # what is left of one may go


@pytest.mark.parametrize(
    ("path", "fault"),
    [("none/a.sock", "there is no folder .*none; make it"), ("file", "a file that is no socket is there")],
)
def test_a_socket_that_cannot_be_made_is_refused_in_words(tmp_path: Path, path: str, fault: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartupError, match=f"cannot listen on unix:{tmp_path}/{path}: {fault}"):
        check_free(f"unix:{tmp_path}/{path}")


@pytest.mark.asyncio
async def test_binding(tmp_path: Path) -> None:
    server = rpc.create_server()
    address = rpc.bind(server, "127.0.0.1:0")
    assert int(address.rpartition(":")[2]) > 0
    await server.start()
    other = rpc.create_server()
    with pytest.raises(StartupError, match=f"cannot listen on {address}"):
        rpc.bind(other, address)
    with pytest.raises(StartupError, match="cannot listen on unix:: it must be unix:/path"):
        rpc.bind(other, "unix:")
    await server.stop(0)
    await other.stop(0)


def test_every_error_has_a_status_of_its_own() -> None:
    assert len(BY_STATUS) == 9
    for status, kind in BY_STATUS.items():
        assert kind.status is status
        assert 400 <= kind.http_status < 600


def test_programs_are_started_while_calls_go_on(tmp_path: Path) -> None:
    """uvloop forks: gRPC's handlers of that crash one child of six, and break calls of the parent."""
    address = f"unix:{tmp_path}/calls"

    async def call_on(stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            async with rpc.create_channel(address) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                for _ in range(20):
                    await stub.Check(health_pb2.HealthCheckRequest())

    async def run() -> list[int]:
        stopping = asyncio.Event()
        async with serving(address), asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(call_on(stopping))
            codes = [await (await asyncio.create_subprocess_exec("true")).wait() for _ in range(60)]
            stopping.set()
        return codes

    assert uvloop.run(run()) == [0] * 60


def test_grpc_knows_the_switches_that_it_is_given() -> None:
    """It writes a line for each that it does not know; here into the logs of all services."""
    serves = (
        "import asyncio, outrider, os\n"
        "from outrider import rpc\n"
        "async def serve():\n"
        "    server = rpc.create_server()\n"
        "    server.add_insecure_port('127.0.0.1:0')\n"
        "    await server.start()\n"
        "    await server.stop(0)\n"
        "asyncio.run(serve())\n"
        "print(os.environ.get('GRPC_EXPERIMENTS'))\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    done = subprocess.run([sys.executable, "-c", serves], env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    release = tuple(map(int, grpc.__version__.split(".")[:2]))
    assert (done.stdout.strip() == "-event_engine_client,-event_engine_listener") == (release <= (1, 85))


@pytest.mark.asyncio
async def test_a_peer_that_fell_silent_is_noticed_by_keepalive(tmp_path: Path) -> None:
    async def handle(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        await asyncio.Event().wait()

    server = rpc.create_server()
    handlers = {"Method": grpc.unary_stream_rpc_method_handler(handle)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    address = rpc.bind(server, "127.0.0.1:0")
    await server.start()
    async with Proxy(address) as proxy, rpc.create_channel(proxy.address) as channel:
        stream = channel.unary_stream(f"/{SERVICE}/Method", None, None)(b"")
        assert await stream.read() == b"first"
        proxy.abandon()
        async with asyncio.timeout(40):  # gRPC's own patience is a minute
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await stream.read()
    assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
    await server.stop(0)


@pytest.mark.asyncio
async def test_a_caller_that_is_gone_is_no_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A write that fails says so in gRPC's way: no line tells of a fault of ours."""
    async with serving(f"unix:{tmp_path}/s", Method=unary(grpc.aio.InternalError("write failed"))) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call(channel, "unary")
    assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
    told = "".join(capfd.readouterr()).lower().splitlines()
    assert not [line for line in told if "error" in line and "got goaway" not in line]  # which gRPC says of its own
