"""Connections that end without a call, as Linux tells of them, through real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from outrider import rpc, serving, strangers
from outrider.args import VerifyArgs
from outrider.strangers import Ended, Strangers, open_feed, parse, tcp_peer
from outrider.v1 import verify_pb2, verify_pb2_grpc

EVENT = "a connection ended without a call"


def told_here() -> bool:
    """Whether this system tells of connections that end."""
    with contextlib.suppress(OSError), open_feed([1]):
        return True
    return False


needs_system = pytest.mark.skipif(not told_here(), reason="this system does not tell of connections that end")


class Counted(Strangers):
    """Knows how many connections ended, strangers' and others'."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[Ended] = []
        self.news = asyncio.Condition()

    def ended(self, connection: Ended) -> None:
        super().ended(connection)
        self.all.append(connection)
        self._task = asyncio.ensure_future(self._tell())

    async def _tell(self) -> None:
        async with self.news:
            self.news.notify_all()

    async def until(self, number: int) -> None:
        """Returns when so many ended."""
        async with self.news, asyncio.timeout(30):
            await self.news.wait_for(lambda: len(self.all) >= number)


@asynccontextmanager
async def served(known: Strangers, listen: str, token_file: str | None = None) -> AsyncIterator[int]:
    """A server as services have it, watched; gives its port."""
    args = VerifyArgs(listen=listen, token_file=token_file)
    server = serving.create_server(args, strangers=known)
    health = rpc.add_health_and_reflection(server, [])
    addresses = serving.listen(server, args, listen)
    await server.start()
    rpc.set_serving(health, [], True)
    try:
        async with known.watched(addresses):
            yield int(addresses[0].rpartition(":")[2])
    finally:
        await server.stop(None)


async def call(host: str, port: int) -> None:
    async with rpc.create_channel(f"{host}:{port}") as channel:
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)


async def scan(host: str, port: int, sent: bytes) -> str:
    """Connects, sends, waits to be closed if anything was sent, leaves; gives the own address as gRPC writes it."""
    reader, writer = await asyncio.open_connection(host, port)
    mine = tcp_peer(*writer.get_extra_info("sockname")[:2])
    if sent:
        writer.write(sent)
        await reader.read()
    writer.close()
    await writer.wait_closed()
    return mine


