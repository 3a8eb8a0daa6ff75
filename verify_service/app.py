"""The verify process: loads the model, serves until told to stop, drains."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import torch
import uvloop

from engine.devices import take_device
from engine.feature_spec import FeatureSpec
from engine.pages import PagePool
from engine.radix_cache import RadixCache
from outrider import env, rpc, serving
from outrider.args import VerifyArgs
from outrider.auth import token_file
from outrider.busy_poll import is_wanted
from outrider.errors import Unavailable
from outrider.metrics_http import serve_metrics
from outrider.preflight import check_before_load
from outrider.process_tuning import keep_steady
from outrider.row_ring import remove_left_behind
from outrider.stopping import Stopping, first_of, stopped_by_signals
from outrider.strangers import Strangers
from outrider.telemetry import announce, configure_logging, get_logger
from outrider.thread_pool import thread_pool, workers
from outrider.tracing import Tracing, tracing_of
from outrider.v1 import admin_pb2_grpc, common_pb2, verify_pb2, verify_pb2_grpc
from outrider.watchdog import beats, watching
from verify_service import admin
from verify_service.call_totals import CallTotals
from verify_service.calls import Calls
from verify_service.commands import Inbox, Stop
from verify_service.drafters import Drafters
from verify_service.features import feature_layout, row_bytes
from verify_service.grammar_compiler import GrammarCompiler
from verify_service.loading import LoadedModel, load_model
from verify_service.metrics import make_registry
from verify_service.requests import RequestBounds, SessionFactory
from verify_service.sampler import Sampler
from verify_service.scheduler import Scheduler
from verify_service.service import VerifyServicer, new_boot_id
from verify_service.session_pages import SessionPages
from verify_service.sizing import outbox_bytes
from verify_service.step_loop import StepLoop
from verify_service.target import Target
from verify_service.turns import Lending
from verify_service.unsent import Responses

log = get_logger(__name__)

SERVICE = verify_pb2.DESCRIPTOR.services_by_name["VerifyService"].full_name
SERVICES = SERVICE, admin.SERVICE
LENT_MS = 20.0  # a step of the C kernels that the event loop may run itself: what clients and drafters notice no more


def main(args: VerifyArgs) -> int:
    """Runs the process; returns its exit code."""
    configure_logging("verify")
    check_before_load(args)
    serving.check_free(*_addresses(args), *args.metrics_addresses)
    loaded = load_model(args)
    keep_steady()
    return uvloop.run(_serve_until_signals(args, loaded))


async def _serve_until_signals(args: VerifyArgs, loaded: LoadedModel) -> int:
    return await serve(args, loaded, stopped_by_signals())


async def serve(
    args: VerifyArgs, loaded: LoadedModel, stop: Stopping, on_ready: Callable[[VerifyServicer], object] | None = None
) -> int:
    """Serves until told to stop; returns the exit code. `on_ready` gets the handlers once they serve."""
    loop = asyncio.get_running_loop()
    loop.set_default_executor(workers(loaded.placement.roam))
    if left := remove_left_behind():
        log.info("shared memory of killed processes removed", files=left)
    tracing = tracing_of(args, "verify")
    lent_ms = LENT_MS if loaded.runner.uses_kernels else 0.0
    step_loop, servicer = build_service(args, loaded, lent_ms=lent_ms, tracing=tracing)
    admin_tokens = token_file(args.admin_token_file, "--admin-token-file")
    strangers = Strangers()
    server = serving.create_server(args, [(admin.PATH, admin_tokens)], strangers)
    verify_pb2_grpc.add_VerifyServiceServicer_to_server(servicer, server)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(
        admin.AdminServicer(step_loop.inbox, step_loop.drafters, has_token=admin_tokens is not None), server
    )
    health = rpc.add_health_and_reflection(server, SERVICES)
    addresses = serving.listen(server, args, *_addresses(args))
    registry = make_registry(step_loop, servicer.totals, servicer.model_name)
    registry.register(strangers.families)
    metrics = serve_metrics(registry, args.metrics_host, args.metrics_port)
    progress = {"engine": step_loop.counters.progress, "event loop": beats(loop)}
    async with strangers.watched(addresses), metrics as metrics_address:
        await server.start()
        with watching(args.watchdog_timeout, progress):
            async with _engine_thread(step_loop, loaded.runner.device, servicer.calls, stop) as failed:
                rpc.set_serving(health, SERVICES, True)
                announce(f"verify serves {servicer.model_name} at {' and '.join(addresses)}")
                if metrics_address is not None:
                    announce(f"verify tells metrics at {metrics_address}")
                if on_ready is not None:
                    on_ready(servicer)
                await stop.asked.wait()
                rpc.set_serving(health, SERVICES, False)
                await _drain(servicer.calls, stop, 0.0 if failed else args.shutdown_grace_s)
        servicer.end_streams()
        await server.stop(grace=1.0)
        servicer.calls.close()
    if tracing is not None:
        await tracing.close(stop.hurry)
    return 1 if failed else 0


async def _drain(calls: Calls, stop: Stopping, grace_s: float) -> None:
    """Takes no more calls, and waits for those that run."""
    calls.draining = True
    await first_of(calls.idle.wait(), stop.hurry.wait(), timeout_s=grace_s)


def build_step_loop(
    args: VerifyArgs, loaded: LoadedModel, inbox: Inbox, deliver: Callable[[Responses], object], *,
    lending: Lending | None = None, sampler: Sampler | None = None,
) -> StepLoop:  # fmt: skip
    """The engine's loop over a loaded model. lending: see StepLoop."""
    runner = loaded.runner
    page_size = args.page_size
    pool = PagePool(loaded.sizes.total_tokens // page_size, page_size)
    cache = None if args.disable_radix_cache else RadixCache(pool)
    scheduler = Scheduler(
        SessionPages(pool, runner.slot_table, cache=cache, move=runner.pool.move),
        max_running=args.max_running_requests,
        max_queued=args.max_queued_requests,
        chunk=loaded.sizes.chunk,
        longest_prefix_first=args.schedule_policy == "lpm",
    )
    drafters = Drafters(
        max_kept=args.max_proposals_per_session,
        max_assumed=args.max_assumed_tokens,
        outbox_bytes=outbox_bytes(args, row_bytes(runner.features)),
    )
    return StepLoop(
        runner,
        scheduler,
        drafters,
        costs=loaded.costs,
        inbox=inbox,
        deliver=deliver,
        max_verify_nodes=args.max_verify_nodes,
        max_draft_wait_ms=args.max_draft_wait_ms,
        brake=not args.disable_speculation_brake,
        greedy_for_ngram=env.ngram_force_greedy_verify(),
        decode_log_interval=args.decode_log_interval,
        clerk=thread_pool(1, "clerk", loaded.placement.roam),
        lending=lending,
        placement=loaded.placement,
        sampler=sampler or Sampler(),
    )


def build_service(
    args: VerifyArgs, loaded: LoadedModel, *, inbox: Inbox | None = None, lent_ms: float = 0.0,
    tracing: Tracing | None = None,
) -> tuple[StepLoop, VerifyServicer]:  # fmt: skip
    """The engine's loop over a loaded model and the rpc handlers of this event loop, each with the other.

    lent_ms: how long a step may take that the event loop runs itself; 0: none does.
    """
    loop = asyncio.get_running_loop()
    step_loop = build_step_loop(
        args, loaded, inbox or Inbox(), lambda batch: loop.call_soon_threadsafe(servicer.calls.deliver, batch),
        lending=Lending(lent_ms, loop.call_later) if lent_ms else None,
    )  # fmt: skip
    servicer = _build_servicer(args, loaded, step_loop, tracing)
    return step_loop, servicer


def _build_servicer(
    args: VerifyArgs, loaded: LoadedModel, step_loop: StepLoop, tracing: Tracing | None
) -> VerifyServicer:  # fmt: skip
    runner, sizes = loaded.runner, loaded.sizes
    config = runner.config
    model = common_pb2.ModelInfo(
        model_path=str(runner.model_path),
        architecture=config.architecture,
        vocab_size=config.vocab_size,
        vocab_fingerprint=loaded.fingerprint,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        context_length=sizes.context_length,
        dtype=str(runner.dtype).removeprefix("torch."),
        quantization=args.quantization,
        numerics_id=runner.numerics_id,
        eos_token_ids=config.eos_token_ids,
    )
    features = feature_layout(FeatureSpec.parse(args.features), runner.features)
    feature_bytes = row_bytes(runner.features)
    target = Target(new_boot_id(), model, features, feature_bytes, outbox_bytes(args, feature_bytes))
    thresholds = args.speculative_accept_threshold_single, args.speculative_accept_threshold_acc
    bounds = RequestBounds(sizes.context_length, args.most_choices, args.max_verify_nodes, thresholds)
    compiler = GrammarCompiler(
        runner.model_path, vocab_size=config.vocab_size, eos_token_ids=config.eos_token_ids,
        on_thread=loaded.placement.roam,
    )  # fmt: skip
    return VerifyServicer(
        args, config, target, SessionFactory(config, bounds, compiler), step_loop, step_loop.inbox,
        CallTotals(grammars=compiler.totals), tracing,
        busy_poll=is_wanted(args.busy_poll, on_device=runner.device.type != "cpu"),
    )  # fmt: skip


def _addresses(args: VerifyArgs) -> list[str]:
    return [address for address in (args.listen, args.grpc_address) if address]


@asynccontextmanager
async def _engine_thread(
    step_loop: StepLoop, device: torch.device, calls: Calls, stop: Stopping
) -> AsyncIterator[list[BaseException]]:
    """Runs the engine until the block ends, and asks to stop where it ends before; what it failed of is in the list."""
    failed: list[BaseException] = []
    ended = asyncio.Event()

    def has_ended() -> None:
        ended.set()
        stop.asked.set()

    on_end = partial(asyncio.get_running_loop().call_soon_threadsafe, has_ended)
    thread = threading.Thread(target=_run, args=(step_loop, device, failed, on_end))
    thread.start()
    try:
        yield failed
    finally:  # whatever happens: a process waits for its threads
        calls.stopped = True
        step_loop.inbox.put(Stop(Unavailable("this server is shutting down")))
        await ended.wait()
        thread.join()


def _run(
    step_loop: StepLoop, device: torch.device, failed: list[BaseException], on_end: Callable[[], object]
) -> None:  # fmt: skip
    try:
        take_device(device)
        step_loop.run()
    except Exception as error:
        failed.append(error)
    finally:
        on_end()
