"""Reading a draft tree out of the n-gram trie, compiled by numba.

The last w tokens of a text are looked up for every w from the longest to the shortest, below each given root. Where a
lookup ends, the node's children are what followed those tokens before. Each such continuation is grafted onto one tree
(nodes with equal paths become one) until the tree is full: the longest matches go first and so decide.

Two orders (SGLang's match types). Recent: breadth first, the most recently seen children first; longer matches follow
fewer of them, and the breadth shrinks with depth. Frequent: best first by the product of relative frequencies, below
each node the most frequent children (of more than MAX_RANKED at least the MIN_RANKED first; see trie_ranks.py).

A node's probability is an estimate for trimming, independent of the order: along each edge f * k / (F * k + 1), with f
the child's count, F its parent's and k the number of tokens matched up to there. The one in the denominator is the
mass of what was never seen, as in PPM compression; it weighs less the longer the context.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from draft_service.drafters.compiled import compiled
from draft_service.drafters.trie_ranks import COUNT, FIRST, MAX_RANKED, rank_row
from draft_service.drafters.trie_rows import CHILD, FREQ, NEXT, PARENT, TOKEN, Ranks, Rows, Table, find_child

# Columns of the draft tree while it grows; its row 0 is the root.
_TOKEN, _PARENT, _DEPTH, _SOURCES, _FIRST_KID, _LAST_KID, _NEXT_KID = range(7)
_NUM_COLUMNS = 7

Tree = NDArray[np.int32]
Probabilities = NDArray[np.float64]
Output = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float64], NDArray[np.int32]]


@compiled
def _walk(nodes: Rows, table: Table, root: int, suffix: NDArray[np.int32], width: int) -> int:
    """The node at the end of the last `width` tokens below `root`, or 0."""
    node = root
    for at in range(len(suffix) - width, len(suffix)):
        node = find_child(nodes, table, node, suffix[at])
        if node == 0:
            break
    return node


@compiled
def _graft(tree: Tree, probs: Probabilities, size: int, parent: int, token: int, prob: float, source: int) -> int:
    """The child of tree node `parent` with `token`: the one there is, or a new one with index `size`."""
    kid = tree[parent, _FIRST_KID]
    while kid != 0:
        if tree[kid, _TOKEN] == token:
            tree[kid, _SOURCES] |= source
            return kid
        kid = tree[kid, _NEXT_KID]
    tree[size, _TOKEN] = token
    tree[size, _PARENT] = parent
    tree[size, _DEPTH] = tree[parent, _DEPTH] + 1
    tree[size, _SOURCES] = source
    probs[size] = prob
    if tree[parent, _FIRST_KID] == 0:
        tree[parent, _FIRST_KID] = size
    else:
        tree[tree[parent, _LAST_KID], _NEXT_KID] = size
    tree[parent, _LAST_KID] = size
    return size


@compiled
def _edge(nodes: Rows, node: int, child: int, context_len: int) -> float:
    return nodes[child, FREQ] * context_len / (nodes[node, FREQ] * context_len + 1.0)


@compiled
def _graft_recent(
    nodes: Rows, anchor: int, width: int, source: int, breadth: float, scale: float,
    tree: Tree, probs: Probabilities, size: int, max_depth: int, vocab_size: int,
) -> int:  # fmt: skip
    """Grafts what follows `anchor`, breadth first and recent first; returns the tree's new size."""
    queue = np.empty((len(tree) + 1, 2), np.int64)
    queue[0, 0], queue[0, 1] = 0, anchor
    head, tail = 0, 1
    while head < tail and size < len(tree):
        at, node = queue[head, 0], queue[head, 1]
        head += 1
        depth = tree[at, _DEPTH]
        if depth >= max_depth:
            continue
        room = max(1, int(breadth - depth * scale))
        child = nodes[node, CHILD]
        while child != 0 and room > 0 and size < len(tree):
            token = nodes[child, TOKEN]
            if token < vocab_size:
                prob = float(probs[at]) * _edge(nodes, node, child, width + depth)
                kid = _graft(tree, probs, size, at, token, prob, source)
                size = max(size, kid + 1)
                queue[tail, 0], queue[tail, 1] = kid, child
                tail += 1
                room -= 1
            child = nodes[child, NEXT]
    return size


@compiled
def _place(nodes: Rows, child: int, top: NDArray[np.int64], num_top: int, vocab_size: int) -> int:
    """Puts a child into `top` if it belongs there; returns how many there are now."""
    token, freq = nodes[child, TOKEN], nodes[child, FREQ]
    place = num_top
    while place > 0:
        other = top[place - 1]
        if nodes[other, FREQ] > freq or (nodes[other, FREQ] == freq and nodes[other, TOKEN] < token):
            break
        place -= 1
    if token >= vocab_size or place == len(top):
        return num_top
    num_top = min(num_top + 1, len(top))
    for move in range(num_top - 1, place, -1):
        top[move] = top[move - 1]
    top[place] = child
    return num_top


