"""Token trees against a plain model of a tree: nodes as paths of tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import InvalidArgument
from outrider.tree import ROOT, TokenTree

Path = tuple[int, ...]


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 12) -> TokenTree:
    """Any tree of up to `max_nodes` nodes over six tokens."""
    tokens: list[int] = []
    parents: list[int] = []
    for node in range(draw(st.integers(0, max_nodes))):
        parent = draw(st.integers(-1, node - 1))
        taken = {tokens[other] for other in range(node) if parents[other] == parent}
        free = sorted(set(range(6)) - taken)
        if not free:
            break
        tokens.append(draw(st.sampled_from(free)))
        parents.append(parent)
    return TokenTree(ids(*tokens), ids(*parents))


def paths(tree: TokenTree) -> list[Path]:
    """Every node as the tokens from below the root down to it."""
    found: list[Path] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        found.append((*(found[parent] if parent != ROOT else ()), token))
    return found


def test_a_small_tree() -> None:
    #  root -> 10 -> 12 -> 14
    #       -> 11 -> 13
    tree = TokenTree.checked(ids(10, 11, 12, 13, 14), ids(-1, -1, 0, 1, 2), vocab_size=15, max_nodes=5)
    assert len(tree) == 5
    assert tree.depths.tolist() == [1, 1, 2, 2, 3]
    assert tree.children(ROOT) == [0, 1]
    assert tree.children(4) == []
    assert tree.child(0, 12) == 2
    assert tree.child(0, 13) is None
    assert tree.path(4) == [0, 2, 4]
    assert tree.path(ROOT) == []
    assert tree.ancestor_mask().astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 0, 1, 0, 1, 0],
        [1, 1, 0, 1, 0, 1],
    ]
    below, kept = tree.subtree(0)
    assert kept.tolist() == [2, 4]
    assert (below.tokens.tolist(), below.parents.tolist()) == ([12, 14], [-1, 0])


def test_empty_and_chain() -> None:
    assert len(TokenTree.empty()) == 0
    assert TokenTree.empty().ancestor_mask().tolist() == [[True]]
    chain = TokenTree.chain(ids(5, 5, 6))
    assert chain.parents.tolist() == [-1, 0, 1]
    assert chain.depths.tolist() == [1, 2, 3]
    assert chain.subtree(2)[0].tokens.tolist() == []
    for length in (1, 3, 64, 65, 80):
        chain = TokenTree.chain(np.arange(length, dtype=np.int32))
        assert chain.row_depths.tolist() == list(range(length + 1))
        assert (chain.ancestor_mask() == np.tri(length + 1, dtype=np.bool_)).all()


@pytest.mark.parametrize(
    ("tokens", "parents", "field", "message"),
    [
        ((1, 2), (-1,), "parents", "2 tokens but 1 parents"),
        ((1, 2, 3), (-1, 0, 1), "tokens", "3 nodes; at most 2"),
        ((1, 9), (-1, 0), "tokens", r"tokens\[1\] is 9; token ids are from 0 to 8"),
        ((-1,), (-1,), "tokens", r"tokens\[0\] is -1"),
        ((1, 2), (-1, 1), "parents", r"parents\[1\] is 1; it must be from -1, the root, to 0"),
        ((1, 2), (1, -1), "parents", r"parents\[0\] is 1"),
        ((1,), (-2,), "parents", r"parents\[0\] is -2"),
        ((4, 4), (-1, -1), "tokens", "repeats token 4 of its sibling 0"),
    ],
)
def test_malformed_trees_are_refused(
    tokens: tuple[int, ...], parents: tuple[int, ...], field: str, message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message) as refused:
        TokenTree.checked(ids(*tokens), ids(*parents), vocab_size=9, max_nodes=2)
    assert refused.value.field == field


@given(trees())
def test_paths_depths_children_and_mask_agree(tree: TokenTree) -> None:
    by_path = paths(tree)
    mask = tree.ancestor_mask()
    for node, path in enumerate(by_path):
        assert tree.depths[node] == len(path)
        assert [int(tree.tokens[step]) for step in tree.path(node)] == list(path)
        assert tree.child(int(tree.parents[node]), path[-1]) == node
        for other, shorter in enumerate(by_path):
            assert mask[node + 1, other + 1] == (path[: len(shorter)] == shorter)
    assert mask[:, 0].all()
    assert not mask[0, 1:].any()


@given(trees(), st.data())
def test_subtree_keeps_exactly_what_hangs_below(tree: TokenTree, data: st.DataObject) -> None:
    root = data.draw(st.integers(-1, len(tree) - 1))
    by_path = paths(tree)
    top: Path = by_path[root] if root != ROOT else ()
    below, kept = tree.subtree(root)
    assert kept.tolist() == [n for n, path in enumerate(by_path) if len(path) > len(top) and path[: len(top)] == top]
    assert paths(below) == [by_path[node][len(top) :] for node in kept.tolist()]


@given(trees(), st.data())
def test_trimmed_keeps_the_lowest_scores_and_is_a_tree(tree: TokenTree, data: st.DataObject) -> None:
    scores = np.array(data.draw(st.lists(st.integers(0, 255), min_size=len(tree), max_size=len(tree))), np.uint8)
    count = data.draw(st.integers(0, len(tree) + 1))
    max_depth = data.draw(st.none() | st.integers(0, len(tree)))
    raised = [max(int(scores[step]) for step in tree.path(node)) for node in range(len(tree))]
    assert tree.raised(scores).tolist() == raised
    within = [node for node in range(len(tree)) if max_depth is None or len(tree.path(node)) <= max_depth]
    expected = sorted(sorted(within, key=lambda node: (raised[node], node))[:count])
    kept_tree, kept = tree.trimmed(tree.raised(scores), count, max_depth)
    assert kept.tolist() == expected
    assert paths(kept_tree) == [paths(tree)[node] for node in expected]
