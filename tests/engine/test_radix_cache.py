"""The radix cache against a plain dictionary of every cached page."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from engine.pages import OutOfPages, PagePool
from engine.radix_cache import Prefix, RadixCache

NUM_PAGES = 24
SALTS = [b"", b"s", bytes([1, 0, 0, 0]), bytes([1, 0, 0, 0] * 3)]  # some are pages of tokens too


class CacheMachine(RuleBasedStateMachine):
    """Sessions come with tokens over a tiny alphabet, read what is cached, add what they computed, and go."""

    locked = Bundle("locked")

    @initialize(page_size=st.sampled_from([1, 2, 3]))
    def begin(self, page_size: int) -> None:
        self.page_size = page_size
        self.pool = PagePool(NUM_PAGES, page_size)
        self.cache = RadixCache(self.pool)
        # page -> the salt, and all tokens up to the page's end, as somebody wrote them
        self.contents: dict[int, tuple[bytes, tuple[int, ...]]] = {}
        self.held: list[tuple[bytes, tuple[int, ...], Prefix]] = []

    @rule(target=locked, salt=st.sampled_from(SALTS), tokens=st.lists(st.integers(0, 2), max_size=14).map(tuple))
    def come(self, salt: bytes, tokens: tuple[int, ...]) -> object:
        found = self.cache.match(np.array(tokens, np.int32), salt)
        self._holds(found, salt, tokens[: len(found.pages) * self.page_size])
        tokens = tokens[: len(tokens) // self.page_size * self.page_size]
        ids = np.array(tokens, np.int32)
        prefix = self.cache.match(ids, salt)
        assert prefix.pages.tolist() == found.pages.tolist()
        self.cache.lock(prefix)
        missing = len(tokens) // self.page_size - len(prefix.pages)
        try:
            if missing > self.pool.num_free:
                self.cache.evict(missing - self.pool.num_free)
            new = np.array(self.pool.take(missing), np.int32)
        except OutOfPages:
            assert self.cache.num_evictable == 0
            self.cache.unlock(prefix)
            return multiple()
        for offset, page in enumerate(new.tolist(), start=len(prefix.pages) + 1):
            self.contents[page] = salt, tokens[: offset * self.page_size]
        inserted = self.cache.insert(ids, np.concatenate([prefix.pages, new]), salt)
        self._holds(inserted, salt, tokens)
        self.cache.lock(inserted)
        self.cache.unlock(prefix)
        entry = (salt, tokens, inserted)
        self.held.append(entry)
        return entry

    @rule(entry=consumes(locked))
    def go(self, entry: tuple[bytes, tuple[int, ...], Prefix]) -> None:
        self.held.remove(entry)
        self.cache.unlock(entry[2])

    @rule(salt=st.sampled_from(SALTS), tokens=st.lists(st.integers(0, 2), min_size=3, max_size=9).map(tuple))
    def compute_twice(self, salt: bytes, tokens: tuple[int, ...]) -> None:
        """Two sessions computed the same pages at once: the second one's go back to the pool."""
        count = len(tokens) // self.page_size
        if self.pool.num_free < count:
            return
        tokens = tokens[: count * self.page_size]
        pages = np.array(self.pool.take(count), np.int32)
        for offset, page in enumerate(pages.tolist(), start=1):
            self.contents[page] = salt, tokens[: offset * self.page_size]
        self._holds(self.cache.insert(np.array(tokens, np.int32), pages, salt), salt, tokens)

    @rule(count=st.integers(0, NUM_PAGES))
    def evict(self, count: int) -> None:
        evictable, free = self.cache.num_evictable, self.pool.num_free
        freed = self.cache.evict(count)
        assert freed == min(count, evictable)
        assert self.pool.num_free == free + freed

    @invariant()
    def is_whole(self) -> None:
        self.cache.check()
        self.pool.check()
        assert self.pool.num_free + self.cache.num_pages == NUM_PAGES
        for salt, tokens, prefix in self.held:
            self._holds(prefix, salt, tokens)

    def _holds(self, prefix: Prefix, salt: bytes, tokens: tuple[int, ...]) -> None:
        assert len(prefix.pages) * self.page_size == len(tokens)
        for offset, page in enumerate(prefix.pages.tolist(), start=1):
            assert self.contents[page] == (salt, tokens[: offset * self.page_size])


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def _ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def test_least_recently_used_leaf_goes_first() -> None:
    pool = PagePool(6)
    cache = RadixCache(pool)
    cache.insert(_ids(1, 2), np.array(pool.take(2), np.int32))
    cache.insert(_ids(1, 3), np.concatenate([cache.match(_ids(1)).pages, np.array(pool.take(1), np.int32)]))
    cache.match(_ids(1, 2))
    cache.evict(1)
    assert len(cache.match(_ids(1, 3)).pages) == 1
    assert len(cache.match(_ids(1, 2)).pages) == 2


def test_locked_prefix_stays() -> None:
    pool = PagePool(4)
    cache = RadixCache(pool)
    prefix = cache.insert(_ids(1, 2, 3), np.array(pool.take(3), np.int32))
    cache.lock(prefix)
    assert cache.evict(3) == 0
    cache.unlock(prefix)
    assert cache.evict(3) == 3
    with pytest.raises(ValueError, match="unlocked more often"):
        cache.unlock(prefix)


def test_insert_refuses_broken_pages() -> None:
    pool = PagePool(4, 2)
    with pytest.raises(ValueError, match="do not fill"):
        RadixCache(pool).insert(_ids(1, 2, 3), np.array(pool.take(1), np.int32))


def test_what_stays_of_a_long_text_keeps_no_more_in_memory() -> None:
    pool = PagePool(1000, 1)
    cache = RadixCache(pool)
    text = np.arange(900, dtype=np.int32)
    cache.insert(text, np.array(pool.take(900), np.int32))
    prefix = cache.match(_ids(*range(10)))
    cache.lock(prefix)
    cache.evict(890)
    (node,) = cache.root.children.values()
    assert node.tokens.tolist() == list(range(10))
    assert all(part.base is None or part.base.size <= 20 for part in (node.tokens, node.pages))
