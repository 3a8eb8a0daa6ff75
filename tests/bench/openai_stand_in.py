"""An OpenAI-compatible server that says what it is told to say, for tests of the load generator.

python -m tests.bench.openai_stand_in PORT
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route


@dataclass
class StandIn:
    """Answers each request with `chunks`, the number of tokens in each event with text, which are all `token`.

    `said_as` is where a chat's text stands; `events` come as they are, after the text; `last` are the fields beside the
    usage at the end, where there is one; `status` another HTTP status; `cut` leaves the end out; a `page` comes instead
    of the stream. A string as `info` is a page.
    """

    chunks: tuple[int, ...] = (1, 1, 1, 1)
    token: str = "a"
    said_as: str = "content"
    events: tuple[Any, ...] = ()
    prompt_tokens: int = 10
    finish_reason: str = "length"
    usage: dict[str, Any] | None = field(default_factory=dict)
    last: dict[str, Any] = field(default_factory=dict)
    status: int = 200
    cut: bool = False
    page: str | None = None
    metrics: list[str] = field(default_factory=list)
    info: dict[str, Any] | str | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)

    def app(self) -> Starlette:
        """The application."""
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/v1/models", self._models),
                Route("/get_model_info", self._model_info),
                Route("/metrics", self._metrics),
                Route("/get_server_info", self._info),
                Route("/v1/chat/completions", self._complete, methods=["POST"]),
                Route("/v1/completions", self._complete, methods=["POST"]),
            ]
        )

    async def _health(self, request: Request) -> Response:
        return Response()

    async def _models(self, request: Request) -> Response:
        if self.status == 401:
            return JSONResponse({"error": {"message": "no"}}, 401)
        return JSONResponse({"data": [{"id": "stand-in"}]})

    async def _model_info(self, request: Request) -> Response:
        return JSONResponse({"model_path": "stand-in"})

    async def _metrics(self, request: Request) -> Response:
        return PlainTextResponse(self.metrics.pop(0)) if self.metrics else Response(status_code=404)

    async def _info(self, request: Request) -> Response:
        if isinstance(self.info, str):
            return HTMLResponse(self.info)
        return JSONResponse(self.info) if self.info else Response(status_code=404)

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        if self.status != 200:
            return JSONResponse({"error": {"message": "no"}}, self.status)
        if self.page is not None:
            return HTMLResponse(self.page)
        return StreamingResponse(self._stream("prompt" in body), media_type="text/event-stream")

    async def _stream(self, bare: bool) -> AsyncIterator[str]:
        def event(text: str | None, reason: str | None = None) -> str:
            said = {"text": text} if bare else {"delta": {self.said_as: text}}
            told = {"choices": [{"index": 0, **said, "finish_reason": reason}]}
            return f"data: {json.dumps(told, ensure_ascii=False)}\n\n"

        yield event("")  # a role, or nothing: no token
        for tokens in self.chunks:
            yield event(self.token * tokens)
        for told in self.events:
            yield f"data: {json.dumps(told)}\n\n"
        if self.cut:
            return
        yield event("", self.finish_reason)
        if self.usage is not None:
            usage = {"prompt_tokens": self.prompt_tokens, "completion_tokens": sum(self.chunks), **self.usage}
            yield f"data: {json.dumps({'choices': [], 'usage': usage, **self.last})}\n\n"
        yield "data: [DONE]\n\n"


@contextlib.contextmanager
def running(stand_in: StandIn, certificate: tuple[str, str] | None = None) -> Iterator[str]:
    """The URL at which it serves for the time of the block, over TLS with a certificate's file and its key's."""
    certfile, keyfile = certificate or (None, None)
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(stand_in.app(), log_level="error", ws="none", ssl_certfile=certfile, ssl_keyfile=keyfile)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"{'https' if certificate else 'http'}://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


if __name__ == "__main__":
    uvicorn.run(StandIn().app(), host="127.0.0.1", port=int(sys.argv[1]), log_level="error", ws="none")
