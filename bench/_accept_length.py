"""Accept length of servers whose answers don't carry it: vLLM's from its metrics, SGLang's from its server info."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import httpx

_DRAFTS = "vllm:spec_decode_num_drafts_total"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"


@dataclass(frozen=True)
class Counters:
    """What vLLM has counted since its start."""

    drafts: float = 0.0
    accepted: float = 0.0


async def read_counters(client: httpx.AsyncClient) -> Counters:
    """Zeros from a server without such metrics."""
    response = await client.get("/metrics")
    if response.status_code != 200:
        return Counters()
    return Counters(_sum(response.text, _DRAFTS), _sum(response.text, _ACCEPTED))


async def accept_length(client: httpx.AsyncClient, before: Counters) -> float | None:
    """Tokens a step since `before` (vLLM), or on average since the start (SGLang); None where neither is told."""
    now = await read_counters(client)
    if now.drafts > before.drafts:
        return round(1 + (now.accepted - before.accepted) / (now.drafts - before.drafts), 3)
    response = await client.get("/get_server_info")
    if response.status_code != 200:
        return None
    return _sglang(response.json())


def _sglang(info: Any) -> float | None:
    states = info.get("internal_states") if isinstance(info, dict) else None
    if not isinstance(states, list) or not states or not isinstance(states[0], dict):
        return None
    value = states[0].get("avg_spec_accept_length")
    return round(float(value), 3) if isinstance(value, int | float) and math.isfinite(value) and value > 0 else None


def _sum(text: str, name: str) -> float:
    """The sum of a counter over its labels, in Prometheus' text format."""
    own = (line for line in text.splitlines() if line.startswith((name + "{", name + " ")))
    return sum(float(line.rpartition(" ")[2]) for line in own)
