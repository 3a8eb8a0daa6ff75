"""The draft process: warms its drafter up, serves, keeps its links, and drains when told to stop."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from outrider import env, rpc, serving
from outrider.algorithms import algorithm_name
from outrider.args import DraftArgs
from outrider.busy_poll import is_wanted
from outrider.dialing import Dial, dialer_of
from outrider.metrics_http import serve_metrics
from outrider.out_of_memory import memory_for
from outrider.placement import Placement
from outrider.preflight import check_before_load
from outrider.process_tuning import keep_steady
from outrider.row_ring import host_id
from outrider.stopping import Stopping, first_of, stopped_by_signals
from outrider.strangers import Strangers
from outrider.telemetry import announce, configure_logging, get_logger
from outrider.thread_pool import thread_pool, workers
from outrider.tracing import tracing_of
from outrider.v1 import draft_pb2, draft_pb2_grpc

if TYPE_CHECKING:
    from draft_service.drafting import Drafting

log = get_logger(__name__)

SERVICE = draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name


def main(args: DraftArgs) -> int:
    """Runs the process; returns its exit code."""
    configure_logging("draft")
    cache_kernels(env.home() / "numba")
    if args.describe:
        return describe(args)
    if args.inspect is not None:
        return inspect(args, args.inspect)
    check_before_load(args)
    serving.check_free(args.listen, *args.metrics_addresses)
    dial = dialer_of(args, args.verify_address, args.token_file)
    return uvloop.run(_serve_alone(args, load(args), dial))


async def _serve_alone(args: DraftArgs, loaded: Loaded, dial: Dial) -> int:
    asyncio.get_running_loop().set_default_executor(workers())
    return await serve(args, loaded, stopped_by_signals, dial)


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

    Must run before numba is first imported, which makes it. Where it cannot be written nothing is kept, and the log
    says so (drafters/compiled.py).
    """
    os.environ.setdefault("NUMBA_CACHE_DIR", str(folder))


@dataclass(frozen=True, slots=True)
class Loaded:
    """A drafter that is warm, and what it drafts with. executor: None where it drafts on the event loop."""

    drafting: Drafting
    executor: ThreadPoolExecutor | None

    def close(self) -> None:
        """Ends its threads."""
        if self.executor is not None:
            self.executor.shutdown(cancel_futures=True)
        self.drafting.drafter.close_down()


def load(args: DraftArgs) -> Loaded:
    """Loads and warms the drafter up. StartupError when it cannot be had."""
    # Imported here: these import numba, which reads where its cache is only once.
    from draft_service.drafters.factory import make_drafter
    from draft_service.drafting import Drafting
    from draft_service.planners import make_copier, make_planner

    placement = Placement(args.core)  # first: a large model takes minutes
    wanted = (
        f"--max-sessions {args.max_sessions}, --draft-max-total-tokens {args.draft_max_total_tokens}, "
        f"--speculative-ngram-capacity {args.speculative_ngram_capacity}"
    )
    with memory_for(wanted):
        drafter = make_drafter(args)
    executor = None if drafter.inline else thread_pool(1, "drafter")
    try:
        with memory_for(wanted):
            drafter.warm_up()
        planner = make_planner(args, drafter)
        copier = make_copier(args, drafter)
        tracing = tracing_of(args, "draft")  # last: it has a thread
    except BaseException:
        drafter.close_down()
        raise
    drafting = Drafting(drafter, planner, executor=executor, copier=copier, tracing=tracing, placement=placement)
    return Loaded(drafting, executor)


async def serve(args: DraftArgs, loaded: Loaded, stopping: Callable[[], Stopping], dial: Dial) -> int:
    """Serves until told to stop, and closes what was loaded; returns the exit code.

    stopping: asked once all is warm, for what tells; till then signals end the process. `dial` opens the ways to the
    verify services.
    """
    try:
        if loaded.executor is not None:
            from draft_service.rehearsal import rehearse  # here: torch's, which an image for n-gram drafts has not

            await rehearse(loaded.drafting)
        keep_steady()
        return await _serve(args, loaded.drafting, stopping(), dial)
    finally:
        loaded.close()


async def _serve(args: DraftArgs, drafting: Drafting, stop: Stopping, dial: Dial) -> int:
    from draft_service.link import Identity
    from draft_service.metrics import make_registry
    from draft_service.service import DraftServicer
    from draft_service.worker import Worker

    drafter, tracing = drafting.drafter, drafting.tracing
    identity = Identity(f"{socket.gethostname()}:{os.getpid()}", host_id(), secrets.token_hex(16))
    try:
        on_device = not drafter.inline and _is_on_device(args)
        worker = Worker(
            args.verify_address, drafting, identity, max_sessions=args.max_sessions, dial=dial,
            busy_poll=is_wanted(args.busy_poll, on_device=on_device),
        )  # fmt: skip
        strangers = Strangers()
        server = serving.create_server(args, strangers=strangers)
        draft_pb2_grpc.add_DraftServiceServicer_to_server(DraftServicer(args, drafter, worker, identity), server)
        health = rpc.add_health_and_reflection(server, [SERVICE])
        (address,) = serving.listen(server, args, args.listen)
        registry = make_registry(drafter, drafting, worker)
        registry.register(strangers.families)
        telling = serve_metrics(registry, args.metrics_host, args.metrics_port)
        async with strangers.watched([address]), telling as metrics_address:
            await server.start()
            rpc.set_serving(health, [SERVICE], True)
            name = algorithm_name(drafter.algorithm)
            announce(f"draft serves {name} at {address} for {', '.join(args.verify_address)}")
            if metrics_address is not None:
                announce(f"draft tells metrics at {metrics_address}")
            working = asyncio.create_task(worker.run())
            await first_of(working, stop.asked.wait())
            rpc.set_serving(health, [SERVICE], False)
            await first_of(worker.drain(args.shutdown_grace_s), stop.hurry.wait())
            await server.stop(grace=None)
        if not working.done():
            return 0
        log.error("the worker failed", exc_info=working.exception())
        return 1
    finally:
        if tracing is not None:
            await tracing.close(stop.hurry)


def _is_on_device(args: DraftArgs) -> bool:
    """Whether the draft model runs on a GPU."""
    from engine.devices import pick_device  # here: torch's

    return pick_device(args.device).type != "cpu"
