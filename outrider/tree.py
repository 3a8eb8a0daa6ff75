"""Token trees: a root, which is the newest known token, and draft nodes below it.

Arrays hold the nodes without the root: `parents[i] < i`, and -1 is the root, as on the wire. Rows of masks and of
batches hold the root first: row 0 is the root, row i + 1 is node i.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from outrider.errors import InvalidArgument
from outrider.wire import Ids, check_token_ids

ROOT = -1
_LONG = 64  # nodes of a chain whose depths and mask are not kept


@dataclass(eq=False, slots=True)
class TokenTree:
    """Draft nodes in an order in which parents precede children; not to be changed.

    tokens: int32 [n]; parents: int32 [n], -1 for the root. The rest is made when it is first asked for.
    """

    tokens: Ids
    parents: Ids
    _row_depths: Ids | None = None
    _mask: NDArray[np.bool_] | None = None
    _words: list[int] | None = field(default=None, repr=False)
    _above: list[int] | None = field(default=None, repr=False)
    _children: dict[int, dict[int, int]] | None = field(default=None, repr=False)
    _depth: int = field(default=-1, repr=False)
    _is_chain: bool | None = field(default=None, repr=False)

    @classmethod
    def empty(cls) -> TokenTree:
        """A root without nodes."""
        return cls(np.empty(0, np.int32), np.empty(0, np.int32))

    @classmethod
    def chain(cls, tokens: Ids) -> TokenTree:
        """A tree of one branch."""
        return cls(tokens, np.arange(-1, len(tokens) - 1, dtype=np.int32))

    @classmethod
    def checked(cls, tokens: Ids, parents: Ids, *, vocab_size: int, max_nodes: int) -> TokenTree:
        """The tree, or InvalidArgument for what is malformed. Costs O(n)."""
        if len(tokens) != len(parents):
            raise InvalidArgument(f"{len(tokens)} tokens but {len(parents)} parents", field="parents")
        if len(tokens) > max_nodes:
            raise InvalidArgument(f"{len(tokens)} nodes; at most {max_nodes} are taken", field="tokens")
        check_token_ids(tokens, vocab_size=vocab_size, field="tokens")
        tree = cls(tokens, parents)
        if not tree.is_chain:
            tree._children = _checked_links(tree.words, tree.above)
        return tree

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def words(self) -> list[int]:
        """`tokens` as plain numbers: of few nodes they are looked up sooner."""
        words = self._words
        if words is None:
            self._words = words = self.tokens.tolist()
        return words

    @property
    def above(self) -> list[int]:
        """`parents` as plain numbers."""
        above = self._above
        if above is None:
            self._above = above = self.parents.tolist()
        return above

    @property
    def is_chain(self) -> bool:
        """Whether each node hangs below the one before it, and they are few: much is known of such trees at once."""
        is_chain = self._is_chain
        if is_chain is None:
            above = self.above
            self._is_chain = is_chain = len(above) <= _LONG and above == _chain_above(len(above))
        return is_chain

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` (-1: the root) that holds `token`."""
        siblings = self.links.get(node)
        return None if siblings is None else siblings.get(token)

    def children(self, node: int) -> list[int]:
        """Children of `node` (-1: the root), ascending."""
        return list(self.links.get(node, {}).values())

    def has_children(self, node: int) -> bool:
        """Whether any node hangs below `node` (-1: the root)."""
        return len(self) > 0 if node == ROOT else node in self.links

    @property
    def links(self) -> dict[int, dict[int, int]]:
        """The children of each node that has some, by token; -1 is the root."""
        links = self._children
        if links is None:
            if self.is_chain:
                links = {node - 1: {token: node} for node, token in enumerate(self.words)}
            else:
                links = {}
                for node, (token, parent) in enumerate(zip(self.words, self.above, strict=True)):
                    siblings = links.get(parent)
                    if siblings is None:
                        links[parent] = {token: node}
                    else:
                        siblings[token] = node
            self._children = links
        return links

    @property
    def depths(self) -> Ids:
        """int32 [n]: distance from the root, at least 1."""
        return self.row_depths[1:]

    @property
    def row_depths(self) -> Ids:
        """int32 [n+1]: the depth of each row, the root's first."""
        found = self._row_depths
        if found is None:
            if self.is_chain:  # made once for all chains: no step waits for that
                found = _chain_depths(len(self.above) + 1)
            else:
                depths = [0]
                for parent in self.above:
                    depths.append(depths[parent + 1] + 1)
                found = np.array(depths, np.int32)
            self._row_depths = found
        return found

    @property
    def depth(self) -> int:
        """The depth of the deepest node; 0 without nodes."""
        depth = self._depth
        if depth < 0:  # plain numbers are sooner than numpy begins
            self._depth = depth = len(self.above) if self.is_chain else max(self.row_depths.tolist())
        return depth

    def ancestor_mask(self) -> NDArray[np.bool_]:
        """bool [n+1, n+1]: row r sees itself, its ancestors and the root (row 0)."""
        if self._mask is None:
            size = len(self.above) + 1
            if self.is_chain:
                self._mask = _chain_mask(size)
                return self._mask
            rows = [bytearray(size)]
            rows[0][0] = 1
            for row, parent in enumerate(self.above, start=1):
                rows.append(rows[parent + 1][:])
                rows[row][row] = 1
            self._mask = np.frombuffer(b"".join(rows), np.bool_).reshape(size, size)
        return self._mask

    def path(self, node: int) -> list[int]:
        """Nodes from below the root down to `node`; empty for the root."""
        path: list[int] = []
        while node != ROOT:
            path.append(node)
            node = self.above[node]
        return path[::-1]

    def subtree(self, root: int) -> tuple[TokenTree, NDArray[np.int32]]:
        """The nodes below `root`, re-rooted there, and their indices in this tree."""
        if root == ROOT:
            return self, np.arange(len(self), dtype=np.int32)
        return self.selected(root, range(root + 1, len(self)))

    def trimmed(
        self, scores: NDArray[np.uint8], count: int, max_depth: int | None
    ) -> tuple[TokenTree, NDArray[np.int32]]:
        """The `count` nodes of lowest score among those no deeper than `max_depth`, and their indices.

        scores: none below its parent's (`raised`), so that what is kept is a tree again. Ties go to the lower index.
        """
        if count >= len(self) and (max_depth is None or self.depth <= max_depth):
            return self, np.arange(len(self), dtype=np.int32)
        nodes: Sequence[int] = range(len(self))
        if max_depth is not None and self.depth > max_depth:
            nodes = [node for node, depth in enumerate(self.depths.tolist()) if depth <= max_depth]
        best = sorted(nodes, key=scores.tolist().__getitem__)[: max(count, 0)]
        return self.selected(ROOT, sorted(best))

    def raised(self, scores: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """uint8 [n]: each node's score, at least its parent's."""
        raised, is_changed = scores.tolist(), False
        if self.is_chain and raised == sorted(raised):
            return scores
        for node, parent in enumerate(self.above):
            if parent != ROOT and raised[parent] > raised[node]:
                raised[node], is_changed = raised[parent], True
        return np.array(raised, np.uint8) if is_changed else scores

    def selected(self, root: int, candidates: Iterable[int]) -> tuple[TokenTree, NDArray[np.int32]]:
        """The nodes of ascending `candidates` that hang together below `root`, re-rooted there, and their indices."""
        new_index, above = {root: ROOT}, self.above
        parents: list[int] = []
        for node in candidates:
            parent = new_index.get(above[node])
            if parent is not None:
                new_index[node] = len(parents)
                parents.append(parent)
        del new_index[root]
        kept = np.fromiter(new_index, np.int32, len(new_index))
        return TokenTree(self.tokens[kept], np.array(parents, np.int32)), kept


@cache
def _chain_above(size: int) -> list[int]:
    """TokenTree.above of a chain of so many nodes, not to be written to."""
    return list(range(-1, size - 1))


@cache
def _chain_depths(size: int) -> Ids:
    """TokenTree.row_depths of a chain of so many rows, not to be written to."""
    depths = np.arange(size, dtype=np.int32)
    depths.flags.writeable = False
    return depths


@cache
def _chain_mask(size: int) -> NDArray[np.bool_]:
    """TokenTree.ancestor_mask of a chain of so many rows, not to be written to."""
    mask = np.tri(size, dtype=np.bool_)
    mask.flags.writeable = False
    return mask


def _checked_links(tokens: list[int], parents: list[int]) -> dict[int, dict[int, int]]:
    """TokenTree.links; InvalidArgument for a parent out of order, and for siblings with one token."""
    links: dict[int, dict[int, int]] = {}
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        siblings = links.setdefault(parent, {})
        if parent >= node or parent < ROOT:
            allowed = f"from -1, the root, to {node - 1}" if node else "-1, the root"
            raise InvalidArgument(f"parents[{node}] is {parent}; it must be {allowed}", field="parents")
        if token in siblings:
            raise InvalidArgument(
                f"tokens[{node}] repeats token {token} of its sibling {siblings[token]}", field="tokens"
            )
        siblings[token] = node
    return links
