"""Waiting until a process that was started serves, by asking it: gRPC services by their health, a gateway by HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.auth import Metadata, TokenFile
from outrider.errors import StartupError
from outrider.model_name import default_model_name
from outrider.rpc import NO_PROXY, NO_RETRIES
from outrider.v1 import draft_pb2, draft_pb2_grpc, verify_pb2, verify_pb2_grpc

AnswerT = TypeVar("AnswerT")

_FIRST_RETRY_S = 0.05
_LAST_RETRY_S = 0.5
_CALL_TIMEOUT_S = 10.0
# It ended meanwhile, and the next one is asked again; or it stood still.
_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)
# A child that starts is looked for often; outrider.rpc's back-off suits lost peers.
_PROBE_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 200), NO_RETRIES, NO_PROXY,
)  # fmt: skip


async def wait_serving(address: str) -> None:
    """Returns once the gRPC server at `address` says SERVING; waits for ever."""
    request = health_pb2.HealthCheckRequest()
    while True:
        async with _probe(address) as channel:
            try:
                watching = health_pb2_grpc.HealthStub(channel).Watch(request, wait_for_ready=True)
                # Read by hand: an iterator of it would keep its connection until garbage is collected.
                while isinstance(reply := await watching.read(), health_pb2.HealthCheckResponse):
                    if reply.status == health_pb2.HealthCheckResponse.SERVING:
                        return
            except grpc.aio.AioRpcError as error:
                if error.code() not in _GONE:
                    raise
        await asyncio.sleep(_FIRST_RETRY_S)


async def wait_enlisted(address: str, tokens: TokenFile | None) -> None:
    """Returns once the draft service at `address` serves and its verify service has taken it; waits for ever.

    Raises StartupError when verify refuses it.
    """
    await wait_serving(address)

    def ask(channel: grpc.aio.Channel) -> Awaitable[draft_pb2.DraftServiceGetServerInfoResponse]:
        return draft_pb2_grpc.DraftServiceStub(channel).GetServerInfo(
            draft_pb2.DraftServiceGetServerInfoRequest(), timeout=_CALL_TIMEOUT_S,
            metadata=tokens.metadata() if tokens is not None else (),
        )  # fmt: skip

    async for info in _answers(address, ask):
        states = {link.state for link in info.links}
        if draft_pb2.VERIFY_LINK_STATE_REFUSED in states:
            raise StartupError(f"verify refuses the draft service: {info.links[0].last_error}")
        if states == {draft_pb2.VERIFY_LINK_STATE_ENLISTED}:
            return


async def wait_both(verify: str, draft: str, tokens: TokenFile | None) -> None:
    """Returns once both serve, as wait_serving and wait_enlisted see it."""
    await wait_serving(verify)
    await wait_enlisted(draft, tokens)


async def wait_healthy(host: str, port: int, tls: ssl.SSLContext | None = None) -> None:
    """Returns once GET /health answers 200, or wants a client certificate, which we have not; waits for ever."""
    async for _ in _retries():
        try:
            reader, writer = await asyncio.open_connection(host, port, ssl=tls)
            with contextlib.closing(writer):
                writer.write(f"GET /health HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
                status = await reader.readline()
        except ssl.SSLError as error:
            if "CERTIFICATE_REQUIRED" in str(error):
                return
            continue
        except OSError:
            continue  # not listening yet
        if status.split()[1:2] == [b"200"]:
            return


def any_certificate() -> ssl.SSLContext:
    """A context that believes any certificate, to ask our own child whether it is up; nothing is entrusted to it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


async def model_name(address: str, metadata: Metadata = ()) -> str:
    """The gateway's default name for the model that the verify service at `address` serves; asks until it answers."""

    def ask(channel: grpc.aio.Channel) -> Awaitable[verify_pb2.VerifyServiceGetServerInfoResponse]:
        return verify_pb2_grpc.VerifyServiceStub(channel).GetServerInfo(
            verify_pb2.VerifyServiceGetServerInfoRequest(), timeout=_CALL_TIMEOUT_S, metadata=metadata
        )

    return default_model_name(await anext(_answers(address, ask)))


async def _answers(address: str, ask: Callable[[grpc.aio.Channel], Awaitable[AnswerT]]) -> AsyncIterator[AnswerT]:
    """What the server at `address` answers each time that it is asked; it is asked again after pauses that grow."""
    async for _ in _retries():
        async with _probe(address) as channel:
            try:
                answer = await ask(channel)
            except grpc.aio.AioRpcError as error:
                if error.code() not in _GONE:
                    raise
                continue
        yield answer


def _probe(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=_PROBE_OPTIONS)


async def _retries() -> AsyncIterator[None]:
    """Yields at once, then after pauses that grow."""
    pause_s = _FIRST_RETRY_S
    while True:
        yield
        await asyncio.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _LAST_RETRY_S)
