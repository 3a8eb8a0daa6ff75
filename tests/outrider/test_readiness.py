"""Waiting until a process serves."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from pathlib import Path
from typing import Any, ClassVar

import grpc
import pytest

from outrider.launcher import choose_port
from outrider.readiness import model_name, wait_healthy, wait_serving
from outrider.rpc import add_health_and_reflection, bind, create_server, set_serving
from outrider.v1 import common_pb2, verify_pb2, verify_pb2_grpc
from tests.leaving_peer import leaving_peer


@pytest.mark.asyncio
async def test_wait_serving_outlasts_not_serving_and_a_restart(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/a.sock"
    waiting = asyncio.create_task(wait_serving(address))
    first = create_server()
    add_health_and_reflection(first, [])
    bind(first, address)
    await first.start()
    await first.stop(0)
    second = create_server()
    health = add_health_and_reflection(second, [])
    bind(second, address)
    await second.start()
    assert not waiting.done()
    set_serving(health, [], True)
    await waiting
    await second.stop(0)


@pytest.mark.asyncio
async def test_a_leaving_server_is_asked_again_after_a_pause_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC itself, asking again, once went round until memory ran out."""

    async def pause(_seconds: float) -> None:
        raise InterruptedError

    async with leaving_peer(f"{tmp_path}/a.sock") as peer:
        monkeypatch.setattr(asyncio, "sleep", pause)
        with pytest.raises(InterruptedError):
            await wait_serving(f"unix:{tmp_path}/a.sock")
    assert peer.calls == [1]


@pytest.mark.asyncio
async def test_the_models_name_is_asked_for_until_it_is_said(tmp_path: Path) -> None:
    class Verify(verify_pb2_grpc.VerifyServiceServicer):
        failures: ClassVar = [grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE]

        async def GetServerInfo(self, request: Any, context: Any) -> verify_pb2.VerifyServiceGetServerInfoResponse:
            if self.failures:
                await context.abort(self.failures.pop(), "")
            return verify_pb2.VerifyServiceGetServerInfoResponse(model=common_pb2.ModelInfo(model_path="/models/a"))

    server = create_server()
    verify_pb2_grpc.add_VerifyServiceServicer_to_server(Verify(), server)  # pyright: ignore[reportAbstractUsage]
    bind(server, f"unix:{tmp_path}/a.sock")
    await server.start()
    try:
        assert await model_name(f"unix:{tmp_path}/a.sock") == "a"
    finally:
        await server.stop(0)


@pytest.mark.asyncio
async def test_who_was_waited_for_is_left_alone(tmp_path: Path) -> None:
    """A connection that stayed would be heard of when the service ends: gRPC writes a line then."""
    server, behind, left = create_server(), f"{tmp_path}/behind.sock", asyncio.Event()
    health = add_health_and_reflection(server, [])
    bind(server, f"unix:{behind}")
    await server.start()
    set_serving(health, [], True)

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(ConnectionError):  # who leaves with something unread
                while data := await reader.read(65_536):
                    writer.write(data)
        finally:
            writer.close()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, asks = await asyncio.open_unix_connection(behind)
        back = asyncio.create_task(pass_on(answers, writer))
        await pass_on(reader, asks)
        left.set()
        await back

    gc.disable()  # it may come late
    try:
        async with await asyncio.start_unix_server(answer, f"{tmp_path}/a.sock"):
            await wait_serving(f"unix:{tmp_path}/a.sock")
            await asyncio.wait_for(left.wait(), 30)
    finally:
        gc.enable()
        await server.stop(0)


@pytest.mark.asyncio
async def test_wait_healthy_outlasts_refusals_hang_ups_and_errors() -> None:
    answers = [b"", b"HTTP/1.1 503 Service Unavailable\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n"]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answers.pop(0))
        writer.close()

    with contextlib.ExitStack() as held:
        port = choose_port("127.0.0.1", 0, held)
        waiting = asyncio.create_task(wait_healthy("127.0.0.1", port))
        async with await asyncio.start_server(answer, "127.0.0.1", port):
            await waiting
    assert answers == []
