"""One server under several loads in turn: what `bench serve` does once and `bench peers` with each system."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from bench._accept_length import accept_length, read_counters
from bench._figures import Figures, figures
from bench._load import Load, Run, run
from bench._prompts import Deck, Prompt
from bench._stream import Asked, ask

WARM_UP = Prompt("warm-up", "warm-up", ({"role": "user", "content": "Say hello."},))
WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Plan:
    """What is asked of one server: of `prompts`, `num_prompts` under each load."""

    prompts: Sequence[Prompt]
    loads: Sequence[Load]
    asked: Asked
    num_prompts: int | None = None
    num_warm_up: int = 2
    seed: int = 0

    def count(self, load: Load) -> int:
        """Requests under one load: where not said, eight, and at least two for each stream."""
        return self.num_prompts or max(8, 2 * (load.concurrency or 1))


async def drive(client: httpx.AsyncClient, plan: Plan) -> list[tuple[Figures, Run]]:
    """Warms the server up, then puts it under each load; no prompt is asked twice while there are others.

    Raises ServerRefused or httpx.HTTPError as soon as one request fails.
    """
    for _ in range(plan.num_warm_up):
        await ask(client, WARM_UP, Asked(plan.asked.model, WARM_UP_TOKENS, extra=plan.asked.extra))
    deck = Deck(plan.prompts)
    results: list[tuple[Figures, Run]] = []
    for load in plan.loads:
        before = await read_counters(client)
        done = await run(client, deck.deal(plan.count(load)), plan.asked, load, plan.seed)
        results.append((figures(done, server_accept_length=await accept_length(client, before)), done))
    return results
