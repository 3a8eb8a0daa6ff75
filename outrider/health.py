"""`outrider health`: whether services answer, for whoever starts and restarts them. Loads no service."""

from __future__ import annotations

import asyncio
import ssl
import sys
import urllib.error
from http.client import HTTPException

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.args import HealthArgs
from outrider.dialing import Dial, Dialer
from outrider.no_proxy import FAILURES, open_url
from outrider.rpc import create_channel
from outrider.tls import client_context

_SERVING = health_pb2.HealthCheckResponse.SERVING


def main(args: HealthArgs) -> int:
    """The exit code: 0 when all that were named serve; else 1, and a line for each that does not."""
    wrong = asyncio.run(_ask_all(args))
    for line in wrong:
        print(f"outrider health: {line}", file=sys.stderr)
    return 1 if wrong else 0


async def _ask_all(args: HealthArgs) -> list[str]:
    """What is wrong, in words."""
    tls = args.verify_tls
    dial = Dialer(tls=tls, server_name=args.verify_ssl_server_name)
    context = None if tls is None else client_context(tls)
    calls = [grpc_health(address, args.timeout_s, dial) for address in args.address]
    calls += [asyncio.to_thread(http_health, url, args.timeout_s, context) for url in args.url]
    return [wrong for wrong in await asyncio.gather(*calls) if wrong is not None]


async def grpc_health(address: str, timeout_s: float, dial: Dial = create_channel) -> str | None:
    """None when the gRPC server at `address` says SERVING; else what it says instead."""
    async with dial(address) as channel:
        try:
            reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return f"{address}: {error.code().name}: {error.details()}"
    if reply.status == _SERVING:
        return None
    return f"{address}: {health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)}"


def http_health(url: str, timeout_s: float, context: ssl.SSLContext | None = None) -> str | None:
    """None when GET `url` answers 200; else what it answers instead. context: for https."""
    try:
        with open_url(url, timeout_s, context) as reply:
            return None if reply.status == 200 else f"{url}: {reply.status}"
    except urllib.error.HTTPError as error:
        with error:
            return f"{url}: {error.code}"
    except FAILURES as error:
        is_stranger = isinstance(getattr(error, "reason", None), ssl.SSLCertVerificationError)
        hint = "; --verify-ssl-ca-certs names authorities to believe" if is_stranger else ""
        return f"{url}: {error!r}" if isinstance(error, HTTPException) else f"{url}: {error}{hint}"
