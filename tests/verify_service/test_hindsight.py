"""A tree that nobody verified is judged by what is committed after it, exactly as verifying it would have judged."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from outrider.tree import TokenTree
from verify_service.hindsight import Hindsight
from verify_service.proposals import Match, Proposal


def match_of(tokens: list[int], parents: list[int], proposal_id: int = 1) -> Match:
    tree = TokenTree(np.array(tokens, np.int32), np.array(parents, np.int32))
    scores = np.arange(len(tokens)).astype(np.uint8)
    return Match(
        Proposal(proposal_id, 3, np.empty(0, np.int32), tree), -1, tree, np.arange(len(tokens), dtype=np.int32), scores
    )


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Up to ten nodes of three tokens, no two siblings alike."""
    tokens: list[int] = []
    parents: list[int] = []
    for _ in range(draw(st.integers(1, 10))):
        parent, token = draw(st.integers(-1, len(tokens) - 1)), draw(st.integers(0, 2))
        if (parent, token) not in zip(parents, tokens, strict=True):
            parents.append(parent)
            tokens.append(token)
    return tokens, parents


@given(tree=trees(), following=st.lists(st.integers(0, 2), min_size=12, max_size=12), steps=st.lists(st.integers(1, 3)))
def test_what_came_true_is_the_path_that_was_committed(
    tree: tuple[list[int], list[int]], following: list[int], steps: list[int]
) -> None:
    tokens, parents = tree
    hindsight, judged = Hindsight(), None
    hindsight.watch(match_of(tokens, parents), 3)
    for count in [*np.cumsum(steps).tolist(), 12]:
        judged = judged or hindsight.follow(np.array([9, 9, 9, *following[: min(count, 12)]], np.int32))
    node, expected = -1, list[int]()
    for token in following:
        below = [i for i, parent in enumerate(parents) if parent == node and tokens[i] == token]
        if not below:
            break
        node = below[0]
        expected.append(node)
    assert judged is not None
    assert judged.true == expected
    assert not hindsight.is_watching


def test_nothing_is_said_while_the_tree_may_still_come_true() -> None:
    hindsight = Hindsight()
    hindsight.watch(match_of([5, 6], [-1, 0]), 3)
    assert hindsight.follow(np.array([1, 2, 3, 5], np.int32)) is None
    judged = hindsight.follow(np.array([1, 2, 3, 5, 7], np.int32))
    assert judged is not None
    assert judged.true == [0]


def test_a_proposal_is_judged_once_and_one_tree_at_a_time() -> None:
    hindsight = Hindsight()
    hindsight.watch(match_of([5, 6], [-1, 0]), 1)
    hindsight.watch(match_of([8], [-1], proposal_id=2), 2)  # the first is not done
    assert hindsight.follow(np.array([1, 9], np.int32)) is not None
    hindsight.watch(match_of([6], [-1]), 2)  # what is left of the first one
    assert not hindsight.is_watching
    hindsight.watch(match_of([8], [-1], proposal_id=2), 2)
    assert hindsight.is_watching
