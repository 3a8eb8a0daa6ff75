"""An n-gram trie over token texts: what followed these tokens before?

Many tries in one arena: each root is a corpus of its own (a tenant's, a session's, everybody's), and all share one
capacity and one order of eviction, but for kept ones, of which nothing is evicted. Rules as in SGLang's n-gram cache,
without its padding nodes; see trie_rows.py for the storage (32 bytes a node, and 6 to 12 more where it has siblings),
trie_nodes.py for growing and trie_match.py for drafting.

Not thread-safe, but the compiled loops release the GIL, and growing is split so that readers may go on meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from draft_service.drafters import trie_match, trie_nodes
from draft_service.drafters.trie_ranks import RANK_COLUMNS
from draft_service.drafters.trie_rows import (
    FRESH,
    HASHED,
    KEPT,
    NUM_COLUMNS,
    NUM_STATE,
    RANKED,
    UNRANKED,
    USED,
    rehash,
)
from outrider.wire import Ids

MAX_ROOTS_PER_MATCH = 31
_MIN_ROWS = 1 << 10


@dataclass(frozen=True, slots=True)
class MatchRules:
    """How a tree is drawn from the trie; the flags --speculative-ngram-* of the same names."""

    min_match: int = 1
    max_match: int = 12
    min_breadth: int = 1
    max_breadth: int = 10
    match_type: Literal["BFS", "PROB"] = "BFS"


@dataclass(frozen=True, slots=True)
class Match:
    """A tree drawn from the trie, level by level.

    tokens, parents: int32 [n], -1 the root; probabilities: float64 [n], of the paths; sources: int32 [n], bit i set
    where the path is below the i-th root that was given.
    """

    tokens: Ids
    parents: Ids
    probabilities: NDArray[np.float64]
    sources: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Growth:
    """Larger arrays, filled and not yet in use."""

    nodes: NDArray[np.int32]
    table: NDArray[np.int32]
    ranks: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class OwnTexts:
    """Texts that only one match reads: a trie of their own, and their roots int32 [n] in it."""

    trie: NgramTrie
    roots: Ids


class NgramTrie:
    """A bounded trie of token paths up to `branch_length` long, below any number of roots.

    `capacity` counts nodes, roots included; arrays start small and double up to it. At most `max_kept` of them may be
    kept roots or below these: whoever inserts there sees to that, by `most_nodes`.
    """

    def __init__(self, capacity: int, *, branch_length: int = 18, min_match: int = 1, max_kept: int = 0) -> None:
        if not 0 < min_match < branch_length:
            raise ValueError(f"min_match is {min_match}; it must be from 1 to {branch_length - 1}")
        if capacity <= branch_length:
            raise ValueError(f"capacity is {capacity}; it must be above branch_length, {branch_length}")
        if not 0 <= max_kept < capacity - branch_length:
            raise ValueError(f"max_kept is {max_kept}; it must be from 0 to {capacity - branch_length - 1}")
        self.capacity = capacity
        self.max_kept = max_kept
        self.branch_length = branch_length
        self.min_match = min_match
        rows = min(capacity + 1, max(_MIN_ROWS, 2 * branch_length))
        self._nodes = np.zeros((rows, NUM_COLUMNS), np.int32)
        self._table = np.zeros(_table_size(rows), np.int32)
        self._ranks = np.zeros((2, RANK_COLUMNS), np.int32)
        self._state = np.zeros(NUM_STATE, np.int64)
        self._state[USED] = self._state[FRESH] = self._state[RANKED] = 1
        self.num_roots = 0
        self._kept_roots: set[int] = set()

    @property
    def num_nodes(self) -> int:
        """Nodes in use, roots included."""
        return int(self._state[USED]) - 1

    @property
    def num_kept(self) -> int:
        """Nodes that are never evicted, being or having a kept root."""
        return int(self._state[KEPT])

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        return self._nodes.nbytes + self._table.nbytes + self._ranks.nbytes

    def most_nodes(self, num_tokens: int) -> int:
        """Nodes that a text may take, root included, if none of its paths is there and it does not repeat itself."""
        short = min(num_tokens, self.branch_length)
        return 1 + short * (short + 1) // 2 + (num_tokens - short) * self.branch_length

    def new_root(self, *, kept: bool = False) -> int | None:
        """An empty trie's root, or None when so many roots would leave no room for a path."""
        num_evictable = self.num_roots - len(self._kept_roots)
        if not kept and num_evictable + 1 + self.branch_length > self.capacity - self.max_kept:
            return None
        if self._state[USED] == len(self._nodes) and self.growth_due():
            self.adopt(self.grown())
        root = int(trie_nodes.new_root(self._nodes, self._table, self._ranks, self._state, kept))
        self.num_roots += 1
        if kept:
            self._kept_roots.add(root)
        return root

    def insert_some(self, root: int, tokens: Ids, first: int, last: int, counted: int = 0) -> int:
        """Inserts the paths that start at positions `first` to `last` - 1 of `tokens`; returns the next start.

        It stops below `last` when the arrays must grow first. `counted`: tokens before it were inserted by an earlier
        call (with the same starts), and are not counted again. `tokens` must be as plain() gives them.
        """
        return int(
            trie_nodes.insert_some(
                self._nodes, self._table, self._ranks, self._state, self.capacity + 1, root, tokens, first, last,
                counted, self.branch_length, self.min_match,
            )
        )  # fmt: skip

    def first_start(self, counted: int) -> int:
        """The first start whose path reaches past `counted` tokens."""
        return max(0, counted - self.branch_length + 1)

    def growth_due(self) -> bool:
        """Whether the rows may still double."""
        return len(self._nodes) < self.capacity + 1

    def grown(self) -> Growth:
        """Copies with room for more. Reads only: matches may go on meanwhile, insertions may not."""
        rows, used_rows = len(self._nodes), int(self._state[FRESH])
        nodes = self._nodes
        if rows - int(self._state[USED]) < self.branch_length and self.growth_due():
            nodes = np.empty((min(2 * rows, self.capacity + 1), NUM_COLUMNS), np.int32)
            nodes[:used_rows] = self._nodes[:used_rows]
        table = self._table
        if (int(self._state[HASHED]) + 2) * 10 > len(table) * 7:
            table = np.zeros(2 * len(table), np.int32)
            rehash(self._table, table, nodes)
        ranks = self._ranks
        if self._state[UNRANKED] == 0 and self._state[RANKED] == len(ranks):
            ranks = np.concatenate([ranks, np.zeros_like(ranks)])
        return Growth(nodes, table, ranks)

    def adopt(self, growth: Growth) -> None:
        """Takes the grown copies into use."""
        self._nodes, self._table, self._ranks = growth.nodes, growth.table, growth.ranks

    def drop_some(self, root: int, limit: int) -> bool:
        """Removes at most about `limit` nodes below a root; True when the root is gone too."""
        gone = bool(trie_nodes.drop_some(self._nodes, self._table, self._ranks, self._state, root, limit))
        if gone:
            self.num_roots -= 1
            self._kept_roots.discard(root)
        return gone

    def match(
        self,
        roots: Ids,
        suffix: Ids,
        rules: MatchRules,
        *,
        num_nodes: int,
        max_depth: int,
        vocab_size: int,
        own: OwnTexts | None = None,
    ) -> Match:
        """A tree of at most `num_nodes` continuations of `suffix`, no deeper than `max_depth`, ids below `vocab_size`.

        roots: int32 [at most 31], those of equal match length are read in this order; those of `own` before them.
        """
        first = self if own is None else own.trie
        num_own = 0 if own is None else len(own.roots)
        roots = roots if own is None else np.concatenate([own.roots, roots])
        return Match(
            *trie_match.draft_tree(
                first._nodes, first._table, first._ranks, num_own, self._nodes, self._table, self._ranks, roots,
                plain(suffix), rules.min_match, rules.max_match, rules.min_breadth, rules.max_breadth,
                rules.match_type == "PROB", num_nodes, max_depth, vocab_size,
            )
        )  # fmt: skip


def plain(tokens: Ids) -> Ids:
    """The array if it is writable and contiguous, else a copy: the one form that the loops are compiled for."""
    return np.require(tokens, np.int32, ["C", "W"])


def _table_size(rows: int) -> int:
    """A power of two that starts a table for `rows` nodes."""
    return 1 << max(6, (rows // 4).bit_length())
