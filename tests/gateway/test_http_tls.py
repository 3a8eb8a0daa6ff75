"""HTTPS: certificates that are renewed, clients that must show theirs, and what the log says of who never asks."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop
from structlog.testing import capture_logs
from tokenizers import Tokenizer

from gateway import http_guard
from outrider.telemetry import Throttle
from tests.certificates import Authority
from tests.gateway.fakes import FakeVerify, RunningGateway, running
from tests.gateway.test_http_faults import raw, read_status
from tests.polling import until

Start = Callable[..., contextlib.AbstractContextManager[RunningGateway]]


@pytest.fixture
def start(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> Start:
    def make(**args: Any) -> contextlib.AbstractContextManager[RunningGateway]:
        return running(args, lambda: [FakeVerify(folder, vocab_size=tokenizer.get_vocab_size() + 8)], tmp_path)

    return make


def trusting(authority: Authority, certificate: tuple[str, str] | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority.path)
    if certificate is not None:
        context.load_cert_chain(*certificate)
    return context


def health(gateway: RunningGateway, context: ssl.SSLContext) -> int:
    return httpx.get(f"https://localhost:{gateway.port}/health", verify=context).status_code


def test_certificates_are_renewed_and_strangers_turned_away(start: Start, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    authority, other = Authority(tmp_path), Authority(tmp_path / "other")
    certfile, keyfile = authority.issue("localhost", "localhost", "127.0.0.1", expired=True)
    client = authority.issue("client")
    with start(ssl_certfile=certfile, ssl_keyfile=keyfile, ssl_ca_certs=str(authority.path)) as gateway:
        assert gateway.url.startswith("https://")
        with pytest.raises(httpx.ConnectError, match="expired"):
            health(gateway, trusting(authority, client))
        authority.issue("localhost", "localhost", "127.0.0.1")
        assert health(gateway, trusting(authority, client)) == 200
        url = f"https://127.0.0.1:{gateway.port}/health"  # a client that names nobody
        assert httpx.get(url, verify=trusting(authority, client)).status_code == 200
        for certificate in (None, other.issue("client"), authority.issue("late", expired=True)):
            with pytest.raises((httpx.ReadError, httpx.ConnectError, httpx.RemoteProtocolError)):
                health(gateway, trusting(authority, certificate))
        with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
            httpx.get(f"http://localhost:{gateway.port}/health")


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("tickets", [True, False])
@pytest.mark.parametrize("asks", [True, False])
def test_a_session_is_resumed_only_where_no_certificate_is_asked_for(
    start: Start, tmp_path: Path, version: ssl.TLSVersion, tickets: bool, asks: bool
) -> None:
    """A session would go on with a certificate whose authority was dropped, or whose time is over."""
    authority = Authority(tmp_path)
    certfile, keyfile = authority.issue("localhost", "localhost", "127.0.0.1")
    context = trusting(authority, authority.issue("client"))
    context.minimum_version = context.maximum_version = version
    if not tickets:
        context.options |= ssl.OP_NO_TICKET  # TLS 1.2 has a cache for those that know none

    def reused(port: int, session: ssl.SSLSession | None) -> tuple[bool | None, ssl.SSLSession | None]:
        with (
            socket.create_connection(("localhost", port), timeout=30) as plain,
            context.wrap_socket(plain, server_hostname="localhost", session=session) as connection,
        ):
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            received = b""
            while data := connection.recv(65536):
                received += data
            assert received.startswith(b"HTTP/1.1 200")
            return connection.session_reused, connection.session

    ca_certs = str(authority.path) if asks else None
    with start(ssl_certfile=certfile, ssl_keyfile=keyfile, ssl_ca_certs=ca_certs) as gateway:
        first, session = reused(gateway.port, None)
        again, _ = reused(gateway.port, session)
    assert (first, again) == (False, not asks)


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_silent_connections_make_room_for_new_ones(
    start: Start, tmp_path: Path, new_loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asyncio, "new_event_loop", new_loop)
    authority = Authority(tmp_path)
    certfile, keyfile = authority.issue("localhost", "localhost", "127.0.0.1")
    context = trusting(authority)
    args = {"ssl_certfile": certfile, "ssl_keyfile": keyfile, "receive_timeout_s": 60.0, "max_connections": 20}
    with start(**args) as gateway, ExitStack() as stack:
        plain = [stack.enter_context(raw(gateway)) for _ in range(60)]
        assert health(gateway, context) == 200
        for connection in plain[:40]:
            assert connection.recv(1) == b""
        plain[-1].setblocking(False)
        with pytest.raises(BlockingIOError):  # as many as may be open still are
            plain[-1].recv(1)
        agreed = [
            stack.enter_context(context.wrap_socket(stack.enter_context(raw(gateway)), server_hostname="localhost"))
            for _ in range(20)
        ]
        for connection in agreed:
            connection.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
            assert read_status(connection) == 200
        assert health(gateway, context) == 503


def test_who_has_not_agreed_on_tls_is_let_go_at_the_end(start: Start, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certfile, keyfile = authority.issue("localhost", "localhost", "127.0.0.1")
    with ExitStack() as stack:
        with start(ssl_certfile=certfile, ssl_keyfile=keyfile, receive_timeout_s=60.0) as gateway:
            silent = stack.enter_context(raw(gateway))
            assert health(gateway, trusting(authority)) == 200  # by when the other has been taken
        assert silent.recv(1) == b""


def gone(port: int, sent: bytes, *, read: bool = True) -> bytes:
    """What a raw connection gets until it is closed."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(sent)
        received = b""
        while read and (data := connection.recv(65536)):
            received += data
        return received


def test_scans_slow_headers_and_garbage_get_nowhere_and_are_logged(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_guard, "_lines", Throttle())

    def events() -> list[tuple[str, int | None]]:
        return [(log["event"], log.get("status")) for log in logs if log["event"].startswith(("refused", "a conn"))]

    with start(receive_timeout_s=1.0) as gateway, capture_logs() as logs:
        assert gone(gateway.port, b"") == b""
        assert gone(gateway.port, b"GET /health HTTP/1.1\r\nHost: x\r\n").split()[1] == b"408"
        assert gone(gateway.port, b"\x16\x03\x01\x02\x00\x01").split()[1] == b"400"
        assert gone(gateway.port, b"GET / HTTP/1.1\r\nx: " + b"y" * 40_000).split()[1] == b"431"
        gone(gateway.port, b"", read=False)  # a scan
        assert httpx.get(f"{gateway.url}/health").status_code == 200
        until(lambda: len(events()) == 5, "not every connection's end was logged")
    assert sorted(events(), key=str) == [
        ("a connection ended without a request", None), ("a connection ended without a request", None),
        ("refused a connection", 400), ("refused a connection", 408), ("refused a connection", 431),
    ]  # fmt: skip
    assert all(log["peer"].startswith("127.0.0.1:") for log in logs if log["event"].startswith(("refused", "a conn")))


@pytest.mark.asyncio
async def test_who_sends_too_much_gets_the_answer(start: Start, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certfile, keyfile = authority.issue("localhost", "localhost", "127.0.0.1")
    with start(ssl_certfile=certfile, ssl_keyfile=keyfile, max_body_bytes=100_000) as gateway:
        url = f"https://localhost:{gateway.port}/v1/completions"
        async with httpx.AsyncClient(verify=trusting(authority)) as client:
            assert (await client.post(url, json={"prompt": "x" * 12_000_000})).status_code == 413
