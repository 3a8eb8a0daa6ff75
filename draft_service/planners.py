"""From flags to a planner: whose trees are fixed, whose follow SGLang's rule, and whose are planned."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from draft_service import repetition
from draft_service.adaptive import AdaptivePlanner
from draft_service.copying import DEFAULT_TOKENS, Copier
from draft_service.drafters.base import Drafter
from draft_service.drafters.shape import DEEPEST, TreeShape
from draft_service.overlap import FixedOverlap, Overlap, OverlapRule
from draft_service.planning import CostPlanner, FixedPlanner, Planner
from outrider import env
from outrider.args import DraftArgs
from outrider.cores import num_cores
from outrider.placement import FEW_CORES
from outrider.tiers import first_steps, read_tiers

_NODES_A_STEP = 2  # of trees with branches; verify takes those that pay


@runtime_checkable
class Shaped(Protocol):
    """A drafter whose work depends on the shape of its trees."""

    @property
    def shape(self) -> TreeShape:
        """The shape of trees for requests that wish nothing."""
        ...

    @property
    def max_steps(self) -> int | None:
        """The most steps of a tree; None: any number."""
        ...

    def reshape(self, shape: TreeShape, least_reach: float = 0.0) -> None:
        """Sets the shape from the next call on; least_reach: see Plan."""
        ...


def make_planner(args: DraftArgs, drafter: Drafter) -> Planner:
    """Makes the planner of a drafter that is loaded. StartupError for an adaptive configuration that is no good."""
    early = env.early_proposals()
    # On few cores drafts made during a step mostly slow it down.
    many_cores = num_cores() > FEW_CORES
    overlap: Overlap = OverlapRule(first=many_cores) if early is None else FixedOverlap(on=early)
    if not isinstance(drafter, Shaped):
        return FixedPlanner(overlap)
    if args.speculative_adaptive:
        tiers = read_tiers(args.speculative_adaptive_config)
        steps = first_steps(tiers, args.speculative_num_steps)
        return AdaptivePlanner(tiers, steps, drafter.reshape, overlap)
    if args.speculative_num_steps is not None:
        return FixedPlanner(overlap)
    return CostPlanner(drafter.shape, _most(drafter), drafter.reshape, overlap)


def make_copier(args: DraftArgs, drafter: Drafter) -> Copier | None:
    """Copies from sessions' own texts beside a draft model's trees; None where there are to be none."""
    fixed = args.speculative_num_steps is not None or args.speculative_adaptive
    most = args.speculative_copy_tokens
    most = (0 if fixed else DEFAULT_TOKENS) if most is None else most
    if not most or not isinstance(drafter, Shaped):
        return None
    repetition.warm_up()
    return Copier(most)


def _most(drafter: Shaped) -> TreeShape:
    shape = drafter.shape
    steps = drafter.max_steps or max(shape.num_steps, DEEPEST)
    return TreeShape(steps, shape.topk, steps + 1 if shape.topk == 1 else _NODES_A_STEP * steps + 1)
