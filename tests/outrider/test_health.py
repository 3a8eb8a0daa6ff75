"""`outrider health` against a real gRPC server and a real HTTP one."""

from __future__ import annotations

import asyncio
import http.server
import socket
import threading
from collections.abc import Generator
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.args import HealthArgs
from outrider.errors import StartupError, Unavailable
from outrider.health import grpc_health, http_health, main
from outrider.rpc import add_health_and_reflection, bind, create_channel, create_server, set_serving
from outrider.scrape import fetch
from outrider.tls import TlsFiles, http_context, server_credentials
from tests.certificates import Authority

TIMEOUT_S = 10.0


class Site(http.server.BaseHTTPRequestHandler):
    """/health is well, anything else is not."""

    def do_GET(self) -> None:
        """200 or 503."""
        self.send_response(200 if self.path == "/health" else 503)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@pytest.fixture
def site() -> Generator[str]:
    """A web server's URL."""
    with http.server.HTTPServer(("127.0.0.1", 0), Site) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_gateway_with_tls_is_asked_over_tls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A certificate is shown where the gateway wants to see one."""
    authority = Authority(tmp_path)
    files = TlsFiles(*authority.issue("localhost"), str(authority.path))
    certificate, key = authority.issue("prober")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        server.socket = http_context(files).wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        words = [f"--url=https://localhost:{server.server_port}/health", f"--timeout-s={TIMEOUT_S}"]
        trusting = [*words, f"--verify-ssl-ca-certs={authority.path}"]
        shown = [f"--verify-ssl-certfile={certificate}", f"--verify-ssl-keyfile={key}"]
        try:
            assert main(HealthArgs.parse([*trusting, *shown])) == 0
            for fewer in (trusting, words):
                assert main(HealthArgs.parse(fewer)) == 1
            told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("outrider health:")]
            shown_nothing, believing_nobody = told
            assert "--verify-ssl-ca-certs" not in shown_nothing
            assert believing_nobody.endswith("; --verify-ssl-ca-certs names authorities to believe")
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.asyncio
async def test_a_grpc_server_says_how_it_is() -> None:
    server = create_server()
    health = add_health_and_reflection(server, ["outrider.v1.VerifyService"])
    address = bind(server, "127.0.0.1:0")
    await server.start()
    set_serving(health, [], True)
    assert await grpc_health(address, TIMEOUT_S) is None
    set_serving(health, [], False)
    assert await grpc_health(address, TIMEOUT_S) == f"{address}: NOT_SERVING"
    await server.stop(None)
    wrong = await grpc_health(address, TIMEOUT_S)
    assert wrong is not None
    assert wrong.startswith((f"{address}: UNAVAILABLE: ", f"{address}: DEADLINE_EXCEEDED: "))


@pytest.mark.asyncio
async def test_all_services_are_listed() -> None:
    server = create_server()
    health = add_health_and_reflection(server, ["outrider.v1.VerifyService"])
    address = bind(server, "127.0.0.1:0")
    await server.start()
    set_serving(health, ["outrider.v1.VerifyService"], True)
    async with create_channel(address) as channel:
        listed = await health_pb2_grpc.HealthStub(channel).List(health_pb2.HealthListRequest())
    assert {name: state.status for name, state in listed.statuses.items()} == {
        "": health_pb2.HealthCheckResponse.SERVING,
        "outrider.v1.VerifyService": health_pb2.HealthCheckResponse.SERVING,
    }
    await server.stop(None)


@pytest.mark.asyncio
async def test_a_server_with_tls_is_asked_over_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    server = create_server()
    health = add_health_and_reflection(server, [])
    files = TlsFiles(*authority.issue("verify"), str(authority.path))
    address = bind(server, "127.0.0.1:0", server_credentials(files))
    await server.start()
    set_serving(health, [], True)
    certificate, key = authority.issue("prober")
    words = [f"--address={address}", f"--verify-ssl-ca-certs={authority.path}", "--verify-ssl-server-name=verify"]
    words += [f"--verify-ssl-certfile={certificate}", f"--verify-ssl-keyfile={key}"]
    assert await asyncio.to_thread(main, HealthArgs.parse(words)) == 0
    assert await grpc_health(address, TIMEOUT_S) is not None
    await server.stop(None)


def test_a_url_says_how_it_is(site: str) -> None:
    assert http_health(f"{site}/health", TIMEOUT_S) is None
    assert http_health(f"{site}/other", TIMEOUT_S) == f"{site}/other: 503"
    assert "unknown url type" in (http_health("health", TIMEOUT_S) or "")


def test_no_proxy_is_asked_for_what_is_ones_own(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert http_health(f"{site}/health", TIMEOUT_S) is None
    with pytest.raises(Unavailable, match="503"):
        fetch(f"{site}/other", 0.0)


def test_what_speaks_no_http_is_named_in_a_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            connection.sendall(b"\x00\x00\x12\x04 nonsense\r\n")
            connection.close()

        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
        for ask in (lambda: http_health(url, TIMEOUT_S), lambda: fetch(url, 0.0)):
            thread = threading.Thread(target=answer)
            thread.start()
            try:
                told = str(ask())
            except Unavailable as error:
                told = error.message
            thread.join()
            assert told.startswith(url)
    assert "control characters" in (http_health("http://127.0.0.1:9/a b", TIMEOUT_S) or "")


def test_one_that_does_not_serve_is_named(site: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(HealthArgs(url=(f"{site}/health",))) == 0
    assert capsys.readouterr().err == ""
    assert main(HealthArgs(url=(f"{site}/health", f"{site}/other"))) == 1
    assert capsys.readouterr().err == f"outrider health: {site}/other: 503\n"


def test_something_must_be_asked() -> None:
    with pytest.raises(StartupError, match="--address or --url"):
        HealthArgs()
    with pytest.raises(StartupError, match="--timeout-s"):
        HealthArgs(address=("127.0.0.1:1",), timeout_s=0)
