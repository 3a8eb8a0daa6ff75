"""Rotary embedding as a config.json describes it, in its older and its newer form."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from engine.fields import LIMITS, Fields
from outrider.telemetry import get_logger

log = get_logger(__name__)

ORIGINAL_LENGTH = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Stretching of rotary frequencies: `linear` divides all by factor; `llama3` and `yarn` only the slow ones.

    attention_factor: what cos and sin are multiplied by; truncate: yarn's bounds are rounded to whole pairs.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class Rope:
    """A model's rotary embedding, and the number of positions that it is good for."""

    theta: float
    scaling: RopeScaling | None
    max_position: int


def read_rope(config: Fields) -> Rope:
    """Rotary embedding of one of our own families. NotOursError for a scaling that our decoders do not have."""
    rope = _settings(config)
    theta = rope.number("rope_theta", config.number("rope_theta", 10000.0))
    _warn_of_another_theta(config, rope, theta)
    longest = config.count("max_position_embeddings")
    kind = rope.values.get("rope_type") or rope.values.get("type") or "default"
    if not isinstance(kind, str):
        config.fail(f"rope_type is {kind!r}; it must be a name")
    share = rope.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    if share != 1.0 and kind == "default":
        config.leave("partial_rotary_factor other than 1 is not supported")
    if share != 1.0:
        config.fail(
            f"partial_rotary_factor is {share} with rope scaling {kind!r}; it must be 1, as this family's layers turn "
            "whole heads (transformers does not run it either)"
        )
    if kind == "default":
        return Rope(theta, None, longest)
    if kind not in {"linear", "llama3", "yarn"}:
        config.leave(f"rope scaling {kind!r} is not supported; linear, llama3 and yarn are")
    if kind == "linear":
        scaling = RopeScaling("linear", rope.number("factor"))
        names_original = rope.values.get(ORIGINAL_LENGTH) or config.values.get(ORIGINAL_LENGTH)
        return Rope(theta, scaling, longest if names_original else stretched(longest, scaling.factor))
    # The original length at the top counts before rotary scaling's own, as in transformers.
    original = config.number(ORIGINAL_LENGTH, rope.number(ORIGINAL_LENGTH, longest))
    if kind == "yarn":
        return Rope(theta, _yarn(rope, theta, original, longest), longest)
    low, high = _bounds(rope, ("low_freq_factor", 1.0), ("high_freq_factor", 4.0))
    return Rope(theta, RopeScaling("llama3", rope.number("factor"), low, high, int(original)), longest)


def _settings(config: Fields) -> Fields:
    """`rope_scaling` (older files), which holds where there are both, as in transformers, or `rope_parameters`."""
    newer = config.values.get("rope_parameters") or {}
    values = config.values.get("rope_scaling") or newer
    if not isinstance(values, dict) or not isinstance(newer, dict):
        config.fail("rope_parameters and rope_scaling must be objects")
    if any(isinstance(value, dict) for value in values.values()):
        config.leave("rotary settings by the layers' types are not supported")
    return Fields(config.path, values)


def _warn_of_another_theta(config: Fields, rope: Fields, theta: float) -> None:
    newer: dict[str, Any] = config.values.get("rope_parameters") or {}
    if "rope_theta" not in rope.values and newer.get("rope_theta", theta) != theta:
        log.warning(
            "rope_scaling is read instead of rope_parameters, its rope_theta too; name that in rope_scaling",
            path=str(config.path), read=theta, passed_over=newer["rope_theta"],
        )  # fmt: skip


def stretched(limit: int, factor: float) -> int:
    """Positions of a model with `linear` rotary scaling that does not name the length before it (SGLang's rule)."""
    return int(min(limit * max(factor, 1.0), LIMITS["max_position_embeddings"]))


def _yarn(rope: Fields, theta: float, original: float, longest: int) -> RopeScaling:
    """YaRN as transformers has it; `original` and `longest` are numbers of positions."""
    if theta <= 1:
        rope.fail(f"rope_theta is {theta}; with yarn it must be above 1")
    factor = rope.number("factor", longest / original)
    low, high = _bounds(rope, ("beta_slow", 1.0), ("beta_fast", 32.0))
    # Either of these may be 0, which is as if it were left out.
    both = [rope.number(name) for name in ("mscale", "mscale_all_dim") if rope.values.get(name)]
    steepness = both if len(both) == 2 else [1.0, 0.0]
    above, below = (0.1 * each * math.log(max(factor, 1.0)) + 1.0 for each in steepness)
    attention = rope.number("attention_factor", above / below)
    return RopeScaling("yarn", factor, low, high, int(original), attention, rope.flag("truncate", True))


def _bounds(rope: Fields, slow: tuple[str, float], fast: tuple[str, float]) -> tuple[float, float]:
    """Turns over the original length: pairs below the first are stretched, those above the second are not."""
    low, high = rope.number(*slow), rope.number(*fast)
    if high <= low:
        rope.fail(f"rope scaling: {fast[0]} {high} must be above {slow[0]} {low}")
    return low, high
