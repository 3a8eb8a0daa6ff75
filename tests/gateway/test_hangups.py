"""Clients that hang up before the first token: what is made for them is given up, and requests behind them are not."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from tokenizers import Tokenizer

from tests.gateway.fakes import FakeVerify, RunningGateway, running
from tests.gateway.test_http_faults import head, raw
from tests.polling import until

MESSAGES = [{"role": "user", "content": "Hi"}]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/generate": {"text": "Hi"},
    "/tokenize": {"prompt": "Hi"},
}


class Busy(ThreadPoolExecutor):
    """One thread, which has nothing done while it is told to wait."""

    def __init__(self) -> None:
        super().__init__(1)
        self.freed = threading.Event()
        self.works: list[Future[Any]] = []
        super().submit(self.freed.wait)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Notes what is to be done."""
        self.works.append(super().submit(fn, *args, **kwargs))
        return self.works[-1]


@pytest.fixture
def busy(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> Generator[tuple[RunningGateway, Busy]]:
    """A gateway whose threads are busy."""
    threads = Busy()

    async def use() -> None:
        asyncio.get_running_loop().set_default_executor(threads)

    fake = FakeVerify(folder, tokenizer.get_vocab_size())
    with running({}, lambda: [fake], tmp_path) as gateway:
        gateway.loop.run(use())
        try:
            yield gateway, threads
        finally:
            threads.freed.set()


def large(path: str, **fields: Any) -> bytes:
    """A request whose body is read in a thread."""
    body = json.dumps({**ASKED[path], "junk": "x" * 200_000, **fields}).encode()
    return head(f"content-length: {len(body)}", "content-type: application/json", path=path) + body


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ASKED)
def test_work_that_waits_for_a_thread_is_dropped_with_its_client(
    busy: tuple[RunningGateway, Busy], path: str, stream: bool
) -> None:
    gateway, threads = busy
    with capture_logs() as logs:
        with raw(gateway) as connection:
            connection.sendall(large(path, stream=stream) if path != "/tokenize" else large(path))
            until(lambda: len(threads.works) == 1, "nothing is worked on")
        until(lambda: any(log["event"] == "http" for log in logs), "the request has not ended")
    assert [log["status"] for log in logs if log["event"] == "http"] == [499]
    assert threads.works[0].cancelled()
    assert not gateway.verify[0].requests


def test_bodies_that_come_while_one_is_worked_on_are_not_lost(busy: tuple[RunningGateway, Busy]) -> None:
    gateway, threads = busy
    with raw(gateway) as connection:
        connection.sendall(large("/v1/completions"))
        until(lambda: len(threads.works) == 1, "nothing is worked on")
        connection.sendall(large("/v1/completions", max_tokens=1) + large("/v1/completions", max_tokens=2))
        threads.freed.set()
        received = b""
        while received.count(b'"text_completion"') < 3:
            part = connection.recv(2**20)
            assert part, "closed"
            received += part
    assert [request.sampling.max_tokens for request in gateway.verify[0].requests[1:]] == [1, 2]


def test_a_probe_that_is_not_waited_for_ends(gateway: RunningGateway) -> None:
    verify = gateway.verify[0]
    verify.hold_after = 0
    with raw(gateway) as connection:
        connection.sendall(b"GET /health_generate HTTP/1.1\r\nhost: x\r\n\r\n")
        gateway.wait(verify.holding)
    gateway.wait(verify.idle)
    assert verify.cancelled == 1


def test_who_reads_too_slowly_is_told_from_who_hangs_up(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    ids = tokenizer.encode("ab" * 20_000, add_special_tokens=False).ids
    fake = FakeVerify(folder, tokenizer.get_vocab_size(), say=lambda request, choice: ids, context_length=10**6)
    body = json.dumps({"prompt": "Hi", "stream": True, "max_tokens": len(ids)}).encode()
    fields = (f"content-length: {len(body)}", "content-type: application/json")
    with (
        running({"stream_buffer_bytes": 4096}, lambda: [fake], tmp_path) as gateway,
        capture_logs() as logs,
        socket.socket() as reader,
    ):
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(("127.0.0.1", gateway.port))
        reader.sendall(head(*fields, path="/v1/completions") + body)
        until(lambda: any(log["event"] == "http" for log in logs), "the request has not ended")
    assert [log["slow"] for log in logs if log["event"] == "client gone"] == [True]
