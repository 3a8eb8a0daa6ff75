"""Ways of speculating side by side in one pair of services: the requests differ, the processes are the same.

Each turn runs every way once, `batch` streams at a time, the order turning from one to the next; a ratio is taken
within a turn, so that a machine's slow minute falls on both.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

from bench._load import first_cause
from bench._process import enlisted, process
from bench._prompts import mt_bench
from bench._wire_run import load_average
from outrider import rpc
from outrider.errors import StartupError
from outrider.text_files import load_tokenizer
from outrider.v1 import common_pb2, verify_pb2, verify_pb2_grpc
from outrider.wire import pack_ids

_WARM_TOKENS = 8


@dataclass(frozen=True)
class Way:
    """A name, and the request's `speculative` object."""

    name: str
    params: common_pb2.SpeculativeParams


PLAIN = Way("plain", common_pb2.SpeculativeParams(enabled=False))
PLANNED = Way("planned", common_pb2.SpeculativeParams(enabled=True))


def fixed(num_steps: int, topk: int, num_draft_tokens: int) -> Way:
    """Trees as the request fixes them; verify takes them as they come."""
    params = common_pb2.SpeculativeParams(
        enabled=True, num_steps=num_steps, topk=topk, num_draft_tokens=num_draft_tokens
    )
    return Way(f"{num_steps},{topk},{num_draft_tokens}", params)


@dataclass
class WayFigures:
    """What one way gave at one batch size, turn by turn."""

    tokens_per_s: list[float] = field(default_factory=list)
    accept_length: list[float] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class TurnLoad:
    """What is asked in each turn. beside: how one stream more is asked all the while, which counts in no figure."""

    batches: Sequence[int]
    max_tokens: int
    turns: int
    beside: Way | None = None


def prompts(folder: Path) -> list[bytes]:
    """MT-bench's first questions as tokens of the model in a folder."""
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    texts = [f"Question: {prompt.text}\nAnswer:" for prompt in mt_bench()]
    return [pack_ids(tokenizer.encode(text).ids) for text in texts]


async def measure(
    stub: verify_pb2_grpc.VerifyServiceAsyncStub, asked: Sequence[bytes], ways: Sequence[Way], load: TurnLoad
) -> dict[int, dict[str, WayFigures]]:
    """Measures all ways, by batch size and name. Prompts go round, the same for all ways of a turn."""
    found = {batch: {way.name: WayFigures() for way in ways} for batch in load.batches}
    deck = cycle(asked)
    for turn in range(load.turns):
        for batch in load.batches:
            dealt = [next(deck) for _ in range(batch)]
            await _block(stub, dealt, PLAIN, _WARM_TOKENS)  # their KV is in the prefix cache for all ways alike
            for way in [*ways[turn % len(ways) :], *ways[: turn % len(ways)]]:
                measured = found[batch][way.name]
                async with _one_more(stub, asked, load):
                    seconds, tokens, stats = await _block(stub, dealt, way, load.max_tokens)
                measured.tokens_per_s.append(tokens / seconds)
                steps = sum(one.verify_steps for one in stats)
                measured.accept_length.append(sum(one.committed_tokens for one in stats) / max(1, steps))
                measured.drafted.append(sum(one.draft_tokens for one in stats))
            print(f"turn {turn + 1} of {load.turns}, batch {batch}: {_line(found[batch])}", file=sys.stderr, flush=True)
    return found


def _line(measured: dict[str, WayFigures]) -> str:
    return ", ".join(f"{name} {one.tokens_per_s[-1]:.1f}" for name, one in measured.items())


async def _block(
    stub: verify_pb2_grpc.VerifyServiceAsyncStub, dealt: Sequence[bytes], way: Way, max_tokens: int
) -> tuple[float, int, list[common_pb2.SpeculationStats]]:
    """Seconds, tokens of all answers, and what speculation did for each. StartupError for an answer that fails."""
    began = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_stream(stub, prompt, way, max_tokens)) for prompt in dealt]
    except ExceptionGroup as failed:
        raise first_cause(failed) from failed
    seconds = time.perf_counter() - began
    answers = [task.result() for task in tasks]
    return seconds, sum(tokens for tokens, _ in answers), [stats for _, stats in answers]


