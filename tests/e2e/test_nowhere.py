"""Strangers at every door of real services: each gets nowhere, the log names it, and those who belong go on.

The doors: verify's and draft's gRPC, the gateway's HTTP, and the metrics of verify and draft; with mutual TLS and
tokens, and with tokens alone.
"""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import grpc
import httpx
import pytest

from outrider.wire import MAX_MESSAGE_BYTES
from tests.certificates import Authority
from tests.e2e.small_model import write_small_model
from tests.e2e.stack import Process
from tests.outrider.test_strangers import told_here

TOKEN = "a-token-between-services"
METHODS = {"verify": "/outrider.v1.VerifyService/GetServerInfo", "draft": "/outrider.v1.DraftService/GetServerInfo"}
TARGET = ("--dtype=float32", "--device=cpu", "--threads=1", "--max-total-tokens=2048", "--context-length=256")
NO_CALL = "a connection ended without a call"
SCANS = (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"SSH-2.0-OpenSSH_9.6\r\n\r\n", b"\x00" * 100_000)


@dataclass
class Door:
    """A port of a running service."""

    process: Process
    port: int

    def says(self, event: str, port: int | None = None, after: int = 0) -> None:
        """Returns when a log line has this event and names the port that the stranger came from."""
        who = "" if port is None else rf"(?=.*\b{port}\b)"
        self.process.wait_for(rf"^(?=.*{event}){who}", after=after)

    def strange(self, sent: bytes) -> tuple[int, bytes]:
        """Sends bytes over a connection and reads until it is closed; its own port, and what it got."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            port = connection.getsockname()[1]
            received = b""
            with contextlib.suppress(ConnectionError):  # closed while it still sent
                connection.sendall(sent)
                while data := connection.recv(65536):
                    received += data
            return port, received

    def scan(self) -> int:
        """Connects and leaves; returns its own port."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            return connection.getsockname()[1]


@dataclass
class Services:
    """One service of each kind, and what is needed to get in."""

    verify: Door
    draft: Door
    gateway: Door
    metrics: dict[str, Door]
    authority: Authority | None

    def grpc(self, name: str, *, expired: bool = False) -> grpc.Channel:
        """A channel with a certificate; the token comes with each call."""
        address = f"localhost:{getattr(self, name).port}"
        options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        if self.authority is None:
            return grpc.insecure_channel(address, options=options)
        files = self.authority.issue(f"client-{name}-{expired}", expired=expired)  # several may ask at once
        cert, key = (Path(path).read_bytes() for path in files)
        credentials = grpc.ssl_channel_credentials(self.authority.path.read_bytes(), key, cert)
        return grpc.secure_channel(address, credentials, options=options)

    def http(self, *, expired: bool = False) -> httpx.Client:
        """A client with a certificate and a key."""
        headers = {"authorization": f"Bearer {TOKEN}"}
        if self.authority is None:
            return httpx.Client(base_url=f"http://localhost:{self.gateway.port}", headers=headers, timeout=60)
        context = ssl.create_default_context(cafile=self.authority.path)
        context.load_cert_chain(*self.authority.issue(f"client{expired}", expired=expired))
        return httpx.Client(
            base_url=f"https://localhost:{self.gateway.port}", headers=headers, verify=context, timeout=60
        )


def called(channel: grpc.Channel, method: str, data: bytes = b"", *, token: bool = True) -> grpc.StatusCode:
    """The status that a call ends with."""
    metadata = [("authorization", f"Bearer {TOKEN}")] if token else []
    try:
        cast(Any, channel).unary_unary(method)(data, metadata=metadata, timeout=60)
    except grpc.RpcError as error:
        return cast(Any, error).code()
    return grpc.StatusCode.OK


@pytest.fixture(scope="module", params=["tls", "plain"])
def services(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Generator[Services]:
    folder = tmp_path_factory.mktemp("services")
    (folder / "tokens").write_text(TOKEN)
    (folder / "model").mkdir()
    model = write_small_model(folder / "model")
    serving, dialling, authority = [], [], None
    if request.param == "tls":
        authority = Authority(folder)
        certfile, keyfile = authority.issue("localhost")
        serving = [f"--ssl-certfile={certfile}", f"--ssl-keyfile={keyfile}", f"--ssl-ca-certs={authority.path}"]
        dialling = [f"--verify-ssl-ca-certs={authority.path}", f"--verify-ssl-certfile={certfile}"]
        dialling += [f"--verify-ssl-keyfile={keyfile}"]
    serving += [f"--token-file={folder / 'tokens'}"]
    metrics = ["--metrics-host=127.0.0.1", "--metrics-port=0"]
    running: list[Process] = []

    def start(*words: str) -> Process:
        running.append(Process(*words))
        return running[-1]

    try:
        verify = start("verify", "--listen=127.0.0.1:0", f"--model-path={model}", *TARGET, *metrics, *serving)
        verify_port = int(verify.wait_for(r"verify serves \S+ at \S+:(\d+)").group(1))
        known = f"--verify-address=localhost:{verify_port}"
        more = ["--speculative-ngram-capacity=50000"]
        draft = start("draft", "--listen=127.0.0.1:0", known, *more, *metrics, *serving, *dialling)
        limits = ["--receive-timeout-s=5", f"--api-key={TOKEN}", "--max-body-bytes=100000"]
        gateway = start("gateway", "--port=0", known, *limits, *serving, *dialling)
        draft_port = int(draft.wait_for(r"draft serves \S+ at \S+:(\d+)").group(1))
        gateway_port = int(gateway.wait_for(r"gateway listens on \S+:(\d+)").group(1))
        draft.wait_for("enlisted")
        told = {
            name: Door(process, int(process.wait_for(r"tells metrics at \S+:(\d+)/").group(1)))
            for name, process in (("verify", verify), ("draft", draft))
        }
        doors = Door(verify, verify_port), Door(draft, draft_port), Door(gateway, gateway_port)
        yield Services(*doors, told, authority)
    finally:
        for process in reversed(running):
            process.stop()


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_grpc(services: Services) -> None:
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda name: _knock_at_grpc(services, name), METHODS))


