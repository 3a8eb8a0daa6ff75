"""A chat server in a thread: records what it is asked and streams what it is told to."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

Piece = tuple[str, str]  # text, origin


@dataclass
class FakeGateway:
    """Answers `pieces` to every chat: without `origins` as other servers do; with a status that is not 200 it fails."""

    url: str = ""
    pieces: list[Piece] = field(default_factory=lambda: [("Hel", "target"), ("lo", "accepted"), (" you", "accepted")])
    plain_pieces: list[Piece] | None = None  # another answer when speculation is off
    origins: bool = True
    status: int = 200
    models: str = '{"object": "list", "data": [{"id": "a-model"}]}'
    stream: str | None = None  # in place of events
    requests: list[dict[str, Any]] = field(default_factory=list)
    server: ThreadingHTTPServer = field(init=False)

    def events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        speculate = body["speculative"]["enabled"]
        pieces = self.pieces if speculate or self.plain_pieces is None else self.plain_pieces
        head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": body["model"]}
        for text, origin in pieces:
            extra = {"outrider": {"tokens": [{"text": text, "origin": origin}]}} if self.origins else {}
            yield {**head, "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}], **extra}
        yield {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
        usage: dict[str, Any] = {"prompt_tokens": 5, "completion_tokens": len(pieces), "total_tokens": 5 + len(pieces)}
        if self.origins:
            usage["speculation"] = {"accept_length": 3.0 if speculate else 1.0}
        yield {**head, "choices": [], "usage": usage}


@pytest.fixture
def fake_gateway() -> Iterator[FakeGateway]:
    fake = FakeGateway()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply("application/json", fake.models)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            fake.requests.append(body)
            if fake.status != 200:
                self.reply("application/json", json.dumps({"error": {"message": "too long", "code": "x"}}))
                return
            events = "".join(f"data: {json.dumps(event)}\n\n" for event in fake.events(body))
            self.reply("text/event-stream", events + "data: [DONE]\n\n" if fake.stream is None else fake.stream)

        def reply(self, kind: str, text: str) -> None:
            data = text.encode()
            self.send_response(fake.status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        fake.server = server
        fake.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield fake
        server.shutdown()
        thread.join()
