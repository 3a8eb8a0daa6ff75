"""TLS, tokens and limits on gRPC links, over real sockets: who gets in, who does not, and what the log says."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from outrider import rpc, serving, stopping, tls
from outrider.args import DraftArgs, GatewayArgs, ServeArgs, VerifyArgs
from outrider.auth import TokenFile
from outrider.dialing import Dialer, common_name, dialer_of
from outrider.errors import StartupError
from outrider.flags import Args
from outrider.telemetry import Throttle
from outrider.tls import TlsFiles
from outrider.wire import MAX_MESSAGE_BYTES
from tests.certificates import Authority
from tests.files import replace

SERVICE = "outrider.test"
FIRST, SECOND = "first-token-of-services", "second-token-of-services"


@asynccontextmanager
async def echoing(args: VerifyArgs) -> AsyncIterator[str]:
    """A server of unary and stream echoes, as the flags want it; gives its port on localhost."""

    async def echo(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return request

    async def echo_all(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request

    server = serving.create_server(args)
    handlers = {
        "Echo": grpc.unary_unary_rpc_method_handler(echo), "EchoAll": grpc.stream_stream_rpc_method_handler(echo_all)
    }  # fmt: skip
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    health = rpc.add_health_and_reflection(server, [])
    (address,) = serving.listen(server, args, args.listen)
    await server.start()
    rpc.set_serving(health, [], True)
    try:
        yield f"localhost:{address.rpartition(':')[2]}" if "unix" not in address else address
    finally:
        await server.stop(None)


async def echo(channel: grpc.aio.Channel, data: bytes = b"hello") -> bytes:
    return await cast(Any, channel).unary_unary(f"/{SERVICE}/Echo")(data, timeout=60)


async def refused(channel: grpc.aio.Channel, data: bytes = b"hello") -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await echo(channel, data)
    return caught.value.code(), caught.value.details() or ""


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def tls_args(authority: Authority, *, mutual: bool, **more: Any) -> VerifyArgs:
    certfile, keyfile = authority.issue("localhost")
    return VerifyArgs(
        listen="127.0.0.1:0", ssl_certfile=certfile, ssl_keyfile=keyfile,
        ssl_ca_certs=str(authority.path) if mutual else None, **more,
    )  # fmt: skip


def dialer(authority: Authority, certificate: tuple[str, str] | tuple[None, None] = (None, None)) -> Dialer:
    return Dialer(tls=TlsFiles(*certificate, str(authority.path)))


@pytest.mark.asyncio
async def test_tls_serves_whoever_trusts_the_authority(authority: Authority, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    stranger = Authority(tmp_path / "other")
    async with echoing(tls_args(authority, mutual=False)) as address:
        async with dialer(authority)(address) as channel:
            assert await echo(channel) == b"hello"
            calls = cast(Any, channel).stream_stream(f"/{SERVICE}/EchoAll")()
            await calls.write(b"one")
            assert await calls.read() == b"one"
            await calls.done_writing()
        async with dialer(stranger)(address) as channel:
            code, details = await refused(channel)
            assert code is grpc.StatusCode.UNAVAILABLE
            assert "CERTIFICATE_VERIFY_FAILED" in details
        async with rpc.create_channel(address) as channel:  # without TLS
            assert (await refused(channel))[0] is grpc.StatusCode.UNAVAILABLE


@pytest.mark.asyncio
async def test_mutual_tls_takes_the_authoritys_clients_alone(
    authority: Authority, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other").mkdir()
    stranger = Authority(tmp_path / "other").issue("gateway")
    async with echoing(tls_args(authority, mutual=True)) as address:
        async with dialer(authority, authority.issue("gateway"))(address) as channel:
            assert await echo(channel) == b"hello"
        for certificate in ((None, None), stranger, authority.issue("late", expired=True)):
            async with dialer(authority, certificate)(address) as channel:
                assert (await refused(channel))[0] is grpc.StatusCode.UNAVAILABLE
    said = capfd.readouterr().err  # gRPC's own log: no certificate, another authority's, an expired one
    for reason in ("PEER_DID_NOT_RETURN_A_CERTIFICATE", "unable to get local issuer", "certificate has expired"):
        assert reason in said


@pytest.mark.asyncio
async def test_certificates_are_renewed_without_a_restart(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A connection that is tried again while certificate and key are replaced may have complained before.
    monkeypatch.setattr(tls, "Throttle", lambda lines_a_minute: Throttle())
    args = tls_args(authority, mutual=True)
    broken = Path(args.ssl_keyfile or "")
    client = authority.issue("gateway", expired=True)
    dial = dialer(authority, client)
    async with echoing(args) as address, dial(address) as channel:
        assert (await refused(channel))[0] is grpc.StatusCode.UNAVAILABLE
        authority.issue("gateway")
        assert await echo(channel) == b"hello"  # the same channel, with the new certificate

        calls = cast(Any, channel).stream_stream(f"/{SERVICE}/EchoAll")()
        await calls.write(b"one")
        assert await calls.read() == b"one"
        authority.issue("localhost", expired=True)
        authority.issue("gateway")  # so that the next call connects anew
        code, details = await refused(channel)
        assert (code, "expired" in details) == (grpc.StatusCode.UNAVAILABLE, True)
        await calls.write(b"two")  # who is in stays in
        assert await calls.read() == b"two"
        await calls.done_writing()

        authority.issue("localhost")
        broken.write_text("no key")  # noqa: ASYNC240
        authority.issue("gateway")
        with capture_logs() as logs:
            assert (await refused(channel))[0] is grpc.StatusCode.UNAVAILABLE  # the old one stays
        assert any("those before stay" in log["event"] for log in logs)
        authority.issue("localhost")
        authority.issue("gateway")
        assert await echo(channel) == b"hello"


@pytest.mark.asyncio
async def test_a_call_without_a_token_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"# services\n{FIRST}\n{SECOND}\n")
    async with echoing(VerifyArgs(listen="127.0.0.1:0", token_file=str(path))) as address:
        async with Dialer(tokens=TokenFile(str(path), "--token-file"))(address) as channel:
            assert await echo(channel) == b"hello"
        async with rpc.create_channel(address) as channel:
            values = ("Bearer ", FIRST, f"Bearer {FIRST}x", f"Basic {FIRST}")
            wrong = [(), (("x-authorization", f"Bearer {FIRST}"),), *((("authorization", value),) for value in values)]
            call = cast(Any, channel).unary_unary(f"/{SERVICE}/Echo")
            with capture_logs() as logs:
                for metadata in wrong:
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await call(b"x", metadata=metadata)
                    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert len(logs) == len(wrong)
            assert {log["method"] for log in logs} == {f"/{SERVICE}/Echo"}
            assert logs[0]["peer"].startswith("ipv")
            assert not any(FIRST in str(log) for log in logs)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await cast(Any, channel).unary_unary("/no.such/Method")(b"x")
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED  # strangers learn no names
            stream = cast(Any, channel).stream_stream(f"/{SERVICE}/EchoAll")()
            assert await stream.code() is grpc.StatusCode.UNAUTHENTICATED  # nothing was written
            for scheme in ("Bearer", "bearer"):
                assert await call(b"x", metadata=(("authorization", f"{scheme} {SECOND}"),)) == b"x"
            reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert reply.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.asyncio
async def test_tokens_rotate_without_a_pause(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "server", tmp_path / "client"
    ours.write_text(FIRST)
    theirs.write_text(FIRST)
    async with (
        echoing(VerifyArgs(listen="127.0.0.1:0", token_file=str(ours))) as address,
        Dialer(tokens=TokenFile(str(theirs), "--token-file"))(address) as channel,
    ):
        assert await echo(channel) == b"hello"
        for path, content, works in (
            (ours, f"{FIRST}\n{SECOND}", True), (theirs, f"{SECOND}\n{FIRST}", True), (ours, SECOND, True),
            (theirs, FIRST, False), (theirs, "short", False), (theirs, SECOND, True),
        ):  # fmt: skip
            replace(path, content)
            if works:
                assert await echo(channel) == b"hello"
            else:
                assert (await refused(channel))[0] is grpc.StatusCode.UNAUTHENTICATED


@pytest.fixture
def untold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has no line of earlier tests count, and the process forget after the test that it was asked to end."""
    monkeypatch.setattr(stopping, "_heard", set())
    monkeypatch.setattr(rpc, "_unread_lines", Throttle())


