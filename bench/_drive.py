"""One server under several loads in turn: what `bench serve` does once and `bench peers` with each system."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx

from bench._accept_length import accept_length, read_counters
from bench._figures import Figures, figures
from bench._load import Load, Run, run
from bench._prompts import RANDOM_IDS, Prompt
from bench._stream import Asked, ask

WARM_UP = Prompt("warm-up", "warm-up", ({"role": "user", "content": "Say hello."},))
WARM_UP_IDS = Prompt("warm-up", "warm-up", ids=tuple(RANDOM_IDS[:16]))  # where a chat may be what a server has not
WARM_UP_TOKENS = 16
NUM_PROMPTS_HELP = "requests under each load, at least one a stream; default: 24 or more, by the number of streams"
Result = tuple[Figures, Run]


@dataclass(frozen=True)
class Batch:
    """The requests of one load."""

    load: Load
    prompts: Sequence[Prompt]


@dataclass(frozen=True)
class Plan:
    """What is asked of one server: each batch in turn, after `num_warm_up` short requests."""

    asked: Asked
    batches: Sequence[Batch]
    num_warm_up: int = 2
    seed: int = 0


def num_prompts(load: Load, wanted: int | None) -> int:
    """Requests under one load, at least as many as there are streams. Where nobody says: 24, which is three of each of
    MT-bench's categories, or a few more, so that 1, 8 and 32 streams ask each of its questions once."""
    streams = load.concurrency or 1
    return max(wanted or max(24, min(2 * streams, 32)), streams)


async def drive(
    client: httpx.AsyncClient, plan: Plan, when_done: Callable[[Sequence[Result]], object] = lambda results: None
) -> list[Result]:
    """Warms the server up and puts it under each load. `when_done` gets the results so far, after each.

    Raises ServerRefused or httpx.HTTPError as soon as one request fails.
    """
    warm_up = WARM_UP_IDS if plan.batches[0].prompts[0].ids else WARM_UP
    for _ in range(plan.num_warm_up):
        await ask(client, warm_up, Asked(plan.asked.model, WARM_UP_TOKENS, extra=plan.asked.extra))
    results: list[Result] = []
    for batch in plan.batches:
        before = await read_counters(client)
        done = await run(client, batch.prompts, plan.asked, batch.load, plan.seed)
        results.append((figures(done, server_accept_length=await accept_length(client, before)), done))
        when_done(results)
    return results
