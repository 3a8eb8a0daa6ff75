"""The gateway process: `create_app` for any ASGI server, `main` to run it under uvicorn until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import socket
from collections.abc import AsyncGenerator, Callable, Generator
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway import chat, completions, info, native, native_info, page, responses_api, tokenization
from gateway.callers import callers_of
from gateway.edge import Edge
from gateway.http_guard import guarded
from gateway.openapi import openapi
from gateway.probing import ProbeTimes
from gateway.route import RetryPolicy
from gateway.service import Gateway
from gateway.tls_listener import Server
from outrider import descriptors
from outrider.args import GatewayArgs
from outrider.args.links import host_port
from outrider.errors import StartupError
from outrider.metrics_http import serve_metrics
from outrider.process_tuning import keep_steady
from outrider.serving import check_free, is_loopback, tcp_listener
from outrider.stopping import on_signals, stop_signals
from outrider.strangers import Strangers
from outrider.telemetry import announce, configure_logging, get_logger
from outrider.thread_pool import workers
from outrider.tls import http_context, server_files
from outrider.tracing import tracing_of

log = get_logger(__name__)

KEEP_ALIVE_S = 30
_BACKLOG = 2048
_OTHER_DESCRIPTORS = 64  # for backends, metrics, logs and what is loaded

ROUTES = [
    Route("/v1/chat/completions", chat.chat_completions, methods=["POST"]),
    Route("/v1/completions", completions.completions, methods=["POST"]),
    Route("/v1/responses", responses_api.responses, methods=["POST"]),
    Route("/v1/models", info.list_models),
    Route("/v1/models/{model:path}", info.get_model),
    Route("/tokenize", tokenization.tokenize, methods=["POST"]),
    Route("/detokenize", tokenization.detokenize, methods=["POST"]),
    Route("/generate", native.generate, methods=["POST", "PUT"]),
    Route("/get_model_info", native_info.get_model_info),
    Route("/get_server_info", native_info.get_server_info),
    Route("/server_info", native_info.get_server_info),
    Route("/v1/loads", native_info.get_loads),
    Route("/flush_cache", native_info.flush_cache, methods=["POST"]),
    Route("/health", info.health),
    Route("/health_generate", info.health_generate),
    Route("/version", info.version),
    Route("/metrics", info.metrics),
    Route("/openapi.json", openapi),
    *page.ROUTES,
]


def create_app(
    args: GatewayArgs,
    *,
    retry: RetryPolicy | None = None,
    probe: ProbeTimes | None = None,
    on_failure: Callable[[StartupError], None] | None = None,
    on_ready: Callable[[], None] | None = None,
) -> Starlette:
    """The ASGI application. `retry` and `probe` are for tests; `on_failure` hears that the model cannot be served,
    `on_ready` that it is."""
    gateway = Gateway(args, retry=retry, probe=probe, on_failure=on_failure, on_ready=on_ready)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        await gateway.start()
        async with contextlib.AsyncExitStack() as stack:
            if tracing is not None:
                stack.push_async_callback(tracing.close)
            stack.push_async_callback(gateway.close)
            try:
                metrics = serve_metrics(gateway.metrics.registry, args.metrics_host, args.metrics_port)
                address = await stack.enter_async_context(metrics)
            except StartupError as error:
                gateway.fail(error)
            else:
                if address is not None:
                    announce(f"gateway tells metrics at {address}")
            yield

    tracing = tracing_of(args, "gateway")
    edge = Middleware(Edge, callers=callers_of(args), metrics=gateway.metrics, routes=ROUTES, tracing=tracing)
    app = Starlette(
        routes=ROUTES, lifespan=lifespan, middleware=[edge],
        exception_handlers={HTTPException: _to_the_edge},
    )  # fmt: skip
    app.router.redirect_slashes = False
    app.state.gateway = gateway
    return app


async def _to_the_edge(request: Request, error: Exception) -> Response:
    """The router's own errors are answered where all others are."""
    raise error


