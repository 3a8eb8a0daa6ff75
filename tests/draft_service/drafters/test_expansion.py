"""The compiled growth of trees against the reference in kernels.tree_build."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_service.drafters.expansion import Growth, choose, expand
from kernels.tree_build import build_tree, expand_frontier, expand_root


@settings(max_examples=60)
@given(st.integers(1, 4), st.integers(2, 4), st.integers(1, 3), st.integers(0, 2**16), st.booleans())
def test_candidates_and_nodes_are_those_of_the_reference(
    num_steps: int, topk: int, batch: int, seed: int, coarse: bool
) -> None:
    rng = np.random.default_rng(seed)

    def tips(parents: int) -> tuple[torch.Tensor, torch.Tensor]:
        chances = rng.random((batch, parents, topk), np.float32)
        if coarse:  # many equal paths, and some that are no number
            chances = np.round(chances, 1)
            chances[rng.random(chances.shape) < 0.05] = np.nan
        chances = -np.sort(-chances, axis=2)
        return torch.from_numpy(chances), torch.from_numpy(rng.integers(0, 99, chances.shape))

    growth = Growth.empty(batch, num_steps, topk)
    probabilities, tokens = tips(1)
    expansions = [expand_root(probabilities[:, 0], tokens[:, 0])]
    expand(growth, 0, topk, probabilities.numpy(), tokens.numpy())
    for step in range(1, num_steps):
        probabilities, tokens = tips(topk)
        first = (step - 1) * topk
        assert growth.frontier[:, first : first + topk].tolist() == expansions[-1].frontier_ids.tolist()
        assert growth.entry_tokens[:, first : first + topk].tolist() == expansions[-1].frontier_tokens.tolist()
        assert growth.entry_parents[:, first : first + topk].tolist() == expansions[-1].frontier_parents.tolist()
        expansions.append(expand_frontier(expansions[-1], probabilities, tokens, step))
        expand(growth, step, topk, probabilities.numpy(), tokens.numpy())
    most = topk + (num_steps - 1) * topk**2
    count = int(rng.integers(1, most + 1))
    tree = build_tree(torch.zeros(batch, dtype=torch.int64), expansions, count + 1)
    chosen = choose(growth, topk, [count] * batch)
    assert chosen.tokens.tolist() == tree.tokens[:, 1:].tolist()
    assert chosen.parents.tolist() == (tree.parents[:, 1:] - 1).tolist()
    np.testing.assert_array_equal(chosen.probabilities, tree.scores[:, 1:].double().numpy())
    for b in range(batch):
        for node, entry in enumerate(chosen.entries[b].tolist()):
            has_row = entry >= 0
            assert has_row or not (chosen.parents[b] == node).any()  # what has children was run
            if has_row:
                assert growth.entry_tokens[b, entry] == chosen.tokens[b, node]


def test_entries_see_themselves_and_their_ancestors() -> None:
    growth = Growth.empty(1, 3, 2)
    half = np.array([[[0.6, 0.4]]], np.float32)
    expand(growth, 0, 2, half, np.array([[[1, 2]]]))
    expand(growth, 1, 2, np.array([[[0.9, 0.8], [0.1, 0.1]]], np.float32), np.array([[[3, 4], [5, 6]]]))
    assert growth.entry_tokens.tolist() == [[1, 2, 3, 4]]
    assert growth.masks[0].tolist() == [
        [True, False, False, False],
        [False, True, False, False],
        [True, False, True, False],
        [True, False, False, True],
    ]
