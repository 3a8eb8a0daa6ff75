"""What a connection may cost: trailers without end, answers that nobody reads, requests that wait for their turn."""

from __future__ import annotations

import contextlib
import json
import socket
from pathlib import Path

import httpx
import pytest
from structlog.testing import capture_logs
from tokenizers import Tokenizer

from gateway import app, edge, flow, http_guard, lingering
from gateway.app import listen
from outrider.args import GatewayArgs
from outrider.telemetry import Throttle
from tests.gateway import fakes
from tests.gateway.fakes import RunningGateway
from tests.gateway.test_http_faults import head, plain_fake, raw, read_status, stream_head
from tests.polling import until

OPENAPI = b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n"
LAST = OPENAPI[:-2] + b"connection: close\r\n\r\n"
DROPPED = "dropped a connection whose client does not read"
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
VERSION = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
BODY = json.dumps({"messages": [{"role": "user", "content": "Hi!"}]}).encode()
CHUNKED = head("transfer-encoding: chunked", "content-type: application/json") + b"%x\r\n%b\r\n0\r\n" % (
    len(BODY),
    BODY,
)


@pytest.mark.parametrize("trailers", [b"a:b\r\n" * 20_000, b"a" * 100_000, b"a: " + b"b" * 100_000])
def test_huge_trailers(gateway: RunningGateway, trailers: bytes) -> None:
    with raw(gateway) as connection:
        connection.sendall(CHUNKED + trailers)
        assert read_status(connection) == 431


def test_trailers_are_passed_over(gateway: RunningGateway) -> None:
    with raw(gateway) as connection:
        for _ in range(2):
            connection.sendall(CHUNKED + b"x-sum: 5\r\nhost: y\r\n\r\n")
            assert read_status(connection) == 200


