"""The verify service as it is, on a socket, over a fake runner."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import grpc.aio
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from engine.runner import ModelRunner
from outrider import rpc
from outrider.args import VerifyArgs
from outrider.cost_table import CostTable
from outrider.errors import OutriderError, Unavailable
from outrider.health_service import Health
from outrider.v1 import common_pb2, verify_pb2, verify_pb2_grpc
from tests.drafter_view import Policy
from tests.fake_drafters import FakeDrafter, silent
from tests.fakes import FakeRunner, ToyModel
from tests.verify_service.grammars import EOS, make_tokenizer
from verify_service.app import SERVICE, build_service
from verify_service.commands import Command, DrafterJoined, Inbox, Stop
from verify_service.drafter import Drafter
from verify_service.grammar_compiler import GrammarCompiler
from verify_service.loading import LoadedModel
from verify_service.service import VerifyServicer
from verify_service.sizing import Sizes
from verify_service.step_loop import StepLoop

NARROW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024), ("grpc.use_local_subchannel_pool", 1)]
FINGERPRINT = "toy-fingerprint"


class WatchedInbox(Inbox):
    """An inbox that tells the event loop when the engine has nothing to do, and what was put in."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._loop = loop
        self._changed = asyncio.Condition()
        self._num_put = self._num_taken = 0
        self._idle_at = -1
        self.kinds: list[type[Command]] = []

    def put(self, command: Command, *, wake: bool = True) -> None:
        self._num_put += 1
        self.kinds.append(type(command))
        super().put(command, wake=wake)
        self._loop.call_soon_threadsafe(self.notify)

    def wait(self, until_ns: int | None) -> None:
        if until_ns is None:
            self._idle_at = self._num_taken
            self._loop.call_soon_threadsafe(self.notify)
        super().wait(until_ns)

    def take(self) -> list[Command]:
        commands = super().take()
        self._num_taken += len(commands)
        return commands

    async def idle(self) -> None:
        """Waits until the engine has done all that it was asked and has nothing left to run."""
        await self.until(lambda: self._idle_at == self._num_put)

    async def until(self, done: Callable[[], object]) -> None:
        """Waits for `done()`, looked at whenever something is put in or the engine has nothing to do."""
        async with self._changed:
            await self._changed.wait_for(done)

    def notify(self) -> None:
        """Has everybody who waits look again."""
        task = self._loop.create_task(self._notify_all())
        _TASKS.add(task)
        task.add_done_callback(_TASKS.discard)

    async def _notify_all(self) -> None:
        async with self._changed:
            self._changed.notify_all()


_TASKS: set[asyncio.Task[None]] = set()


class Gate:
    """Stops the engine inside its steps. `entered` is set when one waits."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._permits = threading.Semaphore(0)
        self._passing: int | None = None  # steps that need no permit yet; None: all
        self.entered = asyncio.Event()

    def __call__(self) -> None:
        if self._passing is None:
            return
        if self._passing > 0:
            self._passing -= 1
            return
        self._loop.call_soon_threadsafe(self.entered.set)
        self._permits.acquire()

    @property
    def is_closed(self) -> bool:
        """Whether steps are stopped, now or soon."""
        return self._passing is not None

    def close(self, after: int = 0) -> None:
        """Stops every step from now on, after so many more."""
        self._permits = threading.Semaphore(0)  # without what `open` gave
        self._passing = after

    async def at_step(self) -> None:
        """Waits until a step is at the gate."""
        await self.entered.wait()
        self.entered.clear()

    async def pass_steps(self, count: int) -> None:
        """Lets `count` steps through and waits for the one after them."""
        for _ in range(count):
            self._permits.release()
            await self.at_step()

    def open(self) -> None:
        """Lets all steps through from now on."""
        self._passing = None
        self._permits.release(1000)


@dataclass(eq=False)
class Service:
    """A running service and a channel to it."""

    address: str
    args: VerifyArgs
    runner: FakeRunner
    engine: StepLoop
    servicer: VerifyServicer
    inbox: WatchedInbox
    gate: Gate
    health: Health
    channel: grpc.aio.Channel
    stub: verify_pb2_grpc.VerifyServiceAsyncStub
    drafters: list[FakeDrafter] = field(default_factory=list)
    channels: list[grpc.aio.Channel] = field(default_factory=list)  # the drafters' own

    async def narrow_stub(self) -> verify_pb2_grpc.VerifyServiceAsyncStub:
        """A stub of its own, over a connection that holds little."""
        channel, stub = await _connect(self.address, narrow=True)
        self.channels.append(channel)
        return stub

    async def draft(self, policy: Policy = silent, **settings: Any) -> FakeDrafter:
        """Enlists a fake drafter, over a connection of its own; an engine at the gate takes it on in its next step."""
        channel, stub = await _connect(self.address, narrow=settings.pop("narrow", False))
        self.channels.append(channel)
        drafter = FakeDrafter(stub, policy, name=settings.pop("name", f"fake-{len(self.drafters)}"), **settings)
        self.drafters.append(drafter)
        before = self.inbox.kinds.count(DrafterJoined)
        await drafter.start()
        await self.inbox.until(lambda: self.inbox.kinds.count(DrafterJoined) > before)
        if not self.gate.is_closed:
            await self.inbox.until(lambda: self.drafter(drafter) is not None)
        return drafter

    def drafter(self, fake: FakeDrafter) -> Drafter | None:
        """The engine's side of a fake drafter, while it is enlisted."""
        return next((d for d in self.engine.drafters if d.drafter_id == fake.enlist.drafter_id), None)

    async def patient_draft(self, policy: Policy, **settings: Any) -> FakeDrafter:
        """Enlists a drafter whose answers verify waits for, as if it had always been slow and worth it."""
        fake = await self.draft(policy, **settings)
        drafter = self.drafter(fake)
        assert drafter is not None
        drafter.replies.mean_ms = 1e12
        return fake

    async def generate(self, request: verify_pb2.GenerateRequest, **call: Any) -> list[verify_pb2.GenerateResponse]:
        """All responses to a request."""
        return [response async for response in self.stub.Generate(request, **call)]

    @property
    def num_free(self) -> int:
        """Pages that nobody holds, the prefix cache's own among them."""
        return self.engine.scheduler.pages.num_available


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A tokenizer for grammars."""
    return make_tokenizer()


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    """A compiler over a folder with that tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer.save(str(folder / "tokenizer.json"))
    return GrammarCompiler(folder, vocab_size=tokenizer.get_vocab_size(), eos_token_ids=(EOS,))


