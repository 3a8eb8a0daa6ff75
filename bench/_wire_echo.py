"""A bare grpc.aio echo over a stream: what gRPC alone takes for a round's bytes.

    python -m bench._wire_echo ADDRESS [CORE]

Serves until SIGTERM, on one core where it is named.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import uvloop

from bench._main import told_to_end
from outrider import rpc  # noqa: F401  settings of gRPC that hold for the process
from outrider.placement import keep_to, tasks
from outrider.supervisor import die_with_parent
from outrider.telemetry import announce
from outrider.wire import MAX_MESSAGE_BYTES

_METHOD = "/outrider.bench.Echo/Echo"
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),
)
_SIZE_BYTES = 4  # a request begins with the number of bytes that it asks for


async def _echo(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for request in requests:
        yield bytes(int.from_bytes(request[:_SIZE_BYTES], "little"))


async def _serve(address: str) -> int:
    told = told_to_end()
    server = grpc.aio.server(options=list(_OPTIONS))
    handler = grpc.stream_stream_rpc_method_handler(_echo)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("outrider.bench.Echo", {"Echo": handler})])
    server.add_insecure_port(address)
    await server.start()
    announce("ready")
    await told.wait()
    await server.stop(None)
    return 0


async def round_trips_ms(
    address: str, *, up: int, down: int, count: int, pause_ms: float, core: int | None = None
) -> list[float]:
    """Times of `count` round trips of `up` bytes there and `down` bytes back, with a pause before each, as in a round.

    A process that has slept for some milliseconds answers later than one that is asked all the time. core: for this
    process, meanwhile.
    """
    request = down.to_bytes(_SIZE_BYTES, "little") + bytes(max(0, up - _SIZE_BYTES))
    times: list[float] = []
    async with grpc.aio.insecure_channel(address, options=_OPTIONS) as channel:
        stream: Any = channel.stream_stream(_METHOD, request_serializer=None, response_deserializer=None)
        call = stream()
        allowed = None if core is None else os.sched_getaffinity(0)
        if core is not None:
            keep_to(tasks(), {core})
        for _ in range(count):
            await asyncio.sleep(pause_ms / 1000)
            start_ns = time.monotonic_ns()
            await call.write(request)
            await call.read()
            times.append((time.monotonic_ns() - start_ns) / 1e6)
        if allowed is not None:
            keep_to(tasks(), allowed)
        await call.done_writing()
    return times


def main(words: list[str]) -> int:
    """Serves until SIGTERM."""
    die_with_parent()
    if words[1:]:
        os.sched_setaffinity(0, {int(words[1])})
    return uvloop.run(_serve(words[0]))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