class _Server(Server):
    """The server, which leaves with 0 after a signal: the first one drains, the second does not wait."""

    def __init__(
        self, config: uvicorn.Config, gateway: Gateway, drain_delay_s: float, strangers: Strangers | None
    ) -> None:
        super().__init__(config)
        self.failure: StartupError | None = None
        self._gateway = gateway
        self._drain_delay_s = drain_delay_s
        self._strangers = strangers

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves; tells of connections that never get through TLS, of which the protocol does not hear."""
        asyncio.get_running_loop().set_default_executor(workers())
        async with contextlib.AsyncExitStack() as stack:
            if self._strangers is not None:
                addresses = [f"tcp:{listener.getsockname()[1]}" for listener in sockets or ()]
                await stack.enter_async_context(self._strangers.watched(addresses))
            await super().serve(sockets)

    def fail(self, error: StartupError) -> None:
        """Ends the server because of `error`."""
        self.failure = error
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Handles the signals to end, and does not raise them again afterwards."""
        on_signals(self._on_signal)
        yield
        for number in stop_signals():
            asyncio.get_running_loop().remove_signal_handler(number)

    def _on_signal(self) -> None:
        if self._gateway.leaving:
            self._gateway.drain()
            self.force_exit = self.should_exit = True
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # of what it cuts off it tells at length
            return
        self._gateway.leaving = True
        # Until then requests are taken: what is refused or cut off while a balancer still sends is lost.
        asyncio.get_running_loop().call_later(self._drain_delay_s, self._drain)

    def _drain(self) -> None:
        self._gateway.drain()
        self.should_exit = True


def main(args: GatewayArgs) -> int:
    """Serves until SIGINT or SIGTERM and returns 0. StartupError when it cannot listen, or cannot serve the model."""
    configure_logging("gateway")
    descriptors.check()
    server: _Server | None = None

    def fail(error: StartupError) -> None:
        assert server is not None
        server.fail(error)

    app = create_app(args, on_failure=fail, on_ready=keep_steady)
    check_free(*args.metrics_addresses)
    listener, address = listen(args)
    strangers = Strangers("a connection ended before TLS was agreed on") if args.ssl_certfile else None
    config = uvicorn_config(app, args, None if strangers is None else strangers.note)
    server = _Server(config, app.state.gateway, args.drain_delay_s, strangers)
    ours = None if args.uds is None else _identity(args.uds)
    announce(f"gateway listens on {address}")
    if args.uds is None and not is_loopback(f"{args.host}:{args.port}") and not (args.api_key or args.api_key_file):
        log.warning("other machines can reach the gateway without a key (--api-key-file)")
    try:
        server.run(sockets=[listener])
    finally:
        listener.close()
        if args.uds is not None and _identity(args.uds) == ours:  # else another began while we drained
            Path(args.uds).unlink(missing_ok=True)
    if server.failure is not None:
        raise server.failure
    return 0


def uvicorn_config(
    app: Starlette, args: GatewayArgs, on_connection: Callable[[str], None] | None = None
) -> uvicorn.Config:
    """How the application is served: uvloop, httptools behind our guard, no lines of uvicorn's own.

    StartupError for a certificate that cannot be used.
    """
    files = server_files(args.ssl_certfile, args.ssl_keyfile, args.ssl_ca_certs)
    if files is not None:
        files.read()
    return uvicorn.Config(
        app, loop="uvloop", lifespan="on", ws="none", log_config=None, access_log=False, server_header=False,
        http=guarded(
            max_connections=_connections_that_fit(args.max_connections), header_timeout_s=args.receive_timeout_s,
            on_connection=on_connection,
        ),
        proxy_headers=False, timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(args.shutdown_grace_s),
        ssl_context_factory=None if files is None else lambda *_: http_context(files),
    )  # fmt: skip


def _connections_that_fit(wanted: int) -> int:
    """`wanted`, or fewer: one more than there are descriptors for would be closed without an answer."""
    most = max(descriptors.limit() - _OTHER_DESCRIPTORS, 1)
    if wanted > most:
        log.warning(
            "--max-connections is lowered to what the limit of open files leaves", max_connections=wanted,
            lowered_to=most, open_files=descriptors.limit(),
        )  # fmt: skip
    return min(wanted, most)


def listen(args: GatewayArgs) -> tuple[socket.socket, str]:
    """The listening socket, and its address in words."""
    try:
        if args.uds is not None:
            _remove_dead_socket(Path(args.uds))
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(args.uds)
            listener.listen(_BACKLOG)
            return listener, f"unix:{args.uds}"
        listener = tcp_listener(args.host, args.port, _BACKLOG)
    except OSError as error:
        address = args.uds or host_port(args.host, args.port)
        raise StartupError(f"cannot listen on {address}: {error.strerror or error}") from error
    return listener, f"http{'s' if args.ssl_certfile else ''}://{host_port(args.host, listener.getsockname()[1])}"


def _identity(path: str) -> tuple[int, int, int] | None:
    """Tells a file from a later one of its name, which may have its number again; None where there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _remove_dead_socket(path: Path) -> None:
    """A socket file whose process is gone stands in the way; one that answers is in use."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if probe.connect_ex(str(path)) == 0:
            raise StartupError(f"cannot listen on {path}: another process does")
    path.unlink()
