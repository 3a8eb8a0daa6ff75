"""Bookkeeping of a paged pool: which pages are free.

Knows numbers only: neither tensors, nor what a page holds, nor who holds it.
"""

from __future__ import annotations

from array import array

import numpy as np

_FEW = 32  # up to so many pages are marked one by one, sooner than numpy begins


class OutOfPages(Exception):
    """The pool has fewer free pages than asked for; nothing was taken."""

    def __init__(self, wanted: int, num_free: int) -> None:
        super().__init__(f"{wanted} pages wanted, {num_free} free")
        self.wanted = wanted
        self.num_free = num_free


class PagePool:
    """A fixed number of pages, handed out by id, the most recently freed first (they are warm in the cache).

    A page holds `page_size` positions; page p stands for slots p * page_size to (p + 1) * page_size - 1.
    """

    def __init__(self, num_pages: int, page_size: int = 1) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"num_pages {num_pages} and page_size {page_size} must be at least 1")
        self.num_pages = num_pages
        self.page_size = page_size
        # A stack whose top is its end: descending, so that a new pool hands out 0, 1, 2, ...
        self._free = array("i", range(num_pages - 1, -1, -1))
        self._is_free = bytearray(b"\x01") * num_pages
        self._marks = np.frombuffer(self._is_free, np.bool_)  # the same, for numpy

    @property
    def num_free(self) -> int:
        """Pages that may be allocated now."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` page ids, the caller's until it frees them. Raises OutOfPages, taking nothing."""
        if count < 0:
            raise ValueError(f"cannot allocate {count} pages")
        first = len(self._free) - count
        if first < 0:
            raise OutOfPages(count, len(self._free))
        ids = self._free[first:].tolist()
        ids.reverse()
        del self._free[first:]
        if count > _FEW:
            self._marks[ids] = False
        else:
            is_free = self._is_free
            for page in ids:
                is_free[page] = False
        return ids

    def free(self, pages: np.ndarray | list[int]) -> None:
        """Takes pages back. Raises ValueError, freeing nothing, for an id that is unknown, free, or named twice."""
        ids: list[int] = pages if isinstance(pages, list) else pages.tolist()
        if not ids:
            return
        if isinstance(ids[0], list) or min(ids) < 0 or max(ids) >= self.num_pages:
            raise ValueError(f"page ids must be one row within 0..{self.num_pages - 1}")
        many = len(ids) > _FEW
        if self._marks[ids].any() if many else any(map(self._is_free.__getitem__, ids)):
            raise ValueError(f"page {next(page for page in ids if self._is_free[page])} is free already")
        if len(set(ids)) != len(ids):
            raise ValueError("a page is freed twice in one call")
        if many:
            self._marks[ids] = True
        else:
            for page in ids:
                self._is_free[page] = True
        self._free.extend(ids[::-1])  # the last one freed is on top of the stack

    def check(self) -> None:
        """Raises RuntimeError unless the free stack and the free marks name the same pages, each once."""
        stack = np.array(self._free, np.int32)
        marked = np.flatnonzero(self._marks)
        if not np.array_equal(np.sort(stack), marked):
            raise RuntimeError(f"the free stack holds {stack.size} pages, {marked.size} are marked free")
