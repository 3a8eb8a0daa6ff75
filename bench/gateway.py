"""CPU time that the gateway takes for a token and for a request, beside reading the bare gRPC stream.

    python -m bench.gateway --output gateway.json

A verify service without a model does a step for all its calls every few milliseconds. Measured is the CPU time of the
gateway's process, so that neither the speaker nor the clients count; for the bare stream, that of a process that reads
and drops it. The cost of a token is what long answers take beyond short ones, that of a request what remains.

With --vllm-python the same requests go to vLLM, its engine in a process of its own: counted is its HTTP front alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import grpc.aio
import httpx

from bench._flags import not_below_zero, output_file, parser_of, positive
from bench._gguf import ensure_gguf
from bench._load import model_of, open_client
from bench._main import as_command
from bench._output import write_json
from bench._process import process
from bench._server import Served, free_port, serving
from bench._systems import SYSTEMS, Setup
from bench.stand_in import TOKEN
from engine.model_folder import resolve_model
from outrider.errors import StartupError
from outrider.rpc import create_channel
from outrider.v1 import common_pb2, verify_pb2, verify_pb2_grpc
from outrider.wire import pack_ids

SHORT = 1
_STARTUP_S = 60.0
_POLL_S = 0.1
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Cost:
    """CPU microseconds of one way of reading, at `step` tokens in a response and `streams` at once."""

    way: str
    step: int
    streams: int
    token_us: float
    request_us: float


Ask = Callable[[int], Awaitable[None]]


async def measure(way: str, ask: Ask, cpu_s: Callable[[], float], args: argparse.Namespace, step: int) -> Cost:
    """Short answers, then long ones, `streams` at a time."""

    async def run(tokens: int, num_requests: int) -> float:
        limit = asyncio.Semaphore(args.streams)

        async def one() -> None:
            async with limit:
                await ask(tokens)

        began = cpu_s()
        await asyncio.gather(*(one() for _ in range(num_requests)))
        return (cpu_s() - began) / num_requests

    await run(args.tokens, args.streams)
    short_s = await run(SHORT, args.short_requests)
    long_s = await run(args.tokens, args.requests)
    token_s = (long_s - short_s) / (args.tokens - SHORT)
    return Cost(way, step, args.streams, token_s * 1e6, (short_s - token_s * SHORT) * 1e6)


def cpu_of(pid: int) -> float:
    """CPU seconds, user and system, of a process so far; its clock ticks in hundredths."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def over_http(client: httpx.AsyncClient, model: str) -> Ask:
    """Streams a chat and drops it."""

    async def ask(tokens: int) -> None:
        body = {
            "model": model, "messages": [{"role": "user", "content": "Hello."}], "max_tokens": tokens, "stream": True,
            "temperature": 0, "ignore_eos": True,
        }  # fmt: skip
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            async for _ in response.aiter_raw():
                pass

    return ask


def over_grpc(channel: grpc.aio.Channel) -> Ask:
    """Reads Generate and drops it."""
    stub: verify_pb2_grpc.VerifyServiceAsyncStub = verify_pb2_grpc.VerifyServiceStub(channel)

    async def ask(tokens: int) -> None:
        request = verify_pb2.GenerateRequest(
            prompt_tokens=pack_ids([TOKEN] * 16), sampling=common_pb2.SamplingParams(max_tokens=tokens, seed=1)
        )
        async for _ in stub.Generate(request):
            pass

    return ask


async def until_healthy(client: httpx.AsyncClient) -> None:
    """Returns once the gateway, which listens, serves. StartupError where it does not."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_STARTUP_S):
            while (await client.get("/health")).status_code != 200:  # noqa: ASYNC110  it tells nobody
                await asyncio.sleep(_POLL_S)
            return
    raise StartupError(f"the gateway has found no verify service in {_STARTUP_S:.0f} s")


async def compare(args: argparse.Namespace, step: int, folder: Path) -> list[Cost]:
    """Measures both ways in one run."""
    with tempfile.TemporaryDirectory() as sockets:
        verify, http = f"unix:{sockets}/verify", f"{sockets}/http"
        speaker = ("bench.stand_in", f"--listen={verify}", f"--folder={folder}", f"--step={step}")
        transport = httpx.AsyncHTTPTransport(uds=http, limits=httpx.Limits(max_connections=None))
        async with (
            process(*speaker, f"--step-ms={args.step_ms}"),
            process("outrider", "gateway", f"--uds={http}", f"--verify-address={verify}") as gateway,
            httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=600) as client,
            create_channel(verify) as channel,
        ):
            await until_healthy(client)
            model = await model_of(client)
            through = await measure("gateway", over_http(client, model), lambda: cpu_of(gateway), args, step)
            bare = await measure("bare gRPC", over_grpc(channel), time.process_time, args, step)
        return [through, bare]


async def measure_vllm(args: argparse.Namespace, model_path: Path, served: Served) -> Cost:
    """vLLM's front: its first process, the engine being another."""
    async with open_client(served.url) as client:
        return await measure("vLLM front", over_http(client, str(model_path)), lambda: cpu_of(served.pid), args, 1)


def beside_vllm(args: argparse.Namespace, model_path: Path) -> Cost:
    """Measures beside vLLM, which is started here."""
    setup = Setup(model_path, ensure_gguf, vllm_python=args.vllm_python, vllm_eager=True)
    port = free_port()
    launch = SYSTEMS["vllm"].launch(setup, port, args.streams)
    apart = replace(launch, environment=launch.environment | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    with tempfile.TemporaryDirectory() as logs, serving(apart, port, Path(logs) / "vllm.log", 600.0) as served:
        return asyncio.run(measure_vllm(args, model_path, served))


def main(words: list[str] | None = None) -> int:
    """Prints the table, and writes it as JSON where asked."""
    parser = parser_of("gateway", __doc__)
    parser.add_argument("--tokens", type=positive, default=1000, help="tokens of a long answer")
    parser.add_argument("--requests", type=positive, default=64, help="long answers")
    parser.add_argument("--short-requests", type=positive, default=512, help="answers of one token")
    parser.add_argument("--streams", type=positive, default=32, help="requests at once")
    parser.add_argument("--steps", type=positive, nargs="+", default=[1, 4], help="tokens in a response")
    parser.add_argument("--step-ms", type=not_below_zero, default=5.0, help="time of a step of the verify service")
    parser.add_argument("--vllm-python", type=Path, help="interpreter of an environment with vLLM")
    parser.add_argument("--output", type=output_file, help="file for the figures, as JSON")
    args = parser.parse_args(words)
    if args.tokens <= SHORT:
        parser.error(f"--tokens is {args.tokens}; a long answer has more than the {SHORT} of a short one")
    os.environ.setdefault("OUTRIDER_LOG_LEVEL", "error")
    folder = resolve_model(None)
    costs = [cost for step in args.steps for cost in asyncio.run(compare(args, step, folder))]
    if args.vllm_python is not None:
        costs.append(beside_vllm(args, folder))
    if args.output is not None:
        write_json(args.output, [asdict(cost) for cost in costs])
    print(f"{'':10} {'tokens/response':>15} {'us/token':>9} {'us/request':>11}")
    for cost in costs:
        print(f"{cost.way:10} {cost.step:15} {cost.token_us:9.1f} {cost.request_us:11.0f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(as_command("gateway"))