Serve = Callable[..., Awaitable[Service]]


@pytest_asyncio.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts services; at the test's end all pages must be free again, and the engine must not have failed."""
    async with AsyncExitStack() as stack:

        async def start(model: ToyModel | None = None, **settings: Any) -> Service:
            return await stack.enter_async_context(_service(model or ToyModel(), **settings))

        yield start


@asynccontextmanager
async def _service(
    model: ToyModel,
    *,
    context: int = 256,
    pages: int = 1024,
    feature_width: int = 0,
    eos_token_ids: tuple[int, ...] = (),
    nan_tokens: Iterable[int] = (),
    costs: CostTable | None = None,
    **flags: Any,
) -> AsyncIterator[Service]:
    if feature_width:
        flags["features"] = "last"
    args = VerifyArgs(**{"disable_speculation_brake": True, "max_draft_wait_ms": 10_000.0, **flags})
    loop = asyncio.get_running_loop()
    gate, inbox = Gate(loop), WatchedInbox(loop)
    runner = FakeRunner(
        model, pages, args.max_running_requests, context, feature_width, eos_token_ids, frozenset(nan_tokens), gate
    )
    sizes = Sizes(pages, context, args.chunked_prefill_size or 32)
    loaded = LoadedModel(cast(ModelRunner, runner), sizes, costs if costs is not None else CostTable({}), FINGERPRINT)
    step_loop, servicer = build_service(args, loaded, inbox=inbox)
    server = rpc.create_server()
    verify_pb2_grpc.add_VerifyServiceServicer_to_server(servicer, server)
    health = rpc.add_health_and_reflection(server, [SERVICE])
    with tempfile.TemporaryDirectory() as folder:
        address = rpc.bind(server, f"unix:{folder}/verify")
        await server.start()
        rpc.set_serving(health, [SERVICE], True)
        failed: list[BaseException] = []
        thread = threading.Thread(target=_run, args=(step_loop, failed))
        thread.start()
        channel, stub = await _connect(address)
        service = Service(address, args, runner, step_loop, servicer, inbox, gate, health, channel, stub)
        try:
            yield service
            gate.open()
            for drafter in service.drafters:
                await drafter.close()
            for each in (*service.channels, channel):
                await each.close(None)
            await inbox.idle()
            assert not failed
            assert service.num_free == pages // args.page_size
        finally:
            gate.open()
            inbox.put(Stop(Unavailable("this server is shutting down")))
            await asyncio.to_thread(thread.join)
            await channel.close(None)
            await server.stop(grace=None)


async def _connect(
    address: str, *, narrow: bool = False
) -> tuple[grpc.aio.Channel, verify_pb2_grpc.VerifyServiceAsyncStub]:
    """A channel of its own; `narrow`: one whose buffers stay small, so that its server soon notices a slow reader."""
    channel = grpc.aio.insecure_channel(address, options=NARROW) if narrow else rpc.create_channel(address)
    await channel.channel_ready()
    return channel, cast("verify_pb2_grpc.VerifyServiceAsyncStub", verify_pb2_grpc.VerifyServiceStub(channel))


def _run(step_loop: StepLoop, failed: list[BaseException]) -> None:
    try:
        step_loop.run()
    except BaseException as error:
        failed.append(error)


def tokens_of(responses: list[verify_pb2.GenerateResponse], choice: int = 0) -> list[int]:
    """All tokens of one choice."""
    return [token for response in responses if response.choice_index == choice for token in response.tokens]


async def error_of(call: Awaitable[object]) -> OutriderError:
    """The error that a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return rpc.error_from_rpc(caught.value)


def layout(width: int) -> common_pb2.FeatureLayout:
    """What a drafter that needs the runner's rows asks for."""
    return common_pb2.FeatureLayout(kind=common_pb2.FEATURE_KIND_LAST, width=width, dtype=common_pb2.DTYPE_FLOAT32)
