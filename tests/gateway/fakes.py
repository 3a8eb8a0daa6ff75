"""A verify service that says what a test tells it to, over a real gRPC socket, and a gateway on a real port."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
from starlette.applications import Starlette

from gateway.app import create_app, listen, uvicorn_config
from gateway.probing import ProbeTimes
from gateway.route import RetryPolicy
from gateway.service import Gateway
from gateway.tls_listener import Server
from outrider.args import GatewayArgs
from outrider.errors import OutriderError, Unavailable, Unimplemented
from outrider.rpc import bind, create_server
from outrider.text_files import vocab_fingerprint
from outrider.v1 import common_pb2, verify_pb2, verify_pb2_grpc
from outrider.wire import WIRE_VERSION, unpack_ids
from tests.gateway.multiplexed import multiplexed

ResultT = TypeVar("ResultT")

FAST_PROBE = ProbeTimes(interval_s=0.05, timeout_s=60.0, first_retry_s=0.01, max_retry_s=0.05, resolve_interval_s=0.05)
FAST_RETRY = RetryPolicy(max_failures=4, patience_s=10.0, first_pause_s=0.001, max_pause_s=0.01)
STEP = 3  # tokens that a step commits: two drafts and the target's own


@dataclass
class FakeVerify(verify_pb2_grpc.VerifyServiceServicer):
    """Says `say(request, choice)`: a choice's whole output, of which a resumed call gets the rest.

    The first token comes alone, as from a prefill; then STEP a response, all but the last of them "accepted".
    """

    folder: Path
    vocab_size: int
    eos: int = 2
    say: Callable[[verify_pb2.GenerateRequest, int], Sequence[int]] = lambda request, choice: [5, 6, 7]
    boot_id: str = "boot"
    numerics_id: str = "numerics"
    dtype: str = "float32"
    fingerprint: str = ""  # that of the folder's vocabulary
    context_length: int = 512
    max_choices: int = 8
    max_running: int = 8
    max_queued: int = 64
    max_total_tokens: int = 4096
    draining: bool = False
    running: int = 0  # sessions that it says it has
    cached_tokens: int = 0
    refuse: OutriderError | None = None  # what every Generate gets
    break_after: list[int] = field(default_factory=list)  # of the next calls: responses before each breaks
    break_with: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE
    hold_after: int | None = None  # responses after which a call waits for `release`
    requests: list[verify_pb2.GenerateRequest] = field(default_factory=list)
    cancelled: int = 0
    flushed: int = 0
    active: int = 0
    responses_sent: int = 0
    knows_many: bool = True
    streams: int = 0  # of GenerateMany
    entries: list[int] = field(default_factory=list)  # of each message on these
    is_late: bool = False  # never answers to GetServerInfo and FlushCache
    is_broken: bool = False  # nor does it then; as if the connection were lost
    unbounded: bool = False  # says all of it, whatever was asked for
    release: asyncio.Event = field(default_factory=asyncio.Event)
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    holding: asyncio.Event = field(default_factory=asyncio.Event)

    def reset(self) -> None:
        """Forgets faults and requests; what is said stays."""
        self.refuse, self.hold_after, self.cached_tokens, self.cancelled = None, None, 0, 0
        self.break_after, self.requests = [], []
        self.release, self.holding = asyncio.Event(), asyncio.Event()

    async def _be_late(self) -> None:
        if self.is_late:
            self.holding.set()
            await asyncio.Event().wait()

    def _of_folder(self) -> str:
        self.fingerprint = vocab_fingerprint(self.folder)
        return self.fingerprint

    async def GetServerInfo(self, request: Any, context: Any) -> verify_pb2.VerifyServiceGetServerInfoResponse:
        """The test's limits."""
        await self._be_late()
        if self.is_broken:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        return verify_pb2.VerifyServiceGetServerInfoResponse(
            version="0", wire_version=WIRE_VERSION, boot_id=self.boot_id,
            model=common_pb2.ModelInfo(
                model_path=str(self.folder), architecture="Fake", vocab_size=self.vocab_size,
                vocab_fingerprint=self.fingerprint or self._of_folder(), context_length=self.context_length,
                dtype=self.dtype, numerics_id=self.numerics_id, eos_token_ids=[self.eos],
            ),
            limits=verify_pb2.RequestLimits(
                context_length=self.context_length, max_running_requests=self.max_running,
                max_queued_requests=self.max_queued, max_choices=self.max_choices,
                max_total_tokens=self.max_total_tokens,
            ),
            state=verify_pb2.EngineState(
                draining=self.draining, running_requests=self.running, queued_requests=2, total_pages=8, free_pages=6,
                generation_tokens_per_s=50.0,
            ),
            speculation=common_pb2.SpeculationStats(
                verify_steps=4, committed_tokens=10, draft_tokens=12, accepted_tokens=6
            ),
            arguments={"max-running-requests": str(self.max_running)},
        )  # fmt: skip

    async def Generate(
        self, request: verify_pb2.GenerateRequest, context: Any
    ) -> AsyncGenerator[verify_pb2.GenerateResponse]:
        """The script, with the faults that the test asks for."""
        self.requests.append(request)
        if self.refuse is not None:
            raise self.refuse
        breaks_after = self.break_after.pop(0) if self.break_after else None
        self.active += 1
        self.idle.clear()
        sent = 0
        try:
            async for response in self._responses(request):
                if sent == breaks_after:
                    await context.abort(self.break_with, "this replica goes away")
                if sent == self.hold_after:
                    self.holding.set()
                    await self.release.wait()
                yield response
                sent += 1
                self.responses_sent += 1
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise
        finally:
            self.active -= 1
            if not self.active:
                self.idle.set()

    async def GenerateMany(self, request_iterator: Any, context: Any) -> AsyncGenerator[Any]:
        """Calls of Generate on one stream, unless it is of a release that had none."""
        if not self.knows_many:
            raise Unimplemented("Method not found!")
        self.streams += 1

        async def counted() -> AsyncGenerator[verify_pb2.GenerateManyRequest]:
            async for message in request_iterator:
                self.entries.append(len(message.begin) + len(message.cancel))
                yield message

        async with contextlib.aclosing(multiplexed(self.Generate, counted())) as frames:
            async for frame in frames:
                yield frame

    async def FlushCache(self, request: Any, context: Any) -> verify_pb2.FlushCacheResponse:
        """Counts how often."""
        await self._be_late()
        self.flushed += 1
        return verify_pb2.FlushCacheResponse(freed_pages=7)

    async def Speculate(self, request_iterator: Any, context: Any) -> AsyncGenerator[Any]:
        """Takes no drafters."""
        raise Unimplemented("the fake takes no drafters")
        yield

    async def StreamFeatures(self, request: Any, context: Any) -> AsyncGenerator[Any]:
        """Keeps no features."""
        raise Unimplemented("the fake keeps no features")
        yield

    async def _responses(self, request: verify_pb2.GenerateRequest) -> AsyncIterator[verify_pb2.GenerateResponse]:
        outputs = [self._output(request, request.first_choice_index + i) for i in range(request.num_choices or 1)]
        scripts = [list(self._choice(request, *output)) for output in outputs]
        for index in range(max(map(len, scripts))):
            for script in scripts:
                if index < len(script):
                    yield script[index]

    def _output(self, request: verify_pb2.GenerateRequest, choice: int) -> tuple[int, list[int], bool]:
        bounded = request.sampling.HasField("max_tokens") and not self.unbounded
        limit = request.sampling.max_tokens if bounded else 10**6
        limit = min(limit, self.context_length - len(request.prompt_tokens) // 4)
        tokens: list[int] = []
        stop_ids = {*request.sampling.stop_token_ids, *([] if request.sampling.ignore_eos else [self.eos])}
        for token in self.say(request, choice):
            tokens.append(token)
            if token in stop_ids:
                return choice, tokens, True
            if len(tokens) == limit:
                break
        return choice, tokens, False

    def _choice(
        self, request: verify_pb2.GenerateRequest, choice: int, tokens: list[int], stopped: bool
    ) -> Generator[verify_pb2.GenerateResponse]:
        resumed = unpack_ids(request.resumed_tokens, field="resumed_tokens").tolist()
        assert tokens[: len(resumed)] == resumed, "what was given before is not what comes now"
        rest = tokens[len(resumed) :]
        steps = [rest[:1], *(rest[at : at + STEP] for at in range(1, len(rest), STEP))]
        start = verify_pb2.GenerateStart(
            seed=request.sampling.seed, boot_id=self.boot_id, numerics_id=self.numerics_id,
            cached_tokens=self.cached_tokens,
        )  # fmt: skip
        for index, step in enumerate(steps):
            yield verify_pb2.GenerateResponse(
                choice_index=choice, tokens=step, num_accepted=max(len(step) - 1, 0),
                num_drafted=4 if index or resumed else None,
                algorithm=common_pb2.ALGORITHM_NGRAM if index or resumed else None,
                tree=self._tree(step) if request.include_trees and (index or resumed) else None,
                logprobs=[self._logprob(request, token) for token in step] if request.logprobs else (),
                prompt_logprobs=self._prompt_logprobs(request) if index == 0 and not resumed else (),
                start=start if index == 0 else None,
                finish=self._finish(request, tokens, steps, stopped) if index == len(steps) - 1 else None,
            )  # fmt: skip

    def _logprob(self, request: verify_pb2.GenerateRequest, token: int) -> verify_pb2.TokenLogprob:
        """ln p of a token is minus its id over 1000; the alternatives follow it by id."""
        top = [
            verify_pb2.TopLogprob(token=token + place, logprob=-(token + place) / 1000)
            for place in range(request.top_logprobs)
        ]
        return verify_pb2.TokenLogprob(token=token, logprob=-token / 1000, top=top)

    def _prompt_logprobs(self, request: verify_pb2.GenerateRequest) -> list[verify_pb2.TokenLogprob]:
        if not request.prompt_logprobs:
            return []
        first, *rest = unpack_ids(request.prompt_tokens, field="prompt_tokens").tolist()
        return [verify_pb2.TokenLogprob(token=first), *(self._logprob(request, token) for token in rest)]

    @staticmethod
    def _tree(step: list[int]) -> verify_pb2.VerifiedTree:
        """What was accepted, in a chain, and one that was not below the root."""
        chain = [*step[:-1], 9]
        return verify_pb2.VerifiedTree(
            tokens=chain, parents=[*range(-1, len(chain) - 2), -1], accepted=[True] * (len(chain) - 1) + [False],
            probabilities=[0.5] * len(chain), algorithm=common_pb2.ALGORITHM_NGRAM, draft_us=5, verify_us=7,
        )  # fmt: skip

    def _finish(
        self, request: verify_pb2.GenerateRequest, tokens: list[int], steps: list[list[int]], stopped: bool
    ) -> verify_pb2.GenerateFinish:
        accepted = [len(step) - 1 for step in steps[1:]]
        stats = common_pb2.SpeculationStats(
            verify_steps=len(accepted), draft_tokens=4 * len(accepted), accepted_tokens=sum(accepted),
            committed_tokens=sum(map(len, steps[1:])),
            accepted_histogram=[accepted.count(count) for count in range(STEP)],
            accepted_prediction_tokens=2, rejected_prediction_tokens=1,
        )  # fmt: skip
        reason = verify_pb2.FINISH_REASON_STOP if stopped else verify_pb2.FINISH_REASON_LENGTH
        return verify_pb2.GenerateFinish(
            reason=reason, stop_token_id=tokens[-1] if stopped else None, speculation=stats,
            prompt_tokens=len(request.prompt_tokens) // 4, completion_tokens=len(tokens),
        )  # fmt: skip


@contextlib.asynccontextmanager
async def serving(verify: FakeVerify, address: str) -> AsyncGenerator[str]:
    """The fake on a gRPC server; gives the address that it listens on."""
    server = create_server()
    verify_pb2_grpc.add_VerifyServiceServicer_to_server(verify, server)
    address = bind(server, address)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)