@needs_system
@pytest.mark.parametrize(
    ("listen", "host"), [("127.0.0.1:0", "127.0.0.1"), ("0.0.0.0:0", "127.0.0.1"), ("[::1]:0", "::1")]
)
@pytest.mark.asyncio
async def test_who_makes_no_call_is_told_of(listen: str, host: str) -> None:
    known = Counted()
    scans = (b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01", b"\x00" * 1000)
    with capture_logs() as logs:
        async with served(known, listen) as port:
            peers = [await scan(host, port, sent) for sent in scans]
            await call(f"[{host}]" if ":" in host else host, port)  # a friend
            await known.until(len(scans) + 1)
    lines = {log["peer"]: log for log in logs if log["event"] == EVENT}
    assert lines.keys() == set(peers)
    for peer, sent in zip(peers, scans, strict=True):
        assert 0 <= lines[peer]["received_bytes"] - len(sent) <= 1
        assert lines[peer]["port"] == port
    assert known.num_ended == len(scans)
    registry = CollectorRegistry()
    registry.register(known.families)
    assert registry.get_sample_value("outrider_connections_without_call_total") == len(scans)


@needs_system
@pytest.mark.asyncio
async def test_other_ports_are_not_heard_of_and_a_flood_fills_no_log() -> None:
    known, elsewhere = Counted(), Counted()
    with capture_logs() as logs:
        async with served(elsewhere, "127.0.0.1:0") as other, served(known, "127.0.0.1:0") as port:
            for _ in range(3):
                await scan("127.0.0.1", other, b"")
            for _ in range(30):
                await scan("127.0.0.1", port, b"")
            await known.until(30)
            await elsewhere.until(3)
    assert {ended.port for ended in known.all} == {port}
    assert (known.num_ended, elsewhere.num_ended) == (30, 3)
    assert sum(log.get("port") == port for log in logs) == 20


@needs_system
@pytest.mark.asyncio
async def test_who_is_refused_for_its_token_is_told_of_once(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("a-token-that-nobody-sends")
    known = Counted()
    with capture_logs() as logs:
        async with served(known, "127.0.0.1:0", str(tmp_path / "tokens")) as port:
            async with rpc.create_channel(f"127.0.0.1:{port}") as channel:
                with pytest.raises(grpc.aio.AioRpcError):
                    await verify_pb2_grpc.VerifyServiceStub(channel).GetServerInfo(
                        verify_pb2.VerifyServiceGetServerInfoRequest()
                    )
            await known.until(1)
    assert known.num_ended == 0
    assert [log["event"] for log in logs if "token" in log["event"]] == ["refused a call without a valid token"]


@pytest.mark.asyncio
async def test_a_system_that_does_not_tell_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(ports: Sequence[int]) -> socket.socket:
        raise OSError(errno.ENOENT, "the kernel has no tcp_diag")

    monkeypatch.setattr(strangers, "open_feed", refuse)
    known = Strangers()
    with capture_logs() as logs:
        async with served(known, "127.0.0.1:0") as port:
            await scan("127.0.0.1", port, b"")
            await call("127.0.0.1", port)
    assert [(log["event"].split(":")[0], log["log_level"]) for log in logs] == [("strangers are not told of", "info")]
    registry = CollectorRegistry()
    registry.register(known.families)
    assert registry.get_sample_value("outrider_connections_without_call_total") is None


@pytest.mark.asyncio
async def test_sockets_need_no_watch(tmp_path: object) -> None:
    with capture_logs() as logs:
        async with Strangers().watched(["unix:/nowhere.sock"]):
            pass
    assert logs == []


def test_memory_for_friends_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "_MOST_KNOWN", 2)
    known = Strangers()
    for number in (1, 2, 2, 3):
        known.note(f"ipv4:10.0.0.1:{number}")
    with capture_logs() as logs:
        for number in (1, 2, 3, 3):
            known.ended(Ended(50051, f"ipv4:10.0.0.1:{number}", 0))
    assert [log["peer"] for log in logs] == ["ipv4:10.0.0.1:1", "ipv4:10.0.0.1:3"]  # 3 came back and said nothing


def message(family: int, ours: int, theirs: int, peer: bytes, received: int, kind: int = 20) -> bytes:
    """A message as the kernel writes it."""
    info = bytes(128) + struct.pack("=Q", received) + bytes(100)
    body = struct.pack("=4B", family, 7, 0, 0) + struct.pack(">HH", ours, theirs) + bytes(16) + peer.ljust(16, b"\0")
    body += bytes(72 - len(body))
    for number, content in ((15, b"\1"), (2, info)):
        body += struct.pack("=HH", 4 + len(content), number) + content + bytes(-len(content) % 4)
    return struct.pack("=IHHII", 16 + len(body), kind, 0, 0, 0) + body


def test_what_the_kernel_says_is_read() -> None:
    four, six = socket.inet_aton("10.1.2.3"), socket.inet_pton(socket.AF_INET6, "2001:db8::7")
    mapped = bytes(10) + b"\xff\xff" + four
    data = b"".join(
        [
            message(socket.AF_INET, 50051, 4242, four, 99), message(socket.AF_INET6, 50051, 4243, six, 2**40),
            message(socket.AF_INET6, 50051, 4244, mapped, 0), message(socket.AF_INET, 50051, 0, bytes(4), 0),
            message(socket.AF_INET, 50051, 4245, four, 0, kind=3),
        ]
    )  # fmt: skip
    assert parse(data) == [
        Ended(50051, "ipv4:10.1.2.3:4242", 99), Ended(50051, "ipv6:%5B2001:db8::7%5D:4243", 2**40),
        Ended(50051, "ipv4:10.1.2.3:4244", 0),
    ]  # fmt: skip
    for cut in range(len(data)):  # never more than was there, and never an error
        assert len(parse(data[:cut])) <= 3
    assert parse(bytes(1000)) == []