@pytest.mark.asyncio
@pytest.mark.usefixtures("untold")
async def test_a_request_over_the_limits_is_refused_and_logged() -> None:
    async with echoing(VerifyArgs(listen="127.0.0.1:0")) as address:
        options = [("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            with capture_logs() as logs:
                assert (await refused(channel, bytes(MAX_MESSAGE_BYTES + 1)))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await cast(Any, channel).unary_unary(f"/{SERVICE}/Echo")(b"", metadata=(("k", "v" * 40_000),))
                assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert await echo(channel) == b"hello"  # the connection lives on
                while not logs:  # noqa: ASYNC110  the refused calls' handlers go soon
                    await asyncio.sleep(0)
            assert {log["method"] for log in logs} == {f"/{SERVICE}/Echo"}
            assert all("before its request was read" in log["event"] for log in logs)
            assert {log["log_level"] for log in logs} == {"warning"}


@pytest.mark.asyncio
@pytest.mark.usefixtures("untold")
async def test_calls_given_up_at_an_end_in_good_order_are_no_warning() -> None:
    asked = asyncio.Event()
    stopping.on_signals(asked.set)
    async with echoing(VerifyArgs(listen="127.0.0.1:0")) as address:
        signal.raise_signal(signal.SIGTERM)
        await asked.wait()
        options = [("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            with capture_logs() as logs:
                await refused(channel, bytes(MAX_MESSAGE_BYTES + 1))
                while not logs:  # noqa: ASYNC110
                    await asyncio.sleep(0)
            assert [log["log_level"] for log in logs] == ["debug"]


@pytest.mark.asyncio
async def test_who_connects_and_says_nothing_is_let_go(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rpc, "_SERVER_OPTIONS", (*rpc._SERVER_OPTIONS[:-1], ("grpc.server_handshake_timeout_ms", 100)))
    for args, said in (
        (VerifyArgs(listen="127.0.0.1:0"), b"\x00\x00"),  # HTTP/2's settings
        (tls_args(authority, mutual=False), b"\x15\x03"),  # an alert
    ):
        async with echoing(args) as address:
            for sent in (b"", b"P", b"GET / HTTP/1.1\r\n", b"\x16\x03\x01"):
                _, port = address.split(":")
                reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
                writer.write(sent)
                received = await reader.read()  # until it is closed
                assert not received or received.startswith(said)
                writer.close()
            with socket.create_connection(("127.0.0.1", int(port))):
                pass  # a scan of ports: connects and leaves
    assert "Handshake failed" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("listen", "flags", "warned"),
    [
        ("127.0.0.1:0", {}, False), ("localhost:0", {}, False), ("[::1]:0", {}, False), ("0.0.0.0:0", {}, True),
        ("0.0.0.0:0", {"token": True}, True), ("0.0.0.0:0", {"token": True, "tls": True}, False),
        ("0.0.0.0:0", {"mutual": True, "tls": True}, False), ("0.0.0.0:0", {"tls": True}, True),
    ],
)  # fmt: skip
@pytest.mark.asyncio
async def test_an_open_door_is_warned_of(
    listen: str, flags: dict[str, bool], warned: bool, authority: Authority, tmp_path: Path
) -> None:
    given: dict[str, Any] = {}
    if flags.get("token"):
        (tmp_path / "t").write_text(FIRST)
        given["token_file"] = str(tmp_path / "t")
    if flags.get("tls"):
        given["ssl_certfile"], given["ssl_keyfile"] = authority.issue("localhost")
    if flags.get("mutual"):
        given["ssl_ca_certs"] = str(authority.path)
    with capture_logs() as logs:
        async with echoing(VerifyArgs(listen=listen, **given)):
            pass
    assert any("other machines can reach" in log["event"] for log in logs) is warned


def test_files_that_cannot_be_used_are_told_at_start(authority: Authority, tmp_path: Path) -> None:
    certfile, keyfile = authority.issue("localhost")
    _, other = authority.issue("gateway")
    (tmp_path / "short").write_text("short")
    (tmp_path / "none").write_text("# nothing\n")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"ssl_certfile": certfile}, "go together"), ({"ssl_ca_certs": certfile}, "go together"),
    ]  # fmt: skip
    for flags, complaint in cases:
        for kind in (VerifyArgs, DraftArgs, GatewayArgs, ServeArgs):
            with pytest.raises(StartupError, match=complaint):
                kind(**flags)
    short = str(tmp_path / "short")
    for files, complaint in (
        (TlsFiles(certfile, other, None), "--ssl-certfile .* and --ssl-keyfile .* are no certificate in PEM and"),
        (TlsFiles(short, keyfile, None), f"--ssl-certfile {short} and "),
        (TlsFiles(str(tmp_path / "gone"), keyfile, None), "--ssl-certfile"),
        (TlsFiles(certfile, keyfile, keyfile), f"--ssl-ca-certs {keyfile} "),
    ):
        with pytest.raises(StartupError, match=complaint):
            files.read()
    for name, complaint in (("short", "at least 16"), ("none", "no token"), ("gone", "cannot read --token-file")):
        with pytest.raises(StartupError, match=complaint):
            TokenFile(str(tmp_path / name), "--token-file")
    (tmp_path / "noted").write_text(f"  # ours\n\n {FIRST} \n")
    assert TokenFile(str(tmp_path / "noted"), "--token-file").metadata() == (("authorization", f"Bearer {FIRST}"),)


