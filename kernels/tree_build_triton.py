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


def build_tree(
    root_tokens: torch.Tensor, root_positions: torch.Tensor, expansions: Sequence[Expansion], num_draft_tokens: int
) -> DraftTree:
    """As kernels.tree_build.build_tree."""
    width, num_nodes, device = expansions[0].scores.shape[1], num_draft_tokens, root_tokens.device
    check_tree_limits(len(expansions), width, num_nodes)
    scores = torch.cat([each.scores for each in expansions], dim=1)
    tokens = torch.cat([each.tokens for each in expansions], dim=1)
    batch, count = tokens.shape
    # Candidate c hangs below entry c // K: 0 is the root, then each step's frontier.
    root = torch.full((batch, 1), -1, dtype=torch.int64, device=device)
    entries = torch.cat([root, *(each.frontier_ids for each in expansions[:-1])], dim=1)
    rows, square = (batch, num_nodes), (batch, num_nodes, num_nodes)
    tokens_out, parents, positions, next_token, next_sibling = (
        torch.empty(rows, dtype=torch.int64, device=device) for _ in range(5)
    )
    mask = torch.empty(square, dtype=torch.bool, device=device)
    scores_out = torch.empty(rows, dtype=scores.dtype, device=device)
    places = torch.empty((batch, count), dtype=torch.int32, device=device)
    _build[(batch,)](
        root_tokens.long(), root_positions.long(), scores, tokens, entries, places,
        tokens_out, parents, positions, mask, next_token, next_sibling, scores_out,
        COUNT=count, ENTRIES=entries.shape[1], WIDTH=width, NODES=num_nodes, STEPS=len(expansions),
        BLOCK_C=triton.next_power_of_2(count), BLOCK_N=triton.next_power_of_2(num_nodes),
        num_warps=4 if num_nodes <= 64 else 8,
    )  # fmt: skip
    return DraftTree(tokens_out, parents, positions, mask, next_token, next_sibling, scores_out)


@jit
def _build(
    root_tokens: tp.Any, root_positions: tp.Any, scores: tp.Any, tokens: tp.Any, entries: tp.Any, places: tp.Any,
    tokens_out: tp.Any, parents_out: tp.Any, positions_out: tp.Any, mask_out: tp.Any, next_token_out: tp.Any,
    next_sibling_out: tp.Any, scores_out: tp.Any,
    COUNT: tl.constexpr, ENTRIES: tl.constexpr, WIDTH: tl.constexpr, NODES: tl.constexpr, STEPS: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
) -> None:  # fmt: skip
    session = tl.program_id(0).to(tl.int64)
    scores += session * COUNT
    tokens += session * COUNT
    places += session * COUNT
    tokens_out += session * NODES
    parents_out += session * NODES
    scores_out += session * NODES
    c = tl.arange(0, BLOCK_C)
    own = tl.load(scores + c, mask=c < COUNT, other=-1.0)
    rank = tl.zeros([BLOCK_C], tl.int32)
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
    tl.debug_barrier()  # and now the parents

    n = tl.arange(0, BLOCK_N)
    there = n < NODES
    parent = tl.load(parents_out + n, mask=there, other=-2)
    seen = n[:, None] == n[None, :]
    depth = tl.zeros([BLOCK_N], tl.int64)
    up = parent
    for _ in range(STEPS):
        is_above = up >= 0
        depth += is_above.to(tl.int64)
        seen = seen | (up[:, None] == n[None, :])
        up = tl.load(parents_out + up, mask=is_above, other=-1)
    square = n[:, None] * NODES + n[None, :]
    both = there[:, None] & there[None, :]
    tl.store(mask_out + session * NODES * NODES + square, seen, mask=both)
    tl.store(positions_out + session * NODES + n, tl.load(root_positions + session) + depth, mask=there)
    is_child = (parent[None, :] == n[:, None]) & both
    first = tl.min(tl.where(is_child, n[None, :], BLOCK_N), 1)
    is_sibling = (parent[None, :] == parent[:, None]) & (n[None, :] > n[:, None]) & both
    following = tl.min(tl.where(is_sibling, n[None, :], BLOCK_N), 1)
    tl.store(next_token_out + session * NODES + n, tl.where(first == BLOCK_N, -1, first).to(tl.int64), mask=there)
    is_last = following == BLOCK_N
    tl.store(next_sibling_out + session * NODES + n, tl.where(is_last, -1, following).to(tl.int64), mask=there)
