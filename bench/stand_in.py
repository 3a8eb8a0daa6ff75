"""A verify service without a model, so that what is before it can be measured: a step is a pause of a few milliseconds.

python -m bench.stand_in --listen unix:/tmp/verify.sock --folder MODEL_FOLDER --step 4
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

from bench._flags import parser_of
from bench._main import as_command, told_to_end
from outrider.errors import Unimplemented
from outrider.rpc import bind, create_server
from outrider.telemetry import announce
from outrider.v1 import common_pb2, verify_pb2, verify_pb2_grpc
from outrider.wire import WIRE_VERSION

TOKEN = 1000  # what is said, again and again


class StandIn(verify_pb2_grpc.VerifyServiceServicer):
    """Answers every request with `max_tokens` tokens, `step` of them in a response."""

    def __init__(self, folder: str, vocab_size: int, step: int, step_ms: float = 0.0) -> None:
        """A step takes `step_ms` for all calls together; 0: as long as writing it."""
        self._folder = folder
        self._vocab_size = vocab_size
        self._step = step
        self._step_s = step_ms / 1000

    async def GetServerInfo(self, request: Any, context: Any) -> verify_pb2.VerifyServiceGetServerInfoResponse:
        """Tells no limits that matter."""
        return verify_pb2.VerifyServiceGetServerInfoResponse(
            version="0", wire_version=WIRE_VERSION, boot_id="stand-in",
            model=common_pb2.ModelInfo(
                model_path=self._folder, vocab_size=self._vocab_size, context_length=2**20, numerics_id="stand-in"
            ),
            limits=verify_pb2.RequestLimits(
                context_length=2**20, max_running_requests=4096, max_queued_requests=4096, max_choices=1
            ),
        )  # fmt: skip

    async def Speculate(self, request_iterator: Any, context: Any) -> AsyncIterator[verify_pb2.SpeculateResponse]:
        """Takes no drafters."""
        raise Unimplemented("a stand-in takes no drafters")
        yield

    async def StreamFeatures(self, request: Any, context: Any) -> AsyncIterator[verify_pb2.StreamFeaturesResponse]:
        """Keeps no features."""
        raise Unimplemented("a stand-in keeps no features")
        yield

    async def FlushCache(self, request: Any, context: Any) -> verify_pb2.FlushCacheResponse:
        """Has no cache."""
        return verify_pb2.FlushCacheResponse()

    async def Generate(
        self, request: verify_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[verify_pb2.GenerateResponse]:
        """The first token alone, as from a prefill."""
        for response in self._responses(request):
            await asyncio.sleep(self._step_s)
            yield response

    async def GenerateMany(
        self, request_iterator: AsyncIterator[verify_pb2.GenerateManyRequest], context: Any
    ) -> AsyncIterator[verify_pb2.GenerateManyResponse]:
        """Sends what a step says to all calls in one message, as the service itself does."""
        calls: dict[int, Iterator[verify_pb2.GenerateResponse]] = {}
        reader = asyncio.create_task(self._read(request_iterator, calls))
        try:
            while not reader.done():
                await asyncio.sleep(self._step_s if calls else 0.001)
                frame = verify_pb2.GenerateManyResponse()
                for number, responses in list(calls.items()):
                    output = frame.outputs.add(call=number, response=next(responses))
                    if output.response.HasField("finish"):
                        output.end.SetInParent()
                        del calls[number]
                if frame.outputs:
                    yield frame
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(self, requests: Any, calls: dict[int, Iterator[verify_pb2.GenerateResponse]]) -> None:
        async for request in requests:
            calls.update({begin.call: self._responses(begin.request) for begin in request.begin})
            for number in request.cancel:
                calls.pop(number, None)

    def _responses(self, request: verify_pb2.GenerateRequest) -> Iterator[verify_pb2.GenerateResponse]:
        left = request.sampling.max_tokens
        start: verify_pb2.GenerateStart | None = verify_pb2.GenerateStart(seed=request.sampling.seed)
        size = 1
        while left:
            size = min(size, left)
            left -= size
            yield verify_pb2.GenerateResponse(
                tokens=[TOKEN] * size, num_accepted=size - 1, num_drafted=None if start else 4, start=start,
                finish=None if left else verify_pb2.GenerateFinish(reason=verify_pb2.FINISH_REASON_LENGTH),
            )  # fmt: skip
            start, size = None, self._step


async def serve(listen: str, servicer: StandIn) -> None:
    """Serves until SIGTERM."""
    server = create_server()
    verify_pb2_grpc.add_VerifyServiceServicer_to_server(servicer, server)
    bind(server, listen)
    await server.start()
    told = told_to_end()
    announce("ready")
    await told.wait()
    await server.stop(None)


def main(words: list[str] | None = None) -> int:
    """Serves."""
    parser = parser_of("stand_in", __doc__)
    parser.add_argument("--listen", required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--vocab-size", type=int, default=49152)
    parser.add_argument("--step", type=int, default=1, help="tokens that a step brings a call")
    parser.add_argument("--step-ms", type=float, default=0.0, help="time of a step")
    args = parser.parse_args(words)
    asyncio.run(serve(args.listen, StandIn(args.folder, args.vocab_size, args.step, args.step_ms)))
    return 0


if __name__ == "__main__":
    raise SystemExit(as_command("stand_in"))