def test_a_token_that_is_taken_out_is_refused_though_the_files_time_stays(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"{FIRST}\n{SECOND}\n")
    tokens, status = TokenFile(str(path), "--token-file"), path.stat()
    assert tokens.accepts((("authorization", f"Bearer {SECOND}"),))
    path.write_text(f"{FIRST}\n")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert not tokens.accepts((("authorization", f"Bearer {SECOND}"),))


def test_tls_where_nobody_uses_it_is_refused() -> None:
    pair = {"ssl_certfile": "c", "ssl_keyfile": "k"}
    cases: list[tuple[type[Args], dict[str, Any]]] = [
        (VerifyArgs, {"listen": "unix:/a", **pair}), (DraftArgs, {"listen": "unix:/a", **pair}),
        (GatewayArgs, {"uds": "/a", **pair}),
        (GatewayArgs, {"verify_address": ("unix:/a",), "verify_ssl_ca_certs": "c"}),
        (DraftArgs, {"verify_ssl_certfile": "c", "verify_ssl_keyfile": "k"}),
        (DraftArgs, {"verify_ssl_keyfile": "k", "verify_ssl_ca_certs": "c"}),
        (GatewayArgs, {"verify_ssl_server_name": "n"}),
    ]  # fmt: skip
    for kind, flags in cases:
        with pytest.raises(StartupError, match="ssl"):
            kind(**flags)


def test_the_name_on_certificates_is_that_of_the_address(tmp_path: Path) -> None:
    assert common_name(["verify:50051"]) == "verify"
    assert common_name(["10.0.0.1:1", "[::1]:2", "unix:/a"]) is None
    with pytest.raises(StartupError, match="--verify-ssl-server-name"):
        common_name(["one:1", "two:1"])
    addresses = ("one:1", "two:1")
    authority = Authority(tmp_path)
    dialer_of(
        GatewayArgs(
            verify_address=addresses, verify_ssl_ca_certs=str(authority.path), verify_ssl_server_name="verify"
        ),
        addresses, None,
    )  # fmt: skip
    with pytest.raises(StartupError, match="--verify-ssl-server-name"):
        dialer_of(GatewayArgs(verify_address=addresses, verify_ssl_ca_certs=str(authority.path)), addresses, None)


def test_a_flood_fills_no_log() -> None:
    throttle = Throttle(2)
    assert [throttle.allows() for _ in range(4)] == [True, True, False, False]
    assert throttle.suppressed == 2
