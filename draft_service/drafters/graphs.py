"""Which of a drafter's steps become CUDA graphs, from the flags."""

from __future__ import annotations

from draft_service.drafters.shape import TreeShape
from engine.execution import GraphSizes
from outrider.args import DraftArgs

# Of the largest captured step, where no flag says: beyond, launches are little of what it takes.
_SESSIONS = 64


def graph_sizes(args: DraftArgs, shape: TreeShape) -> GraphSizes | None:
    """The steps of a tree as it grows, and the rows of a verdict. None where flags want no graphs."""
    if args.disable_cuda_graph:
        return None
    return GraphSizes(
        max_batch=args.cuda_graph_max_bs or min(args.max_sessions, _SESSIONS),
        max_rows=max(shape.num_steps + 1, shape.topk * (shape.num_steps - 1)),
        last_logits=shape.topk,
        required=args.cuda_graph_max_bs is not None,
    )
