"""Which outcomes are drafted below: ends by probability, and ends times guesses at the bonus."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft_service.drafters.outcomes import MAX_OUTCOMES_TRIED, likely_ends, likely_outcomes
from outrider.tree import ROOT, TokenTree


@given(st.data())
def test_ends_come_in_order_of_probability(data: st.DataObject) -> None:
    size = data.draw(st.integers(0, 6))
    parents = [data.draw(st.integers(-1, node - 1)) for node in range(size)]
    shares = [data.draw(st.floats(0.01, 0.3)) for _ in range(size)]
    probabilities: list[float] = []
    for node, parent in enumerate(parents):
        probabilities.append(shares[node] * (probabilities[parent] if parent >= 0 else 1.0))
    tree = TokenTree(np.arange(size, dtype=np.int32), np.array(parents, np.int32))
    found = likely_ends(tree, np.array(probabilities), max_accepted=2)
    ends = {ROOT: 1.0} | dict(enumerate(probabilities))
    for node, parent in enumerate(parents):
        ends[parent] -= probabilities[node]
    deep = [node for node in range(size) if tree.depths[node] > 2]
    expected = sorted((value for node, value in ends.items() if node not in deep), reverse=True)[:MAX_OUTCOMES_TRIED]
    assert [ends[node] for node, _ in found] == pytest.approx(expected)
    assert [chance for _, chance in found] == pytest.approx([max(0.0, value) for value in expected])
    assert not set(deep) & {node for node, _ in found}


def test_an_outcome_is_as_likely_as_its_end_and_its_bonus_together() -> None:
    guesses = [[(7, 0.5), (8, 0.25), (9, 0.25)], [(5, 0.2)], []]
    # 0.6 * 0.5, 0.3 * 1, 0.6 * 0.25 twice: what is guessed at an end counts as all there is.
    assert likely_outcomes([0.6, 0.3, 0.1], guesses, 4) == [(0, 7), (1, 5), (0, 8), (0, 9)]
    assert likely_outcomes([0.6, 0.3, 0.1], guesses, 1) == [(0, 7)]
    assert likely_outcomes([0.2, 0.3], [[(1, 0.5), (2, 0.5)], [(3, 0.9), (4, 0.1)]], 2) == [(1, 3), (0, 1)]


def test_equals_keep_their_order_and_nothing_is_lost_to_zeros() -> None:
    assert likely_outcomes([0.5, 0.5], [[(1, 0.0)], [(2, 0.4)]], 3) == [(1, 2), (0, 1)]
    assert likely_outcomes([0.5, 0.5], [[(1, 0.1)], [(2, 0.1)]], 3) == [(0, 1), (1, 2)]
    assert likely_outcomes([], [], 3) == []
