"""Which of a drafter's steps and trees become CUDA graphs, from the flags."""

from __future__ import annotations

from collections.abc import Sequence

from draft_service.drafters.growing_graphs import TreeSizes
from draft_service.overlap import MAX_OUTCOMES
from engine.execution import GraphSizes
from engine.graphs import MAX_ROWS
from kernels.quantize import MAX_FEW_ROWS
from outrider.args import DraftArgs

# Of the largest captured step, where no flag says: beyond, launches are little of what it takes.
_SESSIONS = 64


def graph_sizes(args: DraftArgs, steps: Sequence[int], topk: int) -> GraphSizes | None:
    """The steps of a tree of any of these depths as it grows, and the rows of a verdict. None where flags want none."""
    if args.disable_cuda_graph:
        return None
    deepest = max(steps)
    return GraphSizes(
        max_batch=_max_batch(args),
        max_rows=max(deepest + 1, topk * (deepest - 1)),
        last_logits=topk,
        required=args.cuda_graph_max_bs is not None,
    )


def tree_sizes(args: DraftArgs, steps: Sequence[int], topk: int, *, is_quantized: bool) -> TreeSizes:
    """The whole trees, where there are graphs of steps."""
    max_trees = min(_max_batch(args), args.max_sessions) * MAX_OUTCOMES
    return TreeSizes(tuple(steps), topk, max_trees, MAX_FEW_ROWS if is_quantized else MAX_ROWS)


def _max_batch(args: DraftArgs) -> int:
    return args.cuda_graph_max_bs or min(args.max_sessions, _SESSIONS)