@compiled
def _most_frequent(nodes: Rows, ranks: Ranks, node: int, top: NDArray[np.int64], vocab_size: int) -> int:
    """Fills `top` with children of `node`, most frequent first, ties to the lower token; returns how many."""
    num_top = 0
    row = rank_row(nodes, node)
    if row != 0:
        for slot in range(FIRST, FIRST + ranks[row, COUNT]):
            num_top = _place(nodes, ranks[row, slot], top, num_top, vocab_size)
        return num_top
    child = nodes[node, CHILD]
    for _ in range(MAX_RANKED):  # more only where a trie is being dropped
        if child == 0:
            break
        num_top = _place(nodes, child, top, num_top, vocab_size)
        child = nodes[child, NEXT]
    return num_top


@compiled
def _graft_frequent(
    nodes: Rows, ranks: Ranks, anchor: int, width: int, source: int, max_breadth: int,
    tree: Tree, probs: Probabilities, size: int, max_depth: int, vocab_size: int,
) -> int:  # fmt: skip
    """Grafts what follows `anchor`, the most probable path first; returns the tree's new size."""
    top = np.empty(max_breadth, np.int64)
    heap = [(-1.0, 0, 0, anchor)]  # minus the path's probability, order of arrival, tree node above, trie node
    arrivals = 0
    while len(heap) > 0 and size < len(tree):
        cost, _, at, node = heapq.heappop(heap)
        if node != anchor:
            prob = probs[at] * _edge(nodes, nodes[node, PARENT], node, width + tree[at, _DEPTH])
            kid = _graft(tree, probs, size, at, nodes[node, TOKEN], prob, source)
            size = max(size, kid + 1)
            at = kid
        if tree[at, _DEPTH] >= max_depth:
            continue
        num_top = _most_frequent(nodes, ranks, node, top, vocab_size)
        total = 0
        for rank in range(num_top):
            total += nodes[top[rank], FREQ]
        for rank in range(num_top):
            arrivals += 1
            heapq.heappush(heap, (cost * nodes[top[rank], FREQ] / total, arrivals, at, top[rank]))
    return size


@compiled
def _in_breadth_order(tree: Tree, probs: Probabilities, size: int) -> Output:
    """Tokens, parents (-1: the root), probabilities and sources of the nodes below the root, level by level."""
    order = np.zeros(size, np.int64)
    place = np.zeros(size, np.int64)
    filled = 1
    for head in range(size):
        kid = tree[order[head], _FIRST_KID]
        while kid != 0:
            order[filled] = kid
            place[kid] = filled
            filled += 1
            kid = tree[kid, _NEXT_KID]
    tokens = np.empty(size - 1, np.int32)
    parents = np.empty(size - 1, np.int32)
    probabilities = np.empty(size - 1, np.float64)
    sources = np.empty(size - 1, np.int32)
    for at in range(1, size):
        node = order[at]
        tokens[at - 1] = tree[node, _TOKEN]
        parents[at - 1] = place[tree[node, _PARENT]] - 1
        probabilities[at - 1] = probs[node]
        sources[at - 1] = tree[node, _SOURCES]
    return tokens, parents, probabilities, sources


@compiled
def draft_tree(
    own_nodes: Rows, own_table: Table, own_ranks: Ranks, num_own: int,
    nodes: Rows, table: Table, ranks: Ranks, roots: NDArray[np.int32], suffix: NDArray[np.int32], min_match: int,
    max_match: int, min_breadth: int, max_breadth: int, frequent: bool, num_nodes: int, max_depth: int, vocab_size: int,
) -> Output:  # fmt: skip
    """Draws at most `num_nodes` nodes continuing `suffix` from below `roots` (at most 31, earlier ones first).

    The first `num_own` of these are in another trie, whose arrays come first. Returns tokens int32 [n], parents int32
    [n] (-1: the root), path probabilities float64 [n], and sources int32 [n] (bit i: the path is below roots[i]), level
    by level. Tokens from `vocab_size` on are passed over.
    """
    tree = np.zeros((num_nodes + 1, _NUM_COLUMNS), np.int32)
    probs = np.ones(num_nodes + 1, np.float64)
    size = 1
    scale = (max_breadth - min_breadth) / (max_match - min_match + 1)
    for width in range(min(len(suffix), max_match), min_match - 1, -1):
        breadth = (max_match - width) * scale + min_breadth
        for index in range(len(roots)):
            if size == len(tree):
                break
            rows, hashes, ranked = (own_nodes, own_table, own_ranks) if index < num_own else (nodes, table, ranks)
            anchor = _walk(rows, hashes, roots[index], suffix, width)
            if anchor == 0:
                continue
            source = 1 << index
            if frequent:
                size = _graft_frequent(
                    rows, ranked, anchor, width, source, max_breadth, tree, probs, size, max_depth, vocab_size
                )
            else:
                size = _graft_recent(
                    rows, anchor, width, source, breadth, scale, tree, probs, size, max_depth, vocab_size
                )
    return _in_breadth_order(tree, probs, size)
