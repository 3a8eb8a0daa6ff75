import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from kernels.philox import COIN_LANE, FINAL_LANE, philox4x32, uniform, uniform_one

WORD = st.integers(0, 2**32 - 1)

# Random123's published answers for ten rounds.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> np.ndarray:
    return np.array([int(word, 16) for word in text.split()], dtype=np.uint32)


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers(counter: str, key: str, answer: str) -> None:
    np.testing.assert_array_equal(philox4x32(words(counter), words(key)), words(answer))


def test_known_answers_together() -> None:
    counters, keys, answers = (np.stack([words(row[i]) for row in KNOWN_ANSWERS]) for i in range(3))
    np.testing.assert_array_equal(philox4x32(counters, keys), answers)


def test_layout_never_changes() -> None:
    # The first two words of the first known answer, and numbers recorded once: a seed repeats an answer for good.
    assert uniform_one(0, 0, 0, 0) == (0x6627E8D5E169C58D >> 11) / 2**53
    recorded = [uniform_one(2**64 - 1, 3, 1000, COIN_LANE), uniform_one(42, 0, 7, FINAL_LANE)]
    assert recorded == [0.2079188377229647, 0.022253272722070228]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), WORD, WORD, WORD), min_size=1, max_size=5))
def test_scalar_and_vector_agree(places: list[tuple[int, int, int, int]]) -> None:
    seeds = np.array([p[0] for p in places], dtype=np.uint64)
    choices, positions, lanes = (np.array([p[i] for p in places], dtype=np.int64) for i in (1, 2, 3))
    together = uniform(seeds, choices, positions, lanes)
    assert together.dtype == np.float64
    assert together.tolist() == [uniform_one(*place) for place in places]
    assert all(0.0 <= u < 1.0 for u in together)


def test_broadcasts() -> None:
    positions = np.arange(6)
    assert uniform(5, 0, positions, 0).shape == (6,)
    assert uniform(5, 0, 3, 0).shape == (1,)
    assert uniform(5, 0, positions, 0)[3] == uniform(5, 0, 3, 0)[0]


def test_every_part_of_the_place_matters() -> None:
    base = uniform_one(1, 1, 1, 1)
    others = [uniform_one(2, 1, 1, 1), uniform_one(1, 2, 1, 1), uniform_one(1, 1, 2, 1), uniform_one(1, 1, 1, 2)]
    assert len({base, *others, uniform_one(1 + 2**32, 1, 1, 1)}) == 6


@pytest.mark.parametrize("place", [(-1, 0, 0, 0), (2**64, 0, 0, 0), (0, 2**32, 0, 0), (0, 0, -1, 0), (0, 0, 0, 2**32)])
def test_out_of_range_is_refused(place: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="must be integers"):
        uniform(*place)
    with pytest.raises(ValueError, match="range"):
        uniform_one(*place)


def test_fractions_are_refused() -> None:
    with pytest.raises(ValueError, match="position must be integers"):
        uniform(0, 0, np.array([1.5]), 0)


def test_numbers_are_uniform_along_positions_and_seeds() -> None:
    for draws in (uniform(9, 0, np.arange(20_000), 0), uniform(np.arange(20_000, dtype=np.uint64), 0, 4, 0)):
        counts = np.bincount((draws * 64).astype(int), minlength=64)
        assert stats.chisquare(counts).pvalue > 1e-4
