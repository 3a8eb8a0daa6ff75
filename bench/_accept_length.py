"""Accept length of servers whose answers don't carry it: vLLM's from its metrics, SGLang's from its server info."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import dataclass

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
        length = 1 + (now.accepted - before.accepted) / (now.drafts - before.drafts)
        return round(length, 3) if math.isfinite(length) else None
    response = await client.get("/get_server_info")
    if response.status_code != 200:
        return None
    return _sglang(response.content)


def _sglang(body: bytes) -> float | None:
    with contextlib.suppress(ValueError, RecursionError, OverflowError):  # a page for people, with status 200
        match json.loads(body):
            case {"internal_states": [{"avg_spec_accept_length": int() | float() as value}, *_]}:
                return round(float(value), 3) if math.isfinite(value) and value > 0 else None
    return None


def _sum(text: str, name: str) -> float:
    """The sum of a counter over its labels, in Prometheus' text format; NaN where a line ends in no number."""
    own = (line for line in text.splitlines() if line.startswith((name + "{", name + " ")))
    return sum(_number(line.rpartition(" ")[2]) for line in own)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
