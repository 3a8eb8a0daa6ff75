import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kernels.philox import uniform
from kernels.sampling import NO_TOKEN, Filters, choose, draw, filtered_row, sample
from tests.kernels import oracles

# Few distinct values, so that ties are common; -inf is a masked token.
LOGIT = st.one_of(st.sampled_from([-math.inf, -1.0, 0.0, 0.5, 2.0]), st.floats(-30, 30, width=32))
UNIT = st.floats(0.0, 1.0, exclude_max=True)
FILTERS = st.builds(
    Filters,
    temperature=st.sampled_from([0.0, 0.05, 0.7, 1.0, 1.9]),
    top_k=st.sampled_from([0, 1, 2, 5, 1000]),
    top_p=st.sampled_from([0.01, 0.25, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.4, 1.0]),
)
MIXED = [
    Filters(temperature=0.0),
    Filters(),
    Filters(temperature=0.8, top_k=50),
    Filters(temperature=1.3, top_p=0.9),
    Filters(temperature=0.8, min_p=0.05),
    Filters(temperature=0.9, top_k=300, top_p=0.8, min_p=0.01),
]


def random_logits(seed: int, num_rows: int, vocab_size: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def check_against_oracle(row: np.ndarray, f: Filters, us: list[float]) -> None:
    expected = oracles.filtered(row.tolist(), f.temperature, f.top_k, f.top_p, f.min_p)
    tokens = [NO_TOKEN if expected is None else oracles.inverse_cdf(expected, u) for u in us]
    probs = filtered_row(row, f)
    if expected is None or probs is None:
        assert expected is probs
    else:
        np.testing.assert_allclose(probs, expected, rtol=1e-11, atol=0)
    assert [draw(row, f, u) for u in us] == tokens


@settings(deadline=None)
@given(st.lists(LOGIT, min_size=1, max_size=30), FILTERS, UNIT)
def test_small_rows_follow_the_rules(logits: list[float], filters: Filters, u: float) -> None:
    try:
        check_against_oracle(np.array(logits, dtype=np.float32), filters, [u])
    except oracles.TooClose:
        assume(False)


@pytest.mark.parametrize("filters", [*MIXED, Filters(top_k=2500), Filters(top_k=100, top_p=0.5), Filters(top_p=0.9999)])
@pytest.mark.parametrize("scale", [0.0, 0.3, 4.0])
@pytest.mark.parametrize("vocab_size", [255, 256, 5000])
def test_large_rows_follow_the_rules(filters: Filters, scale: float, vocab_size: int) -> None:
    # Large enough for group maxima, the histogram and several blocks of the running sum; scale 0 is one great tie.
    rows = random_logits(vocab_size, 2, vocab_size, scale).numpy()
    rows[1, ::3] = -math.inf
    for row in rows:
        check_against_oracle(row, filters, [0.0, 0.314159, 0.771234, 0.999871])


def kept_by(row: np.ndarray, filters: Filters) -> int:
    """How many tokens filters keep."""
    probs = filtered_row(row, filters)
    assert probs is not None
    return int(np.count_nonzero(probs))


def is_near_an_edge(row: np.ndarray, filters: Filters, by: float = 1e-5) -> bool:
    """Whether a little more or less of a filter, or of a logit at its edge, keeps other tokens."""
    count, falling = kept_by(row, filters), np.sort(row)[::-1]
    if any(0 < end < len(row) and falling[end - 1] - falling[end] < by for end in (count, filters.top_k)):
        return True
    for up, down in ((1.0 - by, 1.0 + by), (1.0 + by, 1.0 - by)):
        top_p = filters.top_p if filters.top_p == 1.0 else min(1.0, filters.top_p * up)
        if kept_by(row, replace(filters, top_p=top_p, min_p=filters.min_p * down)) != count:
            return True
    return False


@settings(deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([0.2, 0.8, 1.0, 1.7]), st.sampled_from([0, 1, 5, 40]),
       st.sampled_from([0.3, 0.9, 1.0]), st.sampled_from([0.0, 0.03, 0.5]))  # fmt: skip
def test_equals_transformers_warpers(seed: int, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = random_logits(seed, 1, 200)
    filters = Filters(temperature, top_k, top_p, min_p)
    # Rounding in float32 may move a filter's edge, and equal logits are its own rule there.
    assume(not is_near_an_edge(logits[0].numpy(), filters))
    warpers: list[Any] = [TemperatureLogitsWarper(temperature)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1.0 else []
    warpers += [MinPLogitsWarper(min_p)] if min_p else []
    scores = logits
    for warper in warpers:
        scores = warper(torch.zeros(1, 1, dtype=torch.long), scores)
    expected = scores[0].double().softmax(dim=-1).numpy()
    actual = filtered_row(logits[0].numpy(), filters)
    assert actual is not None
    np.testing.assert_array_equal(actual > 0, expected > 0)
    np.testing.assert_allclose(actual, expected, rtol=1e-4)


def test_rows_never_influence_one_another() -> None:
    logits = random_logits(3, 12, 3000)
    logits[2, 7], logits[5, 0], logits[9] = math.nan, math.inf, -math.inf
    filters = [MIXED[i % len(MIXED)] for i in range(12)]
    u = uniform(11, 0, np.arange(12), 0)
    together = choose(logits, filters, u)
    assert np.flatnonzero(together == NO_TOKEN).tolist() == [2, 5, 9]
    for some in ([0], [2], [5], [6], [9, 10], [7, 0, 2, 11, 4]):
        again = choose(logits[some], [filters[i] for i in some], u[some])
        assert again.tolist() == together[some].tolist()
    assert [i for i in range(12) if filtered_row(logits[i].numpy(), filters[i]) is None] == [2, 5, 9]


def test_counts_must_agree() -> None:
    with pytest.raises(ValueError, match="shorter"):
        choose(random_logits(0, 2, 10), [Filters()], [0.5, 0.5])


def test_logits_are_left_alone() -> None:
    logits = random_logits(4, 6, 1000)
    before = logits.clone()
    choose(logits, MIXED, uniform(1, 0, np.arange(6), 0))
    assert torch.equal(logits, before)


def test_ties_go_to_the_lowest_id() -> None:
    row = np.array([1.0, 3.0, 3.0, 0.0, 3.0], dtype=np.float32)
    assert draw(row, Filters(temperature=0.0), 0.9) == 1
    assert draw(row, Filters(top_k=1), 0.9) == 1
    two, half = filtered_row(row, Filters(top_k=2)), filtered_row(row, Filters(top_p=0.3))
    assert two is not None
    assert half is not None
    assert two.tolist() == [0.0, 0.5, 0.5, 0.0, 0.0]
    assert np.flatnonzero(half).tolist() == [1]


def test_filters_renormalise_between_each_other() -> None:
    # Of 0.5, 0.3, 0.2 the first two are left by top-k: 0.625 of them, and top-p 0.6 is met by one token, not two.
    row = np.log(np.array([0.5, 0.3, 0.2], dtype=np.float32))
    probs = filtered_row(row, Filters(top_k=2, top_p=0.6))
    assert probs is not None
    assert probs.tolist() == [1.0, 0.0, 0.0]


def test_a_tiny_temperature_is_greedy() -> None:
    row = random_logits(5, 1, 100)[0].numpy()
    for temperature in (1e-45, 1e-310):
        assert draw(row, Filters(temperature=temperature), 0.999) == row.argmax()


def test_masked_tokens_are_never_drawn() -> None:
    row = np.full(1000, -math.inf, dtype=np.float32)
    row[[400, 700]] = 1.0, 1.0
    for filters in (Filters(), Filters(top_k=10), Filters(top_p=0.99), Filters(min_p=0.1)):
        assert [draw(row, filters, u) for u in (0.0, 0.49, 0.5, 1.0 - 2.0**-53)] == [400, 400, 700, 700]


def test_draws_follow_the_distribution() -> None:
    row = random_logits(8, 1, 40, 1.5)[0].numpy()
    filters = Filters(temperature=0.9, top_k=12, top_p=0.95)
    probs = filtered_row(row, filters)
    assert probs is not None
    tokens = [draw(row, filters, u) for u in uniform(5, 0, np.arange(20_000), 0)]
    counts = np.bincount(tokens, minlength=40)
    assert not counts[probs == 0].any()
    assert stats.chisquare(counts[probs > 0], probs[probs > 0] * len(tokens)).pvalue > 1e-4


@settings(deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.1, 0.5, 2.0]), min_size=1, max_size=600), UNIT)
def test_sample_takes_any_sum(weights: list[float], u: float) -> None:
    if not any(weights):
        assert sample(np.array(weights), u) == NO_TOKEN
        return
    try:
        expected = oracles.inverse_cdf(weights, u)
    except oracles.TooClose:
        assume(False)
        return
    assert sample(np.array(weights), u) == expected


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1.0}, {"temperature": math.nan}, {"temperature": math.inf}, {"top_k": -1}, {"top_p": 0.0},
     {"top_p": 1.5}, {"top_p": math.nan}, {"min_p": -0.1}, {"min_p": math.nan}],
)  # fmt: skip
def test_filters_refuse_nonsense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Filters(**wrong)
