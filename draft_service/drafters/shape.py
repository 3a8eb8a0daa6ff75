"""Steps, branches and nodes of a drafter's trees, from the flags: SGLang's defaults, choices and rules.

Loads no torch, so that a wrong flag is said at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider import env
from outrider.args import DraftArgs
from outrider.errors import StartupError
from outrider.telemetry import get_logger
from outrider.tiers import candidates, first_steps, read_tiers

CHAIN = (3, 1, 4)
DEEPEST = 7
"""Steps of a tree that is planned, at most, and SGLang's largest candidate."""
# For targets of these architectures and a head; every other target, and a draft model, gets a chain.
TREES = {
    "LlamaForCausalLM": (5, 4, 8),
    "Grok1ForCausalLM": (5, 4, 8),
    "Grok1VForCausalLM": (5, 4, 8),
}

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class TreeShape:
    """num_draft_tokens counts the root."""

    num_steps: int
    topk: int
    num_draft_tokens: int


def tree_shape(args: DraftArgs, *, is_head: bool, target_architecture: str = "") -> TreeShape:
    """The trees to draft. StartupError for settings that are partial, impossible or against SpecV2's rule."""
    args.check_tree()
    steps, topk, tokens = (
        args.speculative_num_steps, args.speculative_eagle_topk, args.speculative_num_draft_tokens,
    )  # fmt: skip
    if env.sglang_spec_v2() and topk is not None and topk > 1:
        raise StartupError(
            f"--speculative-eagle-topk is {topk}; SGLANG_ENABLE_SPEC_V2 supports only topk = 1. Set it to 1, or use "
            "OUTRIDER_ENABLE_SPEC_V2, which has no such rule"
        )
    if args.speculative_adaptive:
        steps = max(1, first_steps(read_tiers(args.speculative_adaptive_config), steps))
        topk = 1
    if steps is None and topk is None and tokens is None:
        return TreeShape(*(TREES.get(target_architecture, CHAIN) if is_head else CHAIN))
    assert steps is not None
    assert topk is not None
    if topk == 1:
        if tokens not in (None, steps + 1):
            log.warning("a chain's num_draft_tokens follows its steps", given=tokens, used=steps + 1)
        return TreeShape(steps, 1, steps + 1)
    assert tokens is not None
    return TreeShape(steps, topk, tokens)


def possible_steps(args: DraftArgs, shape: TreeShape, *, has_layer_for_each: bool = False) -> tuple[int, ...]:
    """The steps that trees may come to have by themselves, ascending, where `shape` is what they begin with."""
    if args.speculative_adaptive:
        return tuple(sorted({max(steps, 1) for steps in candidates(read_tiers(args.speculative_adaptive_config))}))
    is_fixed = args.speculative_num_steps is not None or has_layer_for_each
    return tuple(range(1, 1 + (shape.num_steps if is_fixed else max(shape.num_steps, DEEPEST))))
