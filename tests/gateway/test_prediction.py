"""How much of a prediction is in an output."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.prediction import Prediction, PredictionMatch
from tests.gateway.allocations import bytes_per_step

WORDS = list(range(8000))
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
    match, output = PredictionMatch(Prediction(predicted)), []
    for step in steps:
        match.feed(step)
        output += step
        assert match.accepted == longest_common_subsequence(predicted, output)


def test_choices_share_what_is_laid_out() -> None:
    prediction = Prediction(WORDS)
    matches = [PredictionMatch(prediction) for _ in range(3)]
    for match in matches:
        match.feed([5, len(WORDS)])
    assert prediction.places.cache_info().misses == 1
    assert bytes_per_step([lambda: PredictionMatch(prediction)] * 4) < len(WORDS) / 8


def test_places_of_few_tokens_are_kept_of_a_long_prediction() -> None:
    most = [Prediction(WORDS * times).places.cache_info().maxsize or 0 for times in (1, 2, 4)]
    assert most == sorted(most, reverse=True)
    assert most[-1] * len(WORDS) * 4 / 8 < 1.1 * 2**20
