"""The outermost layer: names each exchange, checks its key, turns failures into answers, logs a line."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import page
from gateway.callers import Caller, Callers
from gateway.error_values import shown
from gateway.errors import NOT_BEGUN, SHUTTING_DOWN, HttpError, failure
from gateway.exchange import DROPPED, GONE, ClientGone, SlowReader
from gateway.metrics import Metrics
from outrider.errors import OutriderError, Unavailable
from outrider.telemetry import Throttle, get_logger
from outrider.tracing import TRACEPARENT, Tracing, set_call_metadata

if TYPE_CHECKING:
    from opentelemetry.trace import Span

log = get_logger(__name__)

OPEN_PATHS = frozenset({"/health", "/openapi.json"}) | page.PATHS  # served without a key
# What counts against a caller's rate.
LIMITED_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/generate"})
# Probes come every few seconds, the page in a dozen files: not worth a line each.
_QUIET = frozenset({"/health", "/metrics"}) | page.PATHS
CLIENT_GONE = 499
_SMALL_BODY_BYTES = 64 * 1024
_CLOSING = frozenset({408, 413})  # the rest of the body is not waited for
_stranger_lines = Throttle()
_GIVEN_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(slots=True)
class _Exchange:
    """What is noted of one exchange, on its way through here, for its headers and its log line."""

    request_id: str
    began: float
    state: dict[str, Any]
    receive: Receive
    send: Send
    task: asyncio.Task[Any]  # that runs it
    body_left: bool  # whoever is answered before its body came does not go on sending it
    status: int | None = None
    caller: Caller | None = None
    watch: asyncio.Task[None] | None = None  # for a hang-up

    @property
    def elapsed_ms(self) -> int:
        return round((time.monotonic() - self.began) * 1000)

    async def answer(self, app: ASGIApp, scope: Scope) -> None:
        """Has `app` answer. ClientGone when the client hangs up after its whole request: what is made for it ends."""
        if scope["method"] == "GET":  # nobody reads its body
            self._begin_watch()
        try:
            await app(scope, self.receive_noted, self.send_named)
        except asyncio.CancelledError:
            if GONE not in self.state:
                raise
            self.task.uncancel()
            raise ClientGone from None
        finally:
            self._end_watch()

    async def receive_noted(self) -> Message:
        """Notes whether more of the body follows; once none does, a hang-up is watched for."""
        message = await self.receive()
        more = message.get("more_body", False)
        self.body_left = self.body_left and more
        if message["type"] == "http.request" and not more and self.watch is None:
            self._begin_watch()
        return message

    def _begin_watch(self) -> None:
        self.watch = asyncio.create_task(self._wait_for_hangup())

    async def _wait_for_hangup(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
        if DROPPED not in self.state:
            self.state[GONE] = True
            self.task.cancel()

    def _end_watch(self) -> None:
        if self.watch is not None:
            self.watch.cancel()

    async def send_named(self, message: Message) -> None:
        """Notes the status, and adds our headers."""
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._end_watch()  # after which the server tells of a disconnect, whoever is there
        if message["type"] == "http.response.start":
            self.status = message["status"]
            named = [
                (b"x-request-id", self.request_id.encode()),
                (b"openai-processing-ms", str(self.elapsed_ms).encode()),
                *(self.caller.headers() if self.caller is not None else ()),
            ]
            if message["status"] == 503 and "begun" not in self.state:
                named.append((NOT_BEGUN[0].encode(), NOT_BEGUN[1].encode()))
            if self.body_left or message["status"] in _CLOSING:
                named.append((b"connection", b"close"))
            message = {**message, "headers": [*message.get("headers", ()), *named]}
        await self.send(message)


def _log_line(scope: Scope, exchange: _Exchange) -> None:
    quiet = scope["path"] in _QUIET or (exchange.status == 401 and not _stranger_lines.allows())
    say = log.debug if quiet else log.info
    say("http", status=exchange.status, ms=exchange.elapsed_ms, method=scope["method"], path=scope["path"],
        caller=exchange.caller.name if exchange.caller else None)  # fmt: skip


class Edge:
    """ASGI middleware around everything else."""

    def __init__(
        self, app: ASGIApp, *, callers: Callers, metrics: Metrics, routes: Sequence[Route],
        tracing: Tracing | None = None,
    ) -> None:  # fmt: skip
        """`routes` are those of `app`, whose paths the counts name."""
        self._app = app
        self._tracing = tracing
        self._callers = callers
        self._metrics = metrics
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs one exchange; nothing leaves it but an error after half an answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        state = scope.setdefault("state", {})
        task = asyncio.current_task()
        assert task is not None
        exchange = _Exchange(_request_id(headers), time.monotonic(), state, receive, send, task, _body_follows(headers))
        state["request_id"], state["began"] = exchange.request_id, exchange.began
        structlog.contextvars.bind_contextvars(request_id=exchange.request_id)  # in every line of this task
        span = self._begin_span(scope, headers, exchange.request_id)
        self._metrics.in_flight.inc()
        try:
            if scope["path"] not in OPEN_PATHS:
                exchange.caller = state["caller"] = self._callers.find(headers)
                if scope["path"] in LIMITED_PATHS:
                    exchange.caller.admit()
            await exchange.answer(self._app, scope)
        except asyncio.CancelledError:  # the server's grace is over
            if exchange.status is None:
                await _send_failure(Unavailable(SHUTTING_DOWN), exchange.send_named)
        except (ClientGone, ClientDisconnect) as gone:
            exchange.status = CLIENT_GONE
            log.info("client gone", slow=isinstance(gone, SlowReader))
        except Exception as error:
            if not isinstance(error, OutriderError | HTTPException):
                log.error("unexpected error", exc_info=error)
            if exchange.status is not None:
                state["finish_reason"] = "error"
                raise  # half an answer is sent: the connection is closed
            await _send_failure(self._as_ours(error, scope["path"]), exchange.send_named)
        finally:
            self._metrics.in_flight.dec()
            self._count(scope, exchange)
            if span is not None:
                span.set_attribute("http.response.status_code", exchange.status or 0)
                span.end()
            _log_line(scope, exchange)

    def _as_ours(self, error: Exception, path: str) -> Exception:
        """The router's errors (no such path, wrong method) as ours."""
        if not isinstance(error, HTTPException):
            return error
        under_v1 = f"/v1{path}"
        hint = (
            f" There is {under_v1}."
            if any(route.path == under_v1 for route in self._routes)
            else " /openapi.json has those that there are."
        )
        message = {
            404: f"There is no path {shown(path)}.{hint}", 405: f"{shown(path)} does not take this method.",
        }.get(error.status_code, "The request cannot be served.")  # fmt: skip
        return HttpError(error.status_code, message, headers=tuple((error.headers or {}).items()))

    def _begin_span(self, scope: Scope, headers: Headers, request_id: str) -> Span | None:
        """Names the exchange to the calls made for it, and begins its span if it may be traced."""
        if self._tracing is None or scope["path"] not in LIMITED_PATHS:
            set_call_metadata(request_id, "")
            return None
        span = self._tracing.start(f"{scope['method']} {scope['path']}", headers.get(TRACEPARENT, ""), server=True)
        span.set_attribute("outrider.request_id", request_id)
        set_call_metadata(request_id, self._tracing.traceparent(span))
        return span

    def _count(self, scope: Scope, exchange: _Exchange) -> None:
        """Counts the request by its route, its status, and how its output ended."""
        # Not the endpoint: some have two paths, and what is refused here never reached one.
        path = next((route.path for route in self._routes if route.path_regex.match(scope["path"])), "none")
        reason = scope["state"].get("finish_reason", "none")
        self._metrics.requests.labels(path, str(exchange.status), reason).inc()


def _body_follows(headers: Headers) -> bool:
    """Whether a body follows that may not be read along with the headers: it is large, or waits to be asked for.

    Whoever waits need not send it after the answer, and what comes then may be a request.
    """
    num_along = 0 if "expect" in headers else _SMALL_BODY_BYTES
    return "transfer-encoding" in headers or int(headers.get("content-length", "0")) > num_along


def _request_id(headers: Headers) -> str:
    """The caller's own x-request-id where it is a plain word, else a new one."""
    given = headers.get("x-request-id", "")
    return given if _GIVEN_ID.fullmatch(given) else uuid.uuid4().hex


async def _send_failure(error: Exception, send: Send) -> None:
    failed = failure(error)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(failed.body)).encode()),
        *((name.encode(), value.encode()) for name, value in failed.headers),
    ]
    await send({"type": "http.response.start", "status": failed.status, "headers": headers})
    await send({"type": "http.response.body", "body": failed.body})
