"""What runs in the processes that benchmarks start: a verify service over a loaded model, or a drafter's worker.

Each says that it is ready, and ends on SIGTERM. What fails ends it too, with an error: who waits for it must not go on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from bench._main import told_to_end
from draft_service.worker import Worker
from outrider import rpc
from outrider.args import VerifyArgs
from outrider.errors import Unavailable
from outrider.grpc_thread import let_grpc_in_first
from outrider.process_tuning import keep_steady
from outrider.stopping import first_of
from outrider.telemetry import announce
from outrider.v1 import verify_pb2_grpc
from verify_service.app import build_service
from verify_service.commands import Stop
from verify_service.loading import LoadedModel
from verify_service.service import VerifyServicer
from verify_service.step_loop import StepLoop

_DRAIN_S = 5.0
_STOP_S = 1.0

Wrap = Callable[[VerifyServicer], verify_pb2_grpc.VerifyServiceServicer]


async def serve_model(
    args: VerifyArgs, loaded: LoadedModel, *, lent_ms: float = 0.0, wrap: Wrap = lambda servicer: servicer
) -> StepLoop:
    """Serves as `outrider verify` does, its rpcs behind what `wrap` makes of them, until it is told to end.

    Returns the loop, or raises what it failed of.
    """
    told = told_to_end()
    step_loop, servicer = build_service(args, loaded, lent_ms=lent_ms)
    server = rpc.create_server()
    let_grpc_in_first()
    verify_pb2_grpc.add_VerifyServiceServicer_to_server(wrap(servicer), server)
    rpc.bind(server, args.listen)
    await server.start()
    keep_steady()
    stepping = asyncio.create_task(asyncio.to_thread(step_loop.run))
    await _ready_until(told, stepping)
    step_loop.inbox.put(Stop(Unavailable("the benchmark is over")))
    try:
        await stepping
    finally:
        await server.stop(_STOP_S)
    return step_loop


async def work(worker: Worker) -> None:
    """Drafts until it is told to end, and drains. Raises what the worker failed of."""
    told = told_to_end()
    keep_steady()
    working = asyncio.create_task(worker.run())
    await _ready_until(told, working)
    await worker.drain(_DRAIN_S)
    working.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await working


async def _ready_until(told: asyncio.Event, doing: asyncio.Task[None]) -> None:
    """Says that it is ready, and returns when it is told to end, or when what it does has ended."""
    announce("ready")
    await first_of(told.wait(), doing)
