"""Draft trees that grow by steps in fixed places on a device, as kernels.tree_build expands them.

A tree of S steps and K branches has E = K * (S - 1) entries, K of each step but the last: the nodes that a draft
forward goes on from. All of them are rows of every forward, those that are not known yet as rows that nobody sees.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import numpy as np
import torch

from kernels.attention.layout import WORD_BITS
from kernels.dispatch import has_triton
from kernels.tree_build import Expansion, expand_frontier, expand_root

# More of them have more candidates than a program of Triton's is made for.
_MOST_BRANCHES = 64


class GrowingTrees(NamedTuple):
    """B trees; M = K + (S - 1) * K * K candidates each."""

    num_steps: int
    topk: int
    tokens: torch.Tensor
    """int64 [B, E]: the entries'."""
    bits: torch.Tensor
    """int64 [B, E, W]: whom they see (AttentionLayout.row_bits)."""
    inputs: torch.Tensor
    """[B, E, hidden]: the states that they go on from, which came out of their parents."""
    states: torch.Tensor
    """[B * (1 + E), hidden]: what came out: of all trees' last rows, then of all trees' entries step by step."""
    found: torch.Tensor
    """int64 [B, 2 M + E]: of a tree, scores of its candidates, float64 as it lies; their tokens; its entries' ids."""
    reach: torch.Tensor
    """fp32 [S - 1, B, K]: scores of the entries."""
    own: torch.Tensor
    """int64 [E, W]: each entry's own bit."""

    @classmethod
    def places(
        cls, batch: int, num_steps: int, topk: int, hidden: int, dtype: torch.dtype, device: torch.device
    ) -> Self:
        """Makes room for so many trees."""
        entries, most = topk * (num_steps - 1), topk + (num_steps - 1) * topk * topk
        words = -(-entries // WORD_BITS)
        own = np.zeros((entries, words), np.uint64)
        places = np.arange(entries)
        own[places, places // WORD_BITS] = np.uint64(1) << (places % WORD_BITS).astype(np.uint64)
        whole, narrow = ({"dtype": of, "device": device} for of in (torch.int64, dtype))
        return cls(
            num_steps,
            topk,
            tokens=torch.zeros((batch, entries), **whole),
            bits=torch.zeros((batch, entries, words), **whole),
            inputs=torch.zeros((batch, entries, hidden), **narrow),
            states=torch.zeros((batch * (1 + entries), hidden), **narrow),
            found=torch.zeros((batch, 2 * most + entries), **whole),
            reach=torch.zeros((num_steps - 1, batch, topk), device=device),
            own=torch.from_numpy(own.view(np.int64)).to(device),
        )

    @property
    def num_candidates(self) -> int:
        """M, the number of candidates."""
        return self.topk + (self.num_steps - 1) * self.topk * self.topk


def grow_on(
    trees: GrowingTrees, step: int, chances: torch.Tensor, ids: torch.Tensor, states: torch.Tensor,
    names: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Takes in what step `step` found: its candidates, and the entries that the next step goes on from.

    chances fp32, ids int64, both falling: of step 0 [B, K], what may follow the last rows; of later ones [B * K, K],
    what may follow the entries of the step before. states [B or B * K, hidden]: what came out of those rows. names:
    the target's id of each of `ids`, where it is another one. On a CUDA device Triton does it, where it is installed.
    """
    if has_triton(trees.tokens.device) and trees.topk <= _MOST_BRANCHES:
        from kernels import tree_growth_triton

        tree_growth_triton.grow_on(trees, step, chances, ids, states, names)
    else:
        grow_on_torch(trees, step, chances, ids, states, names)


def grow_on_torch(
    trees: GrowingTrees, step: int, chances: torch.Tensor, ids: torch.Tensor, states: torch.Tensor,
    names: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """See grow_on, in torch's operators."""
    topk, batch = trees.topk, len(trees.tokens)
    ids = ids if names is None else names[ids]
    if step == 0:
        first, newest = 0, expand_root(chances, ids)
        # Rows that are not known yet must be numbers, as what nobody sees is multiplied by 0: the first step's, since
        # in half precision a head may turn what it never meets into infinities.
        trees.tokens.view(batch, -1, topk)[:] = newest.frontier_tokens[:, None]
        trees.inputs[:] = states[:, None]
        trees.bits[:] = trees.own
    else:
        first, shape = topk + (step - 1) * topk * topk, (batch, topk, topk)
        reach = trees.reach[step - 1]
        before = Expansion(reach, ids, ids, frontier_scores=reach, frontier_tokens=ids, frontier_parents=ids)
        newest = expand_frontier(before, chances.view(shape), ids.view(shape), step)
        trees.states[batch * (1 + (step - 1) * topk) :][: len(states)] = states
    scores, tokens, entries = trees.found.split([trees.num_candidates, trees.num_candidates, trees.own.shape[0]], dim=1)
    last = first + newest.scores.shape[1]
    scores[:, first:last] = newest.scores.double().view(torch.int64)
    tokens[:, first:last] = newest.tokens
    if step == trees.num_steps - 1:
        return
    here = slice(step * topk, (step + 1) * topk)
    entries[:, here] = newest.frontier_ids
    trees.reach[step] = newest.frontier_scores
    if step:
        parents, above = newest.frontier_parents, trees.bits[:, here.start - topk : here.start]
        trees.tokens[:, here] = newest.frontier_tokens
        trees.bits[:, here] = above.gather(1, parents[:, :, None].expand(-1, -1, above.shape[2])) | trees.own[here]
        rows = parents + topk * torch.arange(batch, device=parents.device)[:, None]
        trees.inputs[:, here] = states.index_select(0, rows.flatten()).view(batch, topk, -1)
