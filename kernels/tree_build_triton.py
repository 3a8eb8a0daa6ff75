"""kernels.tree_build.build_tree on a CUDA device, in Triton: a batch of trees in one launch instead of some thirty.

One program lays out one session's tree. A candidate is chosen when fewer than N - 1 rank before it (all are compared
with all: a few hundred numbers), so nothing is sorted, and ties go to the lower id as there. Its speed has not been
measured.
"""

from __future__ import annotations

import typing as tp  # Triton's compiler refuses a bare `Any` in a kernel's annotations
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kernels.tree_build import DraftTree, Expansion, check_tree_limits

jit: tp.Any = triton.jit  # what it says of its result's type differs from version to version


def build_tree(root_tokens: torch.Tensor, expansions: Sequence[Expansion], num_draft_tokens: int) -> DraftTree:
    """As kernels.tree_build.build_tree."""
    width, num_nodes, device = expansions[0].scores.shape[1], num_draft_tokens, root_tokens.device
    check_tree_limits(len(expansions), width, num_nodes)
    scores = torch.cat([each.scores for each in expansions], dim=1)
    tokens = torch.cat([each.tokens for each in expansions], dim=1)
    batch, count = tokens.shape
    # Candidate c hangs below entry c // K: 0 is the root, then each step's frontier.
    root = torch.full((batch, 1), -1, dtype=torch.int64, device=device)
    entries = torch.cat([root, *(each.frontier_ids for each in expansions[:-1])], dim=1)
    tokens_out, parents = (torch.empty((batch, num_nodes), dtype=torch.int64, device=device) for _ in range(2))
    scores_out = torch.empty((batch, num_nodes), dtype=scores.dtype, device=device)
    places = torch.empty((batch, count), dtype=torch.int32, device=device)
    _build[(batch,)](
        root_tokens.long(), scores, tokens, entries, places, tokens_out, parents, scores_out,
        COUNT=count, ENTRIES=entries.shape[1], WIDTH=width, NODES=num_nodes, BLOCK=triton.next_power_of_2(count),
        num_warps=4,
    )  # fmt: skip
    return DraftTree(tokens_out, parents, scores_out)


@jit
def _build(
    root_tokens: tp.Any, scores: tp.Any, tokens: tp.Any, entries: tp.Any, places: tp.Any, tokens_out: tp.Any,
    parents_out: tp.Any, scores_out: tp.Any, COUNT: tl.constexpr, ENTRIES: tl.constexpr, WIDTH: tl.constexpr,
    NODES: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    session = tl.program_id(0).to(tl.int64)
    scores += session * COUNT
    tokens += session * COUNT
    places += session * COUNT
    tokens_out += session * NODES
    parents_out += session * NODES
    scores_out += session * NODES
    c = tl.arange(0, BLOCK)
    own = tl.load(scores + c, mask=c < COUNT, other=-1.0)
    rank = tl.zeros([BLOCK], tl.int32)
    for other in range(0, COUNT):
        score = tl.load(scores + other)
        rank += ((score > own) | ((score == own) & (other < c))).to(tl.int32)
    chosen = (c < COUNT) & (rank < NODES - 1)
    # Ascending ids, behind the root.
    node = tl.cumsum(chosen.to(tl.int32), 0)
    tl.store(places + c, node, mask=chosen)
    tl.store(tokens_out + node, tl.load(tokens + c, mask=chosen, other=0), mask=chosen)
    tl.store(scores_out + node, own, mask=chosen)
    tl.debug_barrier()  # other threads read the places
    parent_id = tl.load(entries + session * ENTRIES + c // WIDTH, mask=chosen, other=-1)
    # A chosen candidate's parent is chosen: it ranks before it.
    above = tl.load(places + parent_id, mask=chosen & (parent_id >= 0), other=0)
    tl.store(parents_out + node, above.to(tl.int64), mask=chosen)
    tl.store(tokens_out, tl.load(root_tokens + session))
    tl.store(parents_out, tl.full([], -1, tl.int64))
    tl.store(scores_out, 1.0)