def _knock_at_grpc(services: Services, name: str) -> None:
    door: Door = getattr(services, name)
    with services.grpc(name) as channel:
        assert called(channel, METHODS[name]) is grpc.StatusCode.OK
        assert called(channel, METHODS[name], token=False) is grpc.StatusCode.UNAUTHENTICATED
        door.says("refused a call without a valid token")
        assert called(channel, METHODS[name], bytes(MAX_MESSAGE_BYTES + 1)) is grpc.StatusCode.RESOURCE_EXHAUSTED
        door.says("a call ended before its request was read")
        with ThreadPoolExecutor() as pool:  # who sends slowly is let go after ten seconds
            slow = [pool.submit(door.strange, sent) for sent in (b"PRI * HT", b"\x16\x03\x01")]
            strangers = [door.strange(sent)[0] for sent in SCANS]
            strangers += [door.scan() for _ in range(3)] + [future.result()[0] for future in slow]
        if services.authority is not None:
            before = len(door.process.lines)
            with services.grpc(name, expired=True) as late:
                assert called(late, METHODS[name]) is grpc.StatusCode.UNAVAILABLE
            door.says("certificate has expired", after=before)
            with grpc.insecure_channel(f"localhost:{door.port}") as plain:
                assert called(plain, METHODS[name]) is grpc.StatusCode.UNAVAILABLE
            if told_here():
                door.says(NO_CALL, after=before)
        if told_here():
            for port in strangers:
                door.says(NO_CALL, port)
            text = httpx.get(f"http://127.0.0.1:{services.metrics[name].port}/metrics").text
            counted = re.search(r"^outrider_connections_without_call_total (\S+)", text, re.MULTILINE)
            assert counted is not None
            assert float(counted.group(1)) >= len(strangers)
        assert called(channel, METHODS[name]) is grpc.StatusCode.OK  # who was in stays in


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_http(services: Services) -> None:
    door = services.gateway
    with services.http() as client:
        deadline = time.monotonic() + 60
        while client.get("/health").status_code != 200:
            assert time.monotonic() < deadline
        assert client.get("/v1/models", headers={"authorization": "Bearer wrong"}).status_code == 401
        door.says(r'"status": 401')
        assert (
            client.post(
                "/v1/completions", content=bytes(100_001), headers={"content-type": "application/json"}
            ).status_code
            == 413
        )
        door.says(r'"status": 413')
        assert client.get("/health", headers={"x-large": "x" * 40_000}).status_code == 431
        door.says(r"refused a connection)(?=.*431")
        assert client.get("/health").status_code == 200
    if services.authority is None:
        port, received = door.strange(b"GET /health HTTP/1.1\r\nHost: x\r\n")  # and no more for five seconds
        assert received.split()[1] == b"408"
        door.says("refused a connection", port)
        port, received = door.strange(b"\x16\x03\x01\x02\x00\x01\x00\x01")
        assert received.split()[1] == b"400"
        door.says("refused a connection", port)
        door.says("a connection ended without a request", door.scan())
        return
    with services.http(expired=True) as late, pytest.raises(httpx.TransportError):
        late.get("/health")
    plain, _ = door.strange(SCANS[0])
    scanner = door.scan()
    if told_here():
        for port in (plain, scanner):
            door.says("a connection ended before TLS was agreed on", port)
        lines = [line for line in door.process.lines if "before TLS was agreed on" in line]
        assert len(lines) >= 3  # the expired certificate's, too
    with services.http() as client:
        assert client.get("/health").status_code == 200


@pytest.mark.timeout(300)
def test_metrics(services: Services) -> None:
    with ThreadPoolExecutor() as pool:
        list(pool.map(_knock_at_metrics, services.metrics.values()))


def _knock_at_metrics(door: Door) -> None:
    with ThreadPoolExecutor() as pool:
        slow = pool.submit(door.strange, b"GET /metrics HT")  # let go after five seconds
        for port in (door.scan(), door.strange(b"x" * 100_000)[0]):
            door.says("metrics: ", port)
        port, received = slow.result()
    assert received == b""
    door.says("metrics: no whole request in time", port)
    assert httpx.get(f"http://127.0.0.1:{door.port}/metrics").status_code == 200