def test_answers_that_nobody_reads(
    folder: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is dropped, also when it is closed already and its last answer waits to be read."""

    def small_buffers(args: GatewayArgs) -> tuple[socket.socket, str]:
        listener, url = listen(args)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return listener, url

    monkeypatch.setattr(fakes, "listen", small_buffers)
    monkeypatch.setattr(flow, "STALL_LIMIT_S", 0.05)
    monkeypatch.setattr(http_guard, "_lines", Throttle())
    with fakes.running({}, lambda: [plain_fake(folder, tokenizer)], tmp_path) as gateway, capture_logs() as logs:
        for num_dropped, num_answers in ((1, 1), (2, 50)):
            with socket.socket() as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                connection.connect(("127.0.0.1", gateway.port))
                connection.sendall(OPENAPI * (num_answers - 1) + LAST)
                until(
                    lambda least=num_dropped: [log["event"] for log in logs].count(DROPPED) >= least,
                    "a slow reader was not dropped",
                )


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("apart", [True, False])
def test_a_client_that_hangs_up_with_requests_waiting(gateway: RunningGateway, stream: bool, apart: bool) -> None:
    verify = gateway.verify[0]
    verify.hold_after = 2
    with raw(gateway) as connection:
        waiting = (HEALTH + stream_head(stream)) * 20
        connection.sendall(stream_head(stream) + (b"" if apart else waiting))
        gateway.wait(verify.holding)
        if apart:
            connection.sendall(waiting)
    gateway.wait(verify.idle)
    assert verify.cancelled == 1
    assert len(verify.requests) == 1


def test_requests_that_come_while_one_is_answered(gateway: RunningGateway) -> None:
    """Requests wait their turn, and no more of them are taken in than a buffer holds."""
    verify = gateway.verify[0]
    verify.hold_after = 2
    with raw(gateway) as connection:
        connection.sendall(stream_head(stream=False))
        gateway.wait(verify.holding)
        connection.setblocking(False)
        num_sent = 0
        with contextlib.suppress(BlockingIOError):
            while num_sent < 2**26:
                num_sent += connection.send((HEALTH * 10_000)[num_sent % len(HEALTH) :])
        assert num_sent < 2**26
        connection.setblocking(True)
        gateway.set(verify.release)
        received = b""
        while received.count(b"HTTP/1.1 200") < 500:
            part = connection.recv(2**20)
            assert part, "closed"
            received += part


def test_headers_may_come_in_pieces_behind_other_requests(gateway: RunningGateway) -> None:
    with raw(gateway) as connection:
        connection.sendall(HEALTH * 1000 + HEALTH[:20])
        connection.sendall(HEALTH[20:])
        received = b""
        while received.count(b"HTTP/1.1 200") < 1001:
            part = connection.recv(2**20)
            assert part, "closed"
            received += part


def test_headers_that_dawdle_end_no_answer_before_them(hurried: RunningGateway) -> None:
    verify = hurried.verify[0]
    verify.hold_after = 2
    with raw(hurried) as connection:
        connection.sendall(stream_head(stream=False) + VERSION[:20])
        hurried.wait(verify.holding)
        with raw(hurried) as later:
            later.sendall(VERSION[:20])
            assert read_status(later) == 408  # so the other's time is over as well
        hurried.set(verify.release)
        assert read_status(connection) == 200
        connection.sendall(VERSION[20:])
        assert read_status(connection) == 200


@pytest.mark.parametrize(
    ("request_bytes", "status", "after"),
    [
        (VERSION, 200, b"\r\n"),
        (head("content-length: 60000", path="/nowhere"), 404, b"x"),
        (head("content-length: 60000", "content-type: text/plain"), 415, b"x"),
    ],
)
def test_what_is_no_request_keeps_no_connection(
    folder: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request_bytes: bytes,
    status: int, after: bytes,
) -> None:  # fmt: skip
    """What comes after an answer: a line between requests, and the rest of a body that nobody reads."""
    monkeypatch.setattr(app, "KEEP_ALIVE_S", 0.5)
    with fakes.running({}, lambda: [plain_fake(folder, tokenizer)], tmp_path) as gateway, raw(gateway) as connection:
        connection.sendall(request_bytes)
        assert read_status(connection) == status
        connection.sendall(after)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""


@pytest.mark.parametrize(
    ("request_head", "status"),
    [
        (head("expect: 100-continue", f"content-length: {len(VERSION)}", path="/nowhere"), 404),
        (head("expect: 100-continue", f"content-length: {len(VERSION)}", path="/health"), 405),
        (head("expect: 100-continue", f"content-length: {len(VERSION)}", "content-type: text/plain"), 415),
    ],
)
def test_a_body_that_was_not_asked_for_is_not_waited_for(
    gateway: RunningGateway, request_head: bytes, status: int
) -> None:
    """What comes after the answer may be that body, or the next request: nobody knows, so the connection ends."""
    with raw(gateway) as connection:
        connection.sendall(request_head)
        assert read_status(connection) == status
        assert connection.recv(1) == b""


def test_a_body_that_is_asked_for_keeps_the_connection(gateway: RunningGateway) -> None:
    with raw(gateway) as connection:
        connection.sendall(
            head("expect: 100-continue", f"content-length: {len(BODY)}", "content-type: application/json")
        )
        assert connection.recv(2**16) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(BODY)
        assert read_status(connection) == 200
        connection.sendall(HEALTH[:-2] + b"expect: 100-continue\r\n\r\n")  # which has none to send
        answer = connection.recv(2**16)
        assert b" 200 OK\r\n" in answer
        assert b"connection: close" not in answer


def test_http_1_0_is_not_asked_for_its_body(gateway: RunningGateway) -> None:
    lines = head("expect: 100-continue", f"content-length: {len(BODY)}", "content-type: application/json")
    with raw(gateway) as connection:
        connection.sendall(lines.replace(b"HTTP/1.1", b"HTTP/1.0") + BODY)
        assert read_status(connection) == 200


def test_malformed_requests_are_told_of_once(gateway: RunningGateway, caplog: pytest.LogCaptureFixture) -> None:
    with raw(gateway) as connection:
        connection.sendall(b"nonsense\r\n\r\n")
        assert read_status(connection) == 400
    assert not [record for record in caplog.records if record.name == "uvicorn.error" and record.levelname != "INFO"]


def test_no_refusal_stands_within_an_answer(gateway: RunningGateway) -> None:
    verify = gateway.verify[0]
    verify.hold_after = 2
    with raw(gateway) as connection:
        connection.sendall(stream_head(stream=True))
        gateway.wait(verify.holding)
        received = connection.recv(2**16)
        connection.sendall(b"GET x HTTP/9.9\r\n\r\n")
        while part := connection.recv(2**16):
            received += part
    assert received.count(b"HTTP/1.1 ") == 1
    gateway.wait(verify.idle)


def test_requests_without_a_key_fill_no_log(
    folder: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edge, "_stranger_lines", Throttle(lines_a_minute=2))
    running = fakes.running({"api_key": ("k",)}, lambda: [plain_fake(folder, tokenizer)], tmp_path)

    def told() -> list[int]:
        return [log["status"] for log in logs if (log["event"], log["log_level"]) == ("http", "info")]

    with running as gateway, capture_logs() as logs, httpx.Client(base_url=gateway.url) as client:
        for _ in range(4):
            assert client.get("/v1/models").status_code == 401
        assert client.get("/v1/models", headers={"authorization": "Bearer k"}).status_code == 200
        until(lambda: 200 in told(), "the answer was not logged")  # a moment after its last byte
    assert told() == [401, 401, 200]


async def posted(client: httpx.AsyncClient, num_bytes: int) -> int:
    """The status that an asyncio client gets for a body of so many bytes, which it sends whole before it reads."""
    body = {"messages": [{"role": "user", "content": "x" * num_bytes}]}
    return (await client.post("/v1/chat/completions", json=body)).status_code


@pytest.mark.asyncio
async def test_who_is_answered_before_its_request_was_read_gets_the_answer(
    folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    args = {"max_connections": 2, "max_body_bytes": 100_000, "api_key": ["right"]}
    with fakes.running(args, lambda: [plain_fake(folder, tokenizer)], tmp_path) as gateway:
        url = f"http://127.0.0.1:{gateway.port}"
        for key, status in (("right", 413), ("wrong", 401)):
            async with httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {key}"}) as client:
                assert await posted(client, 12_000_000) == status
        with raw(gateway) as one, raw(gateway) as two:
            for connection in (one, two):
                connection.sendall(HEALTH)
                assert connection.recv(12) == b"HTTP/1.1 200"
            for _ in range(3):  # those that were refused do not count
                async with httpx.AsyncClient(base_url=url) as client:
                    assert await posted(client, 500_000) == 503


def send_for_ever(connection: socket.socket) -> None:
    for _ in range(50_000):  # what nobody stops ends, too
        connection.sendall(b"x" * 100_000)


@pytest.mark.parametrize(("limit", "value"), [("LINGER_S", 0.0), ("LINGER_BYTES", 1000), ("MOST_LINGERING", 0)])
def test_what_comes_after_a_refusal_is_not_read_for_ever(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch, limit: str, value: float
) -> None:
    monkeypatch.setattr(lingering, "LINGER_S", 3600.0)
    monkeypatch.setattr(lingering, "LINGER_BYTES", 2**60)
    monkeypatch.setattr(lingering, limit, value)
    with raw(gateway) as connection:
        connection.sendall(b"nonsense\r\n\r\n")
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            send_for_ever(connection)