class LoopThread:
    """An event loop in a thread of its own, so that blocking clients can talk to what runs in it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Any) -> Any:
        """The result of a coroutine that runs in the loop."""
        future: Future[Any] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result(60)

    def close(self) -> None:
        """Ends the loop."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@dataclass
class RunningGateway:
    """A gateway on a port, its fakes, and the loop that they run in."""

    loop: LoopThread
    url: str
    port: int
    app: Starlette
    verify: list[FakeVerify]

    def wait(self, event: asyncio.Event) -> None:
        """Returns when something has happened in the loop."""
        self.loop.run(asyncio.wait_for(event.wait(), 30))

    def set(self, event: asyncio.Event) -> None:
        """Lets something happen in the loop."""

        async def do() -> None:
            event.set()

        self.loop.run(do())


@contextlib.contextmanager
def running(
    args: dict[str, Any], make_fakes: Callable[[], list[FakeVerify]], sockets: Path, *, wait_ready: bool = True,
    retry: RetryPolicy = FAST_RETRY,
) -> Generator[RunningGateway]:  # fmt: skip
    """A gateway in front of fakes, all in one loop of another thread."""
    loop = LoopThread()
    stack = contextlib.AsyncExitStack()

    async def start() -> RunningGateway:
        fakes = make_fakes()
        addresses = []
        for index, fake in enumerate(fakes):
            addresses.append(await stack.enter_async_context(serving(fake, f"unix:{sockets}/verify{index}.sock")))
        settings = GatewayArgs(**{"port": 0, "shutdown_grace_s": 0.0, "verify_address": tuple(addresses), **args})
        app = create_app(settings, retry=retry, probe=FAST_PROBE)
        listener, url = listen(settings)
        config = uvicorn_config(app, settings)
        config.loop = "asyncio"
        server = Server(config)
        task = asyncio.create_task(server.serve(sockets=[listener]))

        async def stop() -> None:
            server.should_exit = True
            await task

        stack.push_async_callback(stop)
        while not server.started or (wait_ready and not is_ready(app.state.gateway)):
            assert not task.done()
            await asyncio.sleep(0.005)
        return RunningGateway(loop, url, listener.getsockname()[1], app, fakes)

    try:
        yield loop.run(start())
    finally:
        loop.run(stack.aclose())
        loop.close()


def is_ready(gateway: Gateway) -> bool:
    """Whether a gateway takes requests."""
    try:
        gateway.ready()
    except Unavailable:
        return False
    return True
