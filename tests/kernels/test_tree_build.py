import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.tree_build import (
    DraftTree,
    Expansion,
    build_tree,
    check_tree_limits,
    expand_frontier,
    expand_root,
    select_nodes,
)
from tests.kernels import oracles
from tests.kernels.test_acceptance import accept_coupled


def worked_expansions() -> list[Expansion]:
    first = expand_root(torch.tensor([[0.6, 0.3]]), torch.tensor([[10, 11]]))
    second = expand_frontier(first, torch.tensor([[[0.7, 0.2], [0.9, 0.05]]]), torch.tensor([[[20, 21], [22, 23]]]), 1)
    third = expand_frontier(second, torch.tensor([[[0.5, 0.4], [0.8, 0.1]]]), torch.tensor([[[30, 31], [32, 33]]]), 2)
    return [first, second, third]


def test_worked_expansion() -> None:
    first, second, third = worked_expansions()
    assert first.frontier_ids.tolist() == [[0, 1]]
    assert second.frontier_ids.tolist() == [[2, 4]]
    assert second.frontier_tokens.tolist() == [[20, 22]]
    assert second.frontier_parents.tolist() == [[0, 1]]
    scores = torch.cat([first.scores, second.scores, third.scores], dim=1)
    expected = [[0.6, 0.3, 0.42, 0.12, 0.27, 0.015, 0.21, 0.168, 0.216, 0.027]]
    torch.testing.assert_close(scores, torch.tensor(expected))
    tokens = torch.cat([first.tokens, second.tokens, third.tokens], dim=1)
    assert tokens.tolist() == [[10, 11, 20, 21, 22, 23, 30, 31, 32, 33]]


def test_worked_tree() -> None:
    expansions = worked_expansions()
    assert select_nodes(expansions, 6).tolist() == [[0, 1, 2, 4, 8]]
    tree = build_tree(torch.tensor([5]), expansions, 6)
    assert tree.tokens.tolist() == [[5, 10, 11, 20, 22, 32]]
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 2, 4]]
    torch.testing.assert_close(tree.scores, torch.tensor([[1.0, 0.6, 0.3, 0.42, 0.27, 0.216]]))


def test_worked_round_is_accepted() -> None:
    tree = build_tree(torch.tensor([5]), worked_expansions(), 6)
    parents, tokens = (tree.parents[0, 1:] - 1).tolist(), tree.tokens[0, 1:].tolist()
    accepted = accept_coupled(parents, tokens, [11, 0, 22, 0, 99, 0])
    assert [tokens[node] for node in accepted.nodes] + [accepted.bonus] == [11, 22, 99]


PROBS = st.one_of(st.sampled_from([0.0, 0.25, 0.5, 1.0, math.nan]), st.floats(0, 1, width=32))


@st.composite
def drafts(draw: Any) -> tuple[int, int, int, np.ndarray, np.ndarray]:
    """(steps, topk, nodes with the root, probabilities, tokens), the last two [steps, batch, slot, topk]."""
    num_steps, topk, batch = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    num_draft_tokens = 1 + draw(st.integers(1, topk + (num_steps - 1) * topk**2))
    size = num_steps * batch * topk * topk
    probs = np.array(draw(st.lists(PROBS, min_size=size, max_size=size)), dtype=np.float32)
    tokens = np.argsort(np.random.default_rng(draw(st.integers(0, 99))).random((size // topk, topk + 3)), axis=1)
    shape = (num_steps, batch, topk, topk)
    return num_steps, topk, num_draft_tokens, probs.reshape(shape), tokens[:, :topk].reshape(shape)


def built(num_steps: int, num_draft_tokens: int, probs: np.ndarray, tokens: np.ndarray) -> DraftTree:
    p, t = torch.from_numpy(probs), torch.from_numpy(tokens)
    expansions = [expand_root(p[0, :, 0], t[0, :, 0])]
    for step in range(1, num_steps):
        expansions.append(expand_frontier(expansions[-1], p[step], t[step], step))
    return build_tree(torch.arange(p.shape[1]), expansions, num_draft_tokens)


@settings(deadline=None)
@given(drafts())
def test_trees_equal_a_plain_construction(draft: tuple[int, int, int, np.ndarray, np.ndarray]) -> None:
    num_steps, topk, num_draft_tokens, probs, tokens = draft
    tree = built(num_steps, num_draft_tokens, probs, tokens)
    for b in range(probs.shape[1]):

        def likeliest(step: int, slot: int, b: int = b) -> list[tuple[int, float]]:
            return [(int(t), float(p)) for t, p in zip(tokens[step, b, slot], probs[step, b, slot], strict=True)]

        everything = oracles.grow(num_steps, topk, likeliest)
        chosen = oracles.likeliest_nodes(everything, num_draft_tokens - 1)
        place = {id(node): 1 + i for i, node in enumerate(chosen)}
        parents = [-1, *(place[id(node.parent)] if node.parent else 0 for node in chosen)]
        assert tree.tokens[b].tolist() == [b, *(node.token for node in chosen)]
        assert tree.parents[b].tolist() == parents
        assert tree.scores[b].tolist() == [1.0, *(float(node.score) for node in chosen)]


def test_a_chain_is_a_tree_of_width_one() -> None:
    probs, tokens = np.full((4, 1, 1, 1), 1.0, np.float32), np.arange(4).reshape(4, 1, 1, 1)
    tree = built(4, 5, probs, tokens)
    assert tree.parents.tolist() == [[-1, 0, 1, 2, 3]]
    assert tree.tokens.tolist() == [[0, 0, 1, 2, 3]]


def test_nan_everywhere_still_makes_a_tree() -> None:
    probs, tokens = np.full((3, 1, 2, 2), math.nan, np.float32), np.tile(np.array([4, 5]), (3, 1, 2, 1))
    tree = built(3, 11, probs, tokens)
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4]]
    assert tree.scores.tolist() == [[1.0] + [0.0] * 10]


@pytest.mark.parametrize(("num_steps", "topk", "num_draft_tokens"), [(1, 1, 2), (3, 2, 11), (5, 4, 8), (1, 8, 9)])
def test_limits_that_fit(num_steps: int, topk: int, num_draft_tokens: int) -> None:
    check_tree_limits(num_steps, topk, num_draft_tokens)


@pytest.mark.parametrize(
    ("num_steps", "topk", "num_draft_tokens"), [(1, 1, 3), (3, 2, 12), (1, 8, 10), (0, 1, 2), (1, 0, 2), (1, 1, 1)]
)
def test_limits_that_do_not(num_steps: int, topk: int, num_draft_tokens: int) -> None:
    with pytest.raises(ValueError, match="num_draft_tokens"):
        check_tree_limits(num_steps, topk, num_draft_tokens)


def test_more_nodes_than_candidates_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 10 nodes below the root; lower it to 11"):
        build_tree(torch.tensor([5]), worked_expansions(), 12)
