"""What the replicas that serve now are together: requests are checked by it, and callers are told of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.replica import ServerInfo
from outrider.v1 import common_pb2

_TOLD_APART = ("model_path", "architecture", "dtype", "quantization", "numerics_id")


@dataclass(frozen=True, slots=True)
class Served:
    """The model as the first of them tells of it, and each limit as the largest of any; 0: not told."""

    model: common_pb2.ModelInfo
    context_length: int  # prompt and output together
    max_choices: int  # of one call
    max_outputs: int  # that run and wait at once
    max_total_tokens: int  # that the KV pool holds


def served_by(infos: Sequence[ServerInfo]) -> Served:
    """What one or more replicas are together."""
    limits = [info.limits for info in infos]
    return Served(
        model=infos[0].model,
        context_length=max(info.limits.context_length or info.model.context_length for info in infos),
        max_choices=max(limit.max_choices for limit in limits),
        max_outputs=max(limit.max_running_requests + limit.max_queued_requests for limit in limits),
        max_total_tokens=max(limit.max_total_tokens for limit in limits),
    )


def differences(known: common_pb2.ModelInfo, model: common_pb2.ModelInfo) -> str:
    """In words, in which facts a model is not the one that is known; empty: it is."""
    pairs = {name: (getattr(model, name), getattr(known, name)) for name in _TOLD_APART}
    return "; ".join(f"{name} is {now!r}, not {before!r}" for name, (now, before) in pairs.items() if now != before)
