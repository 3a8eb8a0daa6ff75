"""How much of a prediction is in an output."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.prediction import PredictionCount, PredictionMatch

TOKENS = st.lists(st.integers(0, 5), max_size=40)


def longest_common_subsequence(first: list[int], second: list[int]) -> int:
    """The length of it, by the table of all prefixes."""
    row = [0] * (len(second) + 1)
    for one in first:
        before, row = row, [0]
        for index, other in enumerate(second):
            row.append(before[index] + 1 if one == other else max(before[index + 1], row[-1]))
    return row[-1]


@given(TOKENS, st.lists(TOKENS, max_size=4))
def test_the_match_is_the_longest(predicted: list[int], steps: list[list[int]]) -> None:
    match, output = PredictionMatch(predicted), []
    for step in steps:
        match.feed(step)
        output += step
        accepted = longest_common_subsequence(predicted, output)
        assert match.count == PredictionCount(accepted, len(predicted) - accepted)
