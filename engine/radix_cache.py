"""Whose KV is already there: a radix tree from token sequences to the pages that hold them.

Sequences are kept in whole pages. A node is a run of pages with one continuation or several; sessions lock the path
that they read, and the least recently used unlocked leaf goes first when pages are wanted. Pages in the tree belong to
it; nobody writes to them again. Sequences of different salts share nothing. Knows neither tensors nor sessions. After
SGLang's RadixAttention (Zheng et al., 2023).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.pages import PagePool

Ids = NDArray[np.int32]


@dataclass(slots=True, eq=False)
class Node:
    """A run of whole pages below `parent`; the root has none."""

    tokens: Ids  # int32 [num_pages * page_size]
    pages: Ids  # int32 [num_pages]
    parent: Node | None
    key: bytes = b""  # under which its parent has it: its first page of tokens, at the root after the salt
    children: dict[bytes, Node] = field(default_factory=dict)  # by key
    locks: int = 0  # sessions reading this node or one below it
    last_used: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """A cached prefix: pages int32 [n] for the first n * page_size tokens, and the node it ends at."""

    pages: Ids
    node: Node


class RadixCache:
    """The tree and its part of a pool's pages. One thread at a time may call it."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._page_size = pool.page_size
        empty = np.empty(0, np.int32)
        self.root = Node(empty, empty, None, locks=1)
        self._clock = 0
        self._leaves: list[tuple[int, int, Node]] = []  # a heap of leaves by last use; entries may be out of date
        self._pushes = 0
        self.num_pages = 0
        self.num_locked_pages = 0

    @property
    def num_evictable(self) -> int:
        """Pages that nobody reads."""
        return self.num_pages - self.num_locked_pages

    def match(self, tokens: Ids, salt: bytes = b"") -> Prefix:
        """The longest cached prefix of `tokens`, in whole pages. It may be evicted unless it is locked."""
        node, pages = self.root, [self.root.pages]
        pos = 0
        while True:
            child = node.children.get(self._key(tokens, pos, salt))
            if child is None:
                break
            shared = self._shared_pages(child, tokens[pos:])
            if shared < len(child.pages):
                child = self._split(child, shared)
            node = child
            self._touch(node)
            pages.append(node.pages)
            pos += len(node.tokens)
        return Prefix(np.concatenate(pages), node)

    def lock(self, prefix: Prefix) -> None:
        """Keeps a prefix from being evicted until it is unlocked as often."""
        for node in self._path(prefix.node):
            if node.locks == 0:
                self.num_locked_pages += len(node.pages)
            node.locks += 1

    def unlock(self, prefix: Prefix) -> None:
        """Undoes one lock."""
        for node in self._path(prefix.node):
            if node.locks == 0:
                raise ValueError("a prefix is unlocked more often than locked")
            node.locks -= 1
            if node.locks == 0:
                self.num_locked_pages -= len(node.pages)
                self._offer(node)

    def insert(self, tokens: Ids, pages: Ids, salt: bytes = b"") -> Prefix:
        """Gives the tree the pages of `tokens` (len(pages) whole pages); returns the prefix as the tree now has it.

        Where a page's tokens were cached already, the tree's own page stays and the given one is freed, unless they
        are the same page.
        """
        if len(tokens) != len(pages) * self._page_size:
            raise ValueError(f"{len(tokens)} tokens do not fill {len(pages)} pages of {self._page_size}")
        known = self.match(tokens, salt)
        num_known = len(known.pages)
        ours = pages[:num_known]
        self._pool.free(ours[ours != known.pages])
        if num_known == len(pages):
            return known
        start = num_known * self._page_size
        node = Node(tokens[start:].copy(), pages[num_known:].copy(), known.node, self._key(tokens, start, salt))
        known.node.children[node.key] = node
        self.num_pages += len(node.pages)
        self._touch(node)
        self._offer(node)
        return Prefix(np.concatenate([known.pages, node.pages]), node)

    def evict(self, num_pages: int) -> int:
        """Frees `num_pages` pages, or as many as nobody reads, least recently used first; returns how many."""
        freed = 0
        while freed < num_pages and self._leaves:
            last_used, _, node = heapq.heappop(self._leaves)
            if not self._is_evictable(node) or node.last_used != last_used:
                continue
            freed += self._drop(node, num_pages - freed)
        return freed

    def clear(self) -> int:
        """Evicts all that nobody reads; returns the number of pages."""
        return self.evict(self.num_evictable)

    def check(self) -> None:
        """Raises RuntimeError where the tree contradicts itself."""
        num_pages = num_locked = 0
        pending = [self.root]
        while pending:
            node = pending.pop()
            pending += node.children.values()
            num_pages += len(node.pages)
            num_locked += len(node.pages) if node.locks else 0
            if len(node.tokens) != len(node.pages) * self._page_size:
                raise RuntimeError("a node's tokens do not fill its pages")
            for key, child in node.children.items():
                if child.parent is not node or key != child.key or not key.endswith(self._key(child.tokens, 0)):
                    raise RuntimeError("a child is not where it belongs")
                if node.locks < child.locks and node is not self.root:
                    raise RuntimeError("a node is locked less often than one below it")
        if (num_pages, num_locked) != (self.num_pages, self.num_locked_pages):
            raise RuntimeError(
                f"{num_pages} pages, {num_locked} locked; counted {self.num_pages}, {self.num_locked_pages}"
            )

    def _key(self, tokens: Ids, pos: int, salt: bytes = b"") -> bytes:
        """Key of the page at `pos`; empty, which is no node's, where the page is not whole."""
        if pos + self._page_size > len(tokens):
            return b""
        page = tokens[pos : pos + self._page_size].tobytes()
        return page if pos else salt + page

    def _shared_pages(self, node: Node, tokens: Ids) -> int:
        size = min(len(node.tokens), len(tokens))
        differs = np.flatnonzero(node.tokens[:size] != tokens[:size])
        return int(differs[0] if len(differs) else size) // self._page_size

    def _split(self, node: Node, num_pages: int) -> Node:
        """Makes the first pages of a node a node of their own, above it; locks on the node hold for both."""
        assert node.parent is not None
        cut = num_pages * self._page_size
        upper = Node(
            _part(node.tokens[:cut]), _part(node.pages[:num_pages]), node.parent, node.key, locks=node.locks,
            last_used=node.last_used,
        )  # fmt: skip
        node.parent.children[node.key] = upper
        node.tokens, node.pages, node.parent = _part(node.tokens[cut:]), _part(node.pages[num_pages:]), upper
        node.key = self._key(node.tokens, 0)
        upper.children[node.key] = node
        return upper

    def _drop(self, leaf: Node, num_pages: int) -> int:
        """Frees the last pages of a leaf, all of them or as many as wanted; a leaf that goes may free its parent."""
        assert leaf.parent is not None
        count = min(num_pages, len(leaf.pages))
        kept = len(leaf.pages) - count
        self._pool.free(leaf.pages[kept:])
        self.num_pages -= count
        if kept:
            leaf.tokens, leaf.pages = _part(leaf.tokens[: kept * self._page_size]), _part(leaf.pages[:kept])
            self._offer(leaf)
        else:
            del leaf.parent.children[leaf.key]
            leaf.pages = leaf.pages[:0]  # entries of it in the heap are out of date now
            self._offer(leaf.parent)
        return count

    def _touch(self, node: Node) -> None:
        self._clock += 1
        node.last_used = self._clock
        self._offer(node)

    def _offer(self, node: Node) -> None:
        """Enters a node among those that may go, at its last use."""
        if not self._is_evictable(node):
            return
        self._pushes += 1
        heapq.heappush(self._leaves, (node.last_used, self._pushes, node))
        if len(self._leaves) > 2 * self.num_pages + 64:
            current = [
                entry for entry in self._leaves if self._is_evictable(entry[2]) and entry[2].last_used == entry[0]
            ]
            self._leaves = list({id(entry[2]): entry for entry in current}.values())
            heapq.heapify(self._leaves)

    @staticmethod
    def _is_evictable(node: Node) -> bool:
        return not node.children and node.locks == 0 and len(node.pages) > 0

    @staticmethod
    def _path(node: Node) -> list[Node]:
        path: list[Node] = []
        while node.parent is not None:
            path.append(node)
            node = node.parent
        return path


def _part(view: Ids) -> Ids:
    """A part of a node's array, copied where it would keep alive more than twice its own size."""
    return view.copy() if isinstance(view.base, np.ndarray) and view.base.size > 2 * view.size else view
