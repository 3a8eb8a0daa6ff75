"""The two services as they are, over a real stream, in one process: any target, any drafter, flags as users give."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from draft_service.copying import Copier
from draft_service.drafters.base import Drafter
from draft_service.drafters.factory import describe_drafter, make_drafter
from draft_service.drafting import Drafting
from draft_service.link import Identity
from draft_service.overlap import FixedOverlap
from draft_service.planning import FixedPlanner
from draft_service.worker import Worker
from engine.batch import DeviceRows, Segment
from outrider import rpc
from outrider.args import DraftArgs, VerifyArgs
from outrider.errors import Unavailable
from outrider.v1 import common_pb2, verify_pb2, verify_pb2_grpc
from outrider.wire import pack_ids
from tests.polling import until_async
from verify_service.app import build_service
from verify_service.commands import Stop
from verify_service.loading import LoadedModel, load_model
from verify_service.step_loop import StepLoop

TARGET = {"dtype": "float32", "device": "cpu"}


@dataclass(frozen=True)
class Answer:
    """One continuation: its tokens, and how it came about."""

    tokens: list[int]
    cached_tokens: int
    num_drafted: int


@dataclass
class Meter:
    """Calls `before_step` in each step of the engine, and holds it up while `opened` is not set."""

    before_step: Callable[[], object] = bool
    opened: threading.Event = field(default_factory=threading.Event)

    def pass_one(self) -> None:
        """Lets a step pass; called in each, on the thread that runs it."""
        self.before_step()
        self.opened.wait()


@dataclass(eq=False)
class Pair:
    """A running verify service; drafters come and go."""

    address: str
    loaded: LoadedModel
    loop: StepLoop
    meter: Meter
    stub: verify_pb2_grpc.VerifyServiceAsyncStub

    async def answer(
        self, prompt: Sequence[int], max_tokens: int = 24, *, speculate: bool = True, **sampling: Any
    ) -> Answer:
        """One prompt's continuation, greedy unless `sampling` says otherwise; no token ends it."""
        sampling = {"temperature": 0.0, "ignore_eos": True, **sampling}
        request = verify_pb2.GenerateRequest(
            prompt_tokens=pack_ids(prompt),
            sampling=common_pb2.SamplingParams(max_tokens=max_tokens, **sampling),
            speculative=common_pb2.SpeculativeParams(enabled=speculate),
        )
        tokens: list[int] = []
        cached, drafted = 0, 0
        async for response in self.stub.Generate(request):
            if response.HasField("start"):
                cached = response.start.cached_tokens
            tokens += response.tokens
            drafted += response.num_drafted
        return Answer(tokens, cached, drafted)

    async def answers(self, prompts: Sequence[Sequence[int]], *args: Any, **settings: Any) -> list[Answer]:
        """Continuations of prompts that run together."""
        return await asyncio.gather(*(self.answer(prompt, *args, **settings) for prompt in prompts))

    @asynccontextmanager
    async def drafting(
        self, drafter: Drafter, *, early: bool = True, copier: Copier | None = None
    ) -> AsyncIterator[Worker]:
        """A draft service's links, enlisted; drained at the end. Verify waits for its trees whatever they have saved.

        The engine runs from here on, if it was held up.
        """
        executor = None if drafter.inline else ThreadPoolExecutor(1)
        identity = Identity(f"test-{secrets.token_hex(4)}", "host", secrets.token_hex(8))
        drafting = Drafting(drafter, FixedPlanner(FixedOverlap(on=early)), executor=executor, copier=copier)
        worker = Worker([self.address], drafting, identity, max_sessions=64)
        task = asyncio.create_task(worker.run())
        self.meter.opened.set()
        await until_async(
            lambda: len(self.loop.drafters) or any(link.stats.last_error for link in worker.links),
            "the drafter is not enlisted", pause_s=0,
        )  # fmt: skip
        assert not any(link.stats.last_error for link in worker.links)
        for enlisted in self.loop.drafters:
            enlisted.replies.mean_ms = 1e12
        try:
            yield worker
        finally:
            task.cancel()
            await worker.drain(10.0)
            if executor is not None:
                executor.shutdown()
            drafter.close_down()


@asynccontextmanager
async def running(target: Path, features: str = "none", *, lent_ms: float = 0.0, **flags: Any) -> AsyncIterator[Pair]:
    """A verify service over the model in a folder. At the end all pages must be free, and no step may have failed.

    lent_ms: how long a step may take that the event loop runs; none may be held up then.
    """
    flags = {
        "max_total_tokens": 4096,
        "disable_speculation_brake": True,
        "max_draft_wait_ms": 2000.0,
        **TARGET,
        **flags,
    }
    args = VerifyArgs(model_path=str(target), features=features, **flags)
    loaded = load_model(args)
    meter = Meter()
    meter.opened.set()
    forward = loaded.runner.forward

    def metered(segments: Sequence[Segment], rows: DeviceRows | None = None) -> torch.Tensor:
        meter.pass_one()
        return forward(segments, rows)

    loaded.runner.forward = metered
    step_loop, servicer = build_service(args, loaded, lent_ms=lent_ms)
    server = rpc.create_server()
    verify_pb2_grpc.add_VerifyServiceServicer_to_server(servicer, server)
    failed: list[BaseException] = []
    thread = threading.Thread(target=_run, args=(step_loop, failed))
    with tempfile.TemporaryDirectory(prefix="or-") as folder:
        address = rpc.bind(server, f"unix:{folder}/verify")
        await server.start()
        thread.start()
        channel = rpc.create_channel(address)
        stub = cast("verify_pb2_grpc.VerifyServiceAsyncStub", verify_pb2_grpc.VerifyServiceStub(channel))
        try:
            yield Pair(address, loaded, step_loop, meter, stub)
        finally:
            meter.opened.set()
            step_loop.inbox.put(Stop(Unavailable("the test is over")))
            await asyncio.to_thread(thread.join)
            await channel.close(None)
            await server.stop(grace=None)
    assert not failed, failed
    scheduler = step_loop.scheduler
    assert not scheduler.running
    assert not scheduler.waiting
    assert scheduler.pages.num_available == scheduler.pages.pool.num_pages
    scheduler.pages.pool.check()


def drafter_of(target: Path, algorithm: str, **flags: Any) -> Drafter:
    """The drafter that `outrider draft` would make of these flags."""
    return make_drafter(_args(target, algorithm, flags))


def features_of(target: Path, algorithm: str, **flags: Any) -> str:
    """What --features of verify must be for it."""
    return describe_drafter(_args(target, algorithm, flags))["features"]


def _args(target: Path, algorithm: str, flags: dict[str, Any]) -> DraftArgs:
    model = {} if algorithm == "NGRAM" else {"draft_max_total_tokens": 8192, **TARGET}
    return DraftArgs(model_path=str(target), speculative_algorithm=algorithm, **model, **flags)


def _run(step_loop: StepLoop, failed: list[BaseException]) -> None:
    try:
        step_loop.run()
    except BaseException as error:
        failed.append(error)
