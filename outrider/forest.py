"""Many token trees at once, one behind another in flat arrays: a pass of numpy over all instead of one over each."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider.tree import TokenTree
from outrider.wire import Ids

MAX_NODES = 63  # of a tree: its rows are bits of a number

Scores = NDArray[np.uint8]


def grown(tokens: Ids, parents: Ids, scores: Scores, sizes: Ids, *, vocab_size: int) -> list[TokenTree] | None:
    """Trees of `sizes` nodes, at most MAX_NODES, with what a step needs of them; None if any is malformed.

    scores are raised in place to at least their parents'.
    """
    starts = np.cumsum(sizes + 1) - sizes - 1  # of each tree's rows
    is_node = np.ones(len(tokens) + len(sizes), np.bool_)
    is_node[starts] = False
    nodes, roots = np.flatnonzero(is_node), np.repeat(starts, sizes)
    local = np.zeros(len(is_node), np.int64)  # rows counted in their own tree
    local[nodes] = nodes - roots
    above = np.arange(len(is_node))  # a root is its own
    above[nodes] = roots + parents + 1
    if not _is_sound(tokens, parents + 1, local[nodes], above[nodes], vocab_size):
        return None
    seen, costs = 1 << local, np.zeros(len(is_node), np.uint8)
    costs[nodes] = scores
    while is_node[above].any():  # ancestors are doubled until they reach the root
        seen |= seen[above]
        np.maximum(costs, costs[above], out=costs)
        above = above[above]
    seen |= 1
    scores[:] = costs[nodes]
    depths = np.bitwise_count(seen.view(np.uint64)).astype(np.int32) - np.int32(1)
    masks = np.unpackbits(seen.view(np.uint8).reshape(-1, 8), axis=1, bitorder="little").view(np.bool_)
    trees: list[TokenTree] = []
    node = row = 0
    for size in sizes.tolist():
        end, last = node + size, row + size + 1
        trees.append(TokenTree(tokens[node:end], parents[node:end], depths[row:last], masks[row:last, : size + 1]))
        node, row = end, last
    return trees


def _is_sound(tokens: Ids, own_above: Ids, local: NDArray[np.intp], above: NDArray[np.intp], vocab_size: int) -> bool:
    """Whether tokens are below vocab_size, rows above come before, and no two children of one have the same token."""
    if not len(tokens):
        return True
    if int(tokens.view(np.uint32).max()) >= vocab_size or bool((own_above.view(np.uint32) >= local).any()):
        return False
    keys = above << 32 | tokens
    keys.sort()
    return not bool((keys[1:] == keys[:-1]).any())
