"""Growing a draft tree from top-k probabilities: the steps, and the whole tree of them.

On a device kernels.tree_growth and a drafter's own loop expand by these steps; the whole tree is for the evaluation of
heads (training/accept_length.py), and the reference of all that grow trees.

EAGLE-2's dynamic tree (Li et al., 2024) as SGLang runs it: each step keeps the K likeliest of K * K paths and goes on
from them, and at the end the likeliest nodes of all steps are verified. Shapes depend on batch size B, K = topk,
D = num_steps and N = num_draft_tokens (the root counts) only, never on values.

Candidates are numbered over all steps: 0..K-1 in the first, K + (i-1) * K^2 onwards in step i, row-major by parent.
Node 0 of the finished tree is the root; node j is the j-th chosen candidate, ascending, so parents precede children and
siblings stand by falling probability. Equal scores go to the lower id, which keeps a parent ahead of a child of
probability 1. Probabilities that are NaN count as 0, so such nodes come last but still make a tree.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Expansion(NamedTuple):
    """One step's candidates and the K of them to go on from. M is K in the first step and K * K after it."""

    scores: torch.Tensor
    """[B, M]: probability of each candidate's path."""
    tokens: torch.Tensor
    """int64 [B, M]."""
    frontier_ids: torch.Tensor
    """int64 [B, K]: candidate ids of the nodes to go on from."""
    frontier_scores: torch.Tensor
    """[B, K]."""
    frontier_tokens: torch.Tensor
    """int64 [B, K]: the next draft forward's input, depth d at position L - 1 + d for a root at L."""
    frontier_parents: torch.Tensor
    """int64 [B, K]: which of the previous frontier each hangs below: whose hidden state and mask it goes on from."""


class DraftTree(NamedTuple):
    """N nodes for verification, the root first."""

    tokens: torch.Tensor
    """int64 [B, N]."""
    parents: torch.Tensor
    """int64 [B, N]: node index, -1 at the root. On the wire, where the root is no node: parents[:, 1:] - 1."""
    scores: torch.Tensor
    """[B, N]: probability of the path to each node; 1 at the root."""


def check_tree_limits(num_steps: int, topk: int, num_draft_tokens: int) -> None:
    """ValueError unless `num_steps` steps of width `topk` give the num_draft_tokens - 1 nodes that are wanted."""
    if num_steps < 1 or topk < 1 or num_draft_tokens < 2:
        raise ValueError(
            f"a tree needs num_steps >= 1, topk >= 1 and num_draft_tokens >= 2, "
            f"got {num_steps}, {topk} and {num_draft_tokens}"
        )
    most = topk + (num_steps - 1) * topk**2
    if num_draft_tokens - 1 > most:
        raise ValueError(
            f"num_draft_tokens {num_draft_tokens} is too large: num_steps {num_steps} and topk {topk} give at most "
            f"{most} nodes below the root; lower it to {most + 1} or raise num_steps or topk"
        )


def expand_root(topk_p: torch.Tensor, topk_index: torch.Tensor) -> Expansion:
    """The first step: topk_p [B, K] and topk_index [B, K], falling, are the root's likeliest next tokens."""
    scores, tokens = _as_probability(topk_p), topk_index.long()
    ids = torch.arange(scores.shape[1], device=scores.device).expand_as(tokens)
    return Expansion(scores, tokens, ids, scores, tokens, torch.zeros_like(tokens))


def expand_frontier(previous: Expansion, topk_p: torch.Tensor, topk_index: torch.Tensor, step: int) -> Expansion:
    """Step `step` >= 1: topk_p, topk_index [B, K, K] follow each of the previous step's K frontier nodes."""
    width = topk_p.shape[-1]
    scores = (previous.frontier_scores[:, :, None] * _as_probability(topk_p)).flatten(1)
    tokens = topk_index.long().flatten(1)
    best = _best(scores, width)
    return Expansion(
        scores,
        tokens,
        best + width + (step - 1) * width * width,
        scores.gather(1, best),
        tokens.gather(1, best),
        best // width,
    )


def select_nodes(expansions: Sequence[Expansion], num_draft_tokens: int) -> torch.Tensor:
    """Ids int64 [B, N-1], ascending, of the likeliest candidates of all steps."""
    scores = torch.cat([e.scores for e in expansions], dim=1)
    check_tree_limits(len(expansions), expansions[0].scores.shape[1], num_draft_tokens)
    return _best(scores, num_draft_tokens - 1).sort(dim=1).values


def build_tree(root_tokens: torch.Tensor, expansions: Sequence[Expansion], num_draft_tokens: int) -> DraftTree:
    """The tree of the likeliest N - 1 candidates below `root_tokens` (integer [B]).

    ValueError when the steps give fewer candidates.
    """
    chosen = select_nodes(expansions, num_draft_tokens)
    tokens = torch.cat([e.tokens for e in expansions], dim=1).gather(1, chosen)
    scores = torch.cat([e.scores for e in expansions], dim=1).gather(1, chosen)
    return DraftTree(
        tokens=torch.cat([root_tokens.long()[:, None], tokens], dim=1),
        parents=_parent_nodes(chosen, expansions),
        scores=torch.cat([torch.ones_like(scores[:, :1]), scores], dim=1),
    )


def _as_probability(values: torch.Tensor) -> torch.Tensor:
    return values.nan_to_num(nan=0.0).clamp(0.0, 1.0)


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` largest of each row, falling, equal ones ascending (torch.topk promises no order)."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]


def _parent_nodes(chosen: torch.Tensor, expansions: Sequence[Expansion]) -> torch.Tensor:
    """Node indices int64 [B, N] of the parents of `chosen` candidates and, first, of the root (-1)."""
    width = expansions[0].scores.shape[1]
    batch = chosen.shape[0]
    root = torch.full((batch, 1), -1, dtype=torch.int64, device=chosen.device)
    # Candidate c hangs below entry c // K: 0 is the root, then each step's frontier. The last step's has no children.
    entries = torch.cat([root, *(e.frontier_ids for e in expansions[:-1])], dim=1)
    parent_ids = entries.gather(1, chosen // width)
    # Scores never rise along a path and ties go to lower ids, so a chosen candidate's parent is chosen: it is found.
    found = torch.searchsorted(chosen, parent_ids) + 1
    return torch.cat([root, torch.where(parent_ids < 0, 0, found)], dim=1)