@contextlib.asynccontextmanager
async def _one_more(
    stub: verify_pb2_grpc.VerifyServiceAsyncStub, asked: Sequence[bytes], load: TurnLoad
) -> AsyncGenerator[None]:
    """The load's stream beside the others, one answer after the other. StartupError where one fails."""
    way = load.beside
    if way is None:
        yield
        return

    async def answers() -> None:
        for prompt in cycle(asked):
            await _stream(stub, prompt, way, load.max_tokens)

    answering = asyncio.create_task(answers())
    try:
        yield
    finally:
        answering.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await answering


async def _stream(
    stub: verify_pb2_grpc.VerifyServiceAsyncStub, prompt: bytes, way: Way, max_tokens: int
) -> tuple[int, common_pb2.SpeculationStats]:
    request = verify_pb2.GenerateRequest(
        prompt_tokens=prompt, speculative=way.params,
        sampling=common_pb2.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
    )  # fmt: skip
    made, finish = 0, verify_pb2.GenerateFinish()
    try:
        async for response in stub.Generate(request):
            made += len(response.tokens)
            if response.HasField("finish"):
                finish = response.finish
    except rpc.grpc.aio.AioRpcError as error:
        raise StartupError(f"verify ended an answer with {error.code().name}: {error.details()}") from error
    if made < max_tokens:
        raise StartupError(f"verify ended an answer after {made} of {max_tokens} tokens; is its context longer?")
    return made, finish.speculation


async def compare(
    verify: Sequence[str], draft: Sequence[str], address: str, asked: Sequence[bytes], ways: Sequence[Way],
    load: TurnLoad,
) -> dict[str, Any]:  # fmt: skip
    """Starts a verify service at `address` and a draft service, by their words, and sums up what the ways gave."""
    async with process(*verify), process(*draft), rpc.create_channel(address) as channel:
        stub: verify_pb2_grpc.VerifyServiceAsyncStub = verify_pb2_grpc.VerifyServiceStub(channel)
        await enlisted(stub)
        return summary(await measure(stub, asked, ways, load), PLAIN.name)


def summary(found: dict[int, dict[str, WayFigures]], beside: str) -> dict[str, Any]:
    """Medians, and ratios to the way `beside` taken within each turn; PLANNED's to the fixed tree that did best."""
    result: dict[str, Any] = {"load_average": load_average(), "batches": {}}
    for batch, ways in found.items():
        result["batches"][str(batch)] = figures = {
            name: {
                "tokens_per_s": statistics.median(one.tokens_per_s),
                "accept_length": statistics.fmean(one.accept_length),
                "drafted_tokens": sum(one.drafted),
                f"over_{beside}": _spread(_over(one, ways[beside])),
            }
            for name, one in ways.items()
        }
        trees = [one for name, one in ways.items() if name not in (PLAIN.name, PLANNED.name)]
        if trees:
            medians = [statistics.median(_over(ways[PLANNED.name], tree)) for tree in trees]
            figures[PLANNED.name]["over_best_fixed"] = min(medians)
    return result


def _over(one: WayFigures, other: WayFigures) -> list[float]:
    return [a / b for a, b in zip(one.tokens_per_s, other.tokens_per_s, strict=True)]


def _spread(ratios: list[float]) -> dict[str, float]:
    return {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}


def table(result: dict[str, Any], beside: str) -> str:
    """The figures as a Markdown table."""
    lines = [f"{'batch':>5}  {'way':<12} {'tokens/s':>9} {'accept':>7} {'over ' + beside:>11}"]
    for batch, ways in result["batches"].items():
        for name, one in ways.items():
            ratio = one[f"over_{beside}"]["median"]
            lines.append(
                f"{batch:>5}  {name:<12} {one['tokens_per_s']:>9.1f} {one['accept_length']:>7.2f} {ratio:>11.3f}"
            )
    return "\n".join(lines)
