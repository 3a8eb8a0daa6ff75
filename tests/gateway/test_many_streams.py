"""A thousand streams at once, some of whose readers have stopped reading: bounded memory, and nobody waits for them."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
from collections.abc import AsyncIterator, Generator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from outrider.v1 import verify_pb2
from tests.gateway.conftest import ANSWER
from tests.gateway.fakes import FakeVerify, RunningGateway, running

NUM_STREAMS = 1000
NUM_SLOW = 2
LONG_TOKENS = 25_000  # more than sockets buffer
BUFFER_BYTES = 64 * 1024


@pytest.fixture
def wide(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> Generator[RunningGateway]:
    """A gateway and a verify service that take as many; every call waits after its first response."""
    answer = [*tokenizer.encode(ANSWER, add_special_tokens=False).ids, 2]

    def say(request: verify_pb2.GenerateRequest, choice: int) -> list[int]:
        return [40] * LONG_TOKENS if request.sampling.ignore_eos else answer

    def fakes() -> list[FakeVerify]:
        return [
            FakeVerify(
                folder, vocab_size=tokenizer.get_vocab_size(), say=say, hold_after=1, max_running=2 * NUM_STREAMS,
                context_length=2 * LONG_TOKENS,
            )
        ]  # fmt: skip

    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(files, min(most, 8192)), most))
    try:
        with running({"stream_buffer_bytes": BUFFER_BYTES}, fakes, tmp_path) as gateway:
            yield gateway
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))


async def begin(port: int, **fields: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Opens a stream and reads its first chunk with text."""
    body = json.dumps({"messages": [{"role": "user", "content": "Hi!"}], "stream": True, **fields}).encode()
    client = socket.socket()
    client.setblocking(False)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=client, limit=4096)
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    await reader.readuntil(b'"content":""')
    return reader, writer


async def lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The rest of a stream's events."""
    while True:
        line = await reader.readline()
        assert line, "the stream was cut"
        if line.startswith(b"data: [DONE]"):
            return
        if line.startswith(b"data: {"):
            yield line[6:]


async def text_of(reader: asyncio.StreamReader) -> str:
    """All the text that follows."""
    chunks = [json.loads(line) async for line in lines(reader)]
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


def resident_bytes() -> int:
    """Memory of this process, which holds clients, gateway and verify service alike."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_a_thousand_streams(wide: RunningGateway) -> None:
    (verify,) = wide.verify
    asked = {"ignore_eos": True, "speculative": {"include_origins": True, "include_trees": True}}

    async def run() -> None:
        before = resident_bytes()
        slow = [await begin(wide.port, **asked) for _ in range(NUM_SLOW)]
        rest = [await begin(wide.port) for _ in range(NUM_STREAMS - NUM_SLOW)]
        assert verify.active == NUM_STREAMS
        opened = resident_bytes()
        assert opened - before < 200 * 1024 * NUM_STREAMS  # some 100 KiB for a stream and its client
        wide.set(verify.release)
        texts = await asyncio.gather(*(text_of(reader) for reader, _ in rest))
        assert {text for text in texts} <= {ANSWER, ANSWER.removeprefix("H")}
        async with asyncio.timeout(60):
            while verify.cancelled < NUM_SLOW:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert resident_bytes() - opened < 64 * 2**20  # a slow reader's whole answer is some 10 MiB
        for _, writer in (*slow, *rest):
            writer.close()

    asyncio.run(run())
    wide.wait(verify.idle)
