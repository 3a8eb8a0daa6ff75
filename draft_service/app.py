"""The draft process: warms its drafter up, serves, keeps its links, and drains when told to stop."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import uvloop

from outrider import env, rpc, serving
from outrider.args import DraftArgs
from outrider.dialing import dialer_of
from outrider.errors import StartupError
from outrider.metrics_http import serve_metrics
from outrider.telemetry import announce, configure_logging, get_logger
from outrider.tracing import tracing_of
from outrider.v1 import common_pb2, draft_pb2, draft_pb2_grpc

log = get_logger(__name__)

SERVICE = draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def main(args: DraftArgs) -> int:
    """Runs the process; returns its exit code."""
    configure_logging("draft")
    cache_kernels(env.home() / "numba")
    if args.describe:
        return describe(args)
    if args.inspect is not None:
        return inspect(args, args.inspect)
    return uvloop.run(_serve(args))


def describe(args: DraftArgs) -> int:
    """Prints what the drafter needs of verify, as JSON."""
    from draft_service.drafters.factory import describe_drafter

    print(json.dumps(describe_drafter(args)))
    return 0


def inspect(args: DraftArgs, text: str) -> int:
    """Prints the tree that would be proposed after `text`."""
    from draft_service.inspecting import proposed_tree

    print(proposed_tree(args, text))
    return 0


def cache_kernels(folder: Path) -> None:
    """Lets numba keep what it compiles in `folder`, so that a read-only installation starts fast too.

    Must run before numba is first imported. StartupError when the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartupError(f"cannot make {folder} for compiled code: {error}; set OUTRIDER_HOME") from error
    os.environ.setdefault("NUMBA_CACHE_DIR", str(folder))


async def _serve(args: DraftArgs) -> int:
    # Imported here: these import numba, which reads where its cache is only once.
    from draft_service.drafters.factory import make_drafter
    from draft_service.drafting import Drafting
    from draft_service.link import Identity
    from draft_service.metrics import make_registry
    from draft_service.planners import make_planner
    from draft_service.service import DraftServicer
    from draft_service.worker import Worker

    stopping, hurry = _stop_events()
    identity = Identity(f"{socket.gethostname()}:{os.getpid()}", _host_id(), secrets.token_hex(16))
    tracing = tracing_of(args, "draft")
    drafter = make_drafter(args)
    executor = None if drafter.inline else ThreadPoolExecutor(1, thread_name_prefix="drafter")
    try:
        drafter.warm_up()
        drafting = Drafting(drafter, executor=executor, planner=make_planner(args, drafter))
        drafting.tracing = tracing
        dial = dialer_of(args, args.verify_address, args.token_file)
        worker = Worker(args.verify_address, drafting, identity, max_sessions=args.max_sessions, dial=dial)
        server = serving.create_server(args)
        draft_pb2_grpc.add_DraftServiceServicer_to_server(DraftServicer(args, drafter, worker, identity), server)
        health = rpc.add_health_and_reflection(server, [SERVICE])
        (address,) = serving.listen(server, args, args.listen)
        registry = make_registry(drafter, drafting, worker)
        async with serve_metrics(registry, args.metrics_host, args.metrics_port) as metrics_address:
            await server.start()
            await rpc.set_serving(health, [SERVICE], True)
            name = common_pb2.Algorithm.Name(drafter.algorithm).removeprefix("ALGORITHM_")
            announce(f"draft serves {name} at {address} for {', '.join(args.verify_address)}")
            if metrics_address is not None:
                announce(f"draft tells metrics at {metrics_address}")
            working = asyncio.create_task(worker.run())
            await _first_of(working, asyncio.create_task(stopping.wait()))
            await rpc.set_serving(health, [SERVICE], False)
            draining = asyncio.create_task(worker.drain(args.shutdown_grace_s))
            await _first_of(draining, asyncio.create_task(hurry.wait()))
            await server.stop(grace=None)
        if not working.done():
            return 0
        log.error("the worker failed", exc_info=working.exception())
        return 1
    finally:
        if executor is not None:
            executor.shutdown(cancel_futures=True)
        drafter.close_down()
        if tracing is not None:
            tracing.close()


def _stop_events() -> tuple[asyncio.Event, asyncio.Event]:
    """Set by the first SIGTERM or SIGINT, and by the second."""
    stopping, hurry = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, lambda: (hurry if stopping.is_set() else stopping).set())
    return stopping, hurry


async def _first_of(*tasks: asyncio.Task[object]) -> None:
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)


def _host_id() -> str:
    """Equal for processes that may share memory: the host's name and the kernel's start."""
    boot_id = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return f"{socket.gethostname()}/{boot_id}"
