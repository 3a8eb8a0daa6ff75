"""Trees checked and laid out together against each alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.forest import grown
from outrider.tree import TokenTree
from tests.outrider.test_tree import trees

VOCAB = 6


def flat(found: list[TokenTree]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return (
        np.concatenate([tree.tokens for tree in found]),
        np.concatenate([tree.parents for tree in found]),
        np.array([len(tree) for tree in found]),
    )


@given(st.lists(trees(max_nodes=63), min_size=1, max_size=6), st.data())
def test_each_is_what_it_is_alone(alone: list[TokenTree], data: st.DataObject) -> None:
    tokens, parents, sizes = flat(alone)
    total = len(tokens)
    scores = np.array(data.draw(st.lists(st.integers(0, 255), min_size=total, max_size=total)), np.uint8)
    expected = [tree.raised(own) for tree, own in zip(alone, np.split(scores, np.cumsum(sizes)[:-1]), strict=True)]
    found = grown(tokens, parents, scores, sizes, vocab_size=VOCAB)
    assert found is not None
    for tree, one in zip(found, alone, strict=True):
        assert (tree.tokens.tolist(), tree.parents.tolist()) == (one.tokens.tolist(), one.parents.tolist())
        assert tree.row_depths.tolist() == one.row_depths.tolist()
        assert tree.ancestor_mask().tolist() == one.ancestor_mask().tolist()
        assert tree.links == one.links
    assert scores.tolist() == np.concatenate(expected).tolist()


@pytest.mark.parametrize(
    ("token", "parent"),
    [(VOCAB, 0), (-1, 0), (2, 1), (2, 2), (2, -2), (1, -1)],
    ids=["outside", "negative", "itself", "later", "below-the-root", "sibling"],
)
def test_one_malformed_tree_is_enough(token: int, parent: int) -> None:
    tokens, parents = [1, token, 3], [-1, parent, 0]
    for before in ([], [4]):
        for after in ([], [5]):
            found = grown(
                np.array(before + tokens + after, np.int32),
                np.array([-1] * len(before) + parents + [-1] * len(after), np.int32),
                np.zeros(3 + len(before) + len(after), np.uint8),
                np.array([1] * len(before) + [3] + [1] * len(after)),
                vocab_size=VOCAB,
            )
            assert found is None
