"""The file of --speculative-adaptive-config: which steps a chain may have, by batch size. Names are SGLang's."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from outrider.errors import StartupError


@dataclass(frozen=True, slots=True)
class Tier:
    """Settings from a batch size on; names as in SGLang's file."""

    candidate_steps: tuple[int, ...]
    ema_alpha: float = 0.2
    warmup_batches: int = 10
    update_interval: int = 5
    up_hysteresis: float = 0.0
    down_hysteresis: float = -0.25


_MOST_STEPS = 64

DEFAULT = {1: Tier((1, 3, 7)), 8: Tier((0, 1, 3)), 32: Tier((0, 1)), 64: Tier((0,))}


def read_tiers(path: str | None) -> dict[int, Tier]:
    """The tiers of --speculative-adaptive-config: {"1": {"candidate_steps": [1, 3, 7]}, ...}. StartupError for
    nonsense."""
    if path is None:
        return DEFAULT
    try:
        read = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(read, dict) or not read:
            raise ValueError("it must be an object by batch size")
        tiers = {int(size): _tier(tier) for size, tier in read.items()}
    except (OSError, ValueError, TypeError) as error:
        raise StartupError(f"--speculative-adaptive-config {path}: {error}") from error
    if min(tiers) != 1:
        raise StartupError(f"--speculative-adaptive-config {path}: its smallest batch size is {min(tiers)}, not 1")
    return dict(sorted(tiers.items()))


def _tier(read: Any) -> Tier:
    """A tier as the file has it. ValueError, naming what is wrong with it."""
    if not isinstance(read, dict):
        raise ValueError(f"{read!r} is no tier")
    unknown = read.keys() - {spec.name for spec in fields(Tier)}
    if unknown:
        raise ValueError(f"{min(unknown)} is unknown; a tier has {', '.join(spec.name for spec in fields(Tier))}")
    steps = read.get("candidate_steps")
    sound = isinstance(steps, list) and all(_is_whole(step) and 0 <= step <= _MOST_STEPS for step in steps)
    if not (sound and steps):
        raise ValueError(f"candidate_steps is {steps!r}; it must be a list of whole numbers from 0 to {_MOST_STEPS}")
    tier = Tier(**{**read, "candidate_steps": tuple(sorted(set(steps)))})
    for name, least in (("update_interval", 1), ("warmup_batches", 0)):
        value = getattr(tier, name)
        if not (_is_whole(value) and value >= least):
            raise ValueError(f"{name} is {value!r}; it must be a whole number of at least {least}")
    if not (_is_number(tier.ema_alpha) and 0.0 < tier.ema_alpha <= 1.0):
        raise ValueError(f"ema_alpha is {tier.ema_alpha!r}; it must be a number above 0 and at most 1")
    for name in ("up_hysteresis", "down_hysteresis"):
        value = getattr(tier, name)
        if not (_is_number(value) and abs(value) <= _MOST_STEPS):
            raise ValueError(f"{name} is {value!r}; it must be a number from -{_MOST_STEPS} to {_MOST_STEPS}")
    return tier


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, float) or _is_whole(value)


def candidates(tiers: dict[int, Tier]) -> list[int]:
    """All steps that any tier may take, ascending."""
    return sorted({steps for tier in tiers.values() for steps in tier.candidate_steps})


def first_steps(tiers: dict[int, Tier], given: int | None) -> int:
    """--speculative-num-steps, or the middle candidate. StartupError for one that is none."""
    known = candidates(tiers)
    if given is None:
        return known[len(known) // 2]
    if given not in known:
        raise StartupError(f"--speculative-num-steps is {given}; with --speculative-adaptive it must be one of {known}")
    return given
