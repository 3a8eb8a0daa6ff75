"""PagePool under random histories of allocate and free."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from engine.pages import OutOfPages, PagePool

NUM_PAGES = 24


class PoolMachine(RuleBasedStateMachine):
    """The model: a set of pages that are out."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES)
        self.out: set[int] = set()

    @rule(target=held, count=st.integers(0, NUM_PAGES + 4))
    def allocate(self, count: int) -> object:
        if count > NUM_PAGES - len(self.out):
            with pytest.raises(OutOfPages):
                np.array(self.pool.take(count), np.int32)
            return multiple()
        pages = np.array(self.pool.take(count), np.int32)
        assert pages.dtype == np.int32
        assert pages.shape == (count,)
        assert len(set(pages.tolist())) == count
        assert self.out.isdisjoint(pages.tolist())
        self.out |= set(pages.tolist())
        return pages

    @rule(pages=consumes(held), data=st.data())
    def free_in_any_order(self, pages: np.ndarray, data: st.DataObject) -> None:
        order = np.array(data.draw(st.permutations(pages.tolist())), dtype=np.int32)
        cut = data.draw(st.integers(0, order.size))
        self.pool.free(order[:cut])
        self.pool.free(order[cut:])
        self.out -= set(pages.tolist())
        if order.size:
            with pytest.raises(ValueError, match="free already"):
                self.pool.free(order[:1])

    @invariant()
    def counts_agree(self) -> None:
        self.pool.check()
        assert self.pool.num_free == NUM_PAGES - len(self.out)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPool = PoolMachine.TestCase


def test_a_new_pool_hands_out_ascending_pages() -> None:
    pool = PagePool(5, page_size=4)
    assert np.array(pool.take(3), np.int32).tolist() == [0, 1, 2]
    assert pool.page_size == 4


@pytest.mark.parametrize("pages", [[-1], [5], [[0, 1]], [0, 0]])
def test_a_bad_free_changes_nothing(pages: list[int]) -> None:
    pool = PagePool(5)
    np.array(pool.take(5), np.int32)
    with pytest.raises(ValueError, match="page"):
        pool.free(np.array(pages))
    pool.check()
    assert pool.num_free == 0


@pytest.mark.parametrize(("num_pages", "page_size"), [(0, 1), (4, 0)])
def test_an_empty_pool_is_refused(num_pages: int, page_size: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        PagePool(num_pages, page_size)


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        PagePool(3).take(-1)


def test_check_finds_damage() -> None:
    pool = PagePool(3)
    pool._is_free[0] = False
    with pytest.raises(RuntimeError, match="marked"):
        pool.check()
