"""The n-gram trie's growing and shrinking, compiled by numba: links, use lists, insertion, eviction.

A root is a row without parent that is in no use list, so it is never evicted. The use list orders nodes by last
insertion through them, and of one path the shallower come first; so its end is always a leaf, and that is what eviction
takes. A kept root anchors a use list of its own, from which nothing is evicted.

trie_rows.py has the rows, trie_ranks.py what is known of a node's most frequent children.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from draft_service.drafters.compiled import compiled
from draft_service.drafters.trie_ranks import (
    BAR,
    MAX_RANKED,
    begin_ranks,
    forget_children,
    lose_ranked,
    raise_child,
    rank_row,
)
from draft_service.drafters.trie_rows import (
    CHILD,
    FREED,
    FREQ,
    FRESH,
    HASHED,
    KEPT,
    MAX_FREQ,
    NEWER,
    NEXT,
    OLDER,
    PARENT,
    PREV,
    RANKED,
    TOKEN,
    UNRANKED,
    USED,
    Ranks,
    Rows,
    State,
    Table,
    find_child,
    hash_add,
    hash_remove,
)


@compiled
def _link_sibling(nodes: Rows, table: Table, ranks: Ranks, state: State, node: int, first: int) -> None:
    """Goes on with a new first child where there are others, of which `first` was the first."""
    if nodes[first, NEXT] == 0:
        hash_add(table, nodes, first)
        state[HASHED] += 1
    hash_add(table, nodes, node)
    state[HASHED] += 1
    standing = nodes[first, PREV]
    nodes[node, PREV] = standing
    nodes[first, PREV] = node
    if standing == -MAX_RANKED:
        begin_ranks(nodes, ranks, state, node)
    elif -MAX_RANKED < standing < 0:
        nodes[node, PREV] = standing - 1


@compiled
def _link_child(nodes: Rows, table: Table, ranks: Ranks, state: State, parent: int, node: int) -> None:
    """Makes `node` the most recent child of `parent`; its PARENT and TOKEN are set."""
    first = nodes[parent, CHILD]
    nodes[node, NEXT] = first
    nodes[parent, CHILD] = node
    if first != 0:
        _link_sibling(nodes, table, ranks, state, node, first)
    elif nodes[parent, PARENT] != 0:
        nodes[node, PREV] = -1


@compiled
def _unlink_sibling(nodes: Rows, table: Table, ranks: Ranks, state: State, node: int) -> None:
    """Takes a child that has siblings from its parent."""
    parent, before, after = nodes[node, PARENT], nodes[node, PREV], nodes[node, NEXT]
    hash_remove(table, nodes, node)
    state[HASHED] -= 1
    if before <= 0:
        nodes[parent, CHILD] = after
    else:
        nodes[before, NEXT] = after
    if after != 0:
        nodes[after, PREV] = before
    left = nodes[parent, CHILD]
    if nodes[left, NEXT] == 0:
        hash_remove(table, nodes, left)
        state[HASHED] -= 1
    standing = nodes[left, PREV]
    if standing < -MAX_RANKED:
        lose_ranked(nodes, ranks, state, left, node)
    elif standing < 0:
        nodes[left, PREV] = standing + 1


@compiled
def _to_front(nodes: Rows, child: int) -> None:
    """Makes a child the most recent one of its parent."""
    before = nodes[child, PREV]
    if before <= 0:
        return
    after, parent = nodes[child, NEXT], nodes[child, PARENT]
    nodes[before, NEXT] = after
    if after != 0:
        nodes[after, PREV] = before
    first = nodes[parent, CHILD]
    nodes[child, PREV] = nodes[first, PREV]
    nodes[first, PREV] = child
    nodes[child, NEXT] = first
    nodes[parent, CHILD] = child


@compiled
def _use_after(nodes: Rows, anchor: int, node: int) -> None:
    """Puts `node` into the use list next to `anchor`, on the older side (next to a list's anchor: newest of all)."""
    older = nodes[anchor, OLDER]
    nodes[node, NEWER] = anchor
    nodes[node, OLDER] = older
    nodes[older, NEWER] = node
    nodes[anchor, OLDER] = node


@compiled
def _unuse(nodes: Rows, node: int) -> None:
    newer, older = nodes[node, NEWER], nodes[node, OLDER]
    nodes[newer, OLDER] = older
    nodes[older, NEWER] = newer


@compiled
def _allocate(nodes: Rows, state: State, parent: int, token: int) -> int:
    """A row for a node without links; the caller has seen that one is free."""
    node = state[FREED]
    if node != 0:
        state[FREED] = nodes[node, NEXT]
    else:
        node = state[FRESH]
        state[FRESH] += 1
    state[USED] += 1
    nodes[node, TOKEN] = token
    nodes[node, PARENT] = parent
    nodes[node, FREQ] = 1
    nodes[node, CHILD] = 0
    nodes[node, NEXT] = 0
    nodes[node, PREV] = 0
    return node


@compiled
def _remove_leaf(nodes: Rows, table: Table, ranks: Ranks, state: State, node: int) -> None:
    if nodes[node, PREV] <= 0 and nodes[node, NEXT] == 0:
        nodes[nodes[node, PARENT], CHILD] = 0
    else:
        _unlink_sibling(nodes, table, ranks, state, node)
    _unuse(nodes, node)
    nodes[node, NEXT] = state[FREED]
    state[FREED] = node
    state[USED] -= 1


@compiled
def _evict(nodes: Rows, table: Table, ranks: Ranks, state: State, num_free: int) -> None:
    """Removes least recently used leaves until `num_free` rows are free."""
    while len(nodes) - state[USED] < num_free:
        _remove_leaf(nodes, table, ranks, state, nodes[0, NEWER])


@compiled
def is_kept(nodes: Rows, root: int) -> bool:
    """Whether the nodes below a root are safe from eviction."""
    return nodes[root, OLDER] != 0


@compiled
def new_root(nodes: Rows, table: Table, ranks: Ranks, state: State, kept: bool) -> int:
    """A root, in place of the least recently used leaf when every row is taken."""
    _evict(nodes, table, ranks, state, 1)
    root = _allocate(nodes, state, 0, -1)
    nodes[root, FREQ] = 0
    nodes[root, NEWER] = nodes[root, OLDER] = root if kept else 0
    state[KEPT] += kept
    return root


@compiled
def drop_some(nodes: Rows, table: Table, ranks: Ranks, state: State, root: int, limit: int) -> bool:
    """Removes at most `limit` nodes below `root`, deepest first; True when the root itself is gone too."""
    node = root
    kept = is_kept(nodes, root)
    for _ in range(limit):
        while nodes[node, CHILD] != 0:
            forget_children(nodes, ranks, state, node)
            node = nodes[node, CHILD]
        state[KEPT] -= kept
        if node == root:
            nodes[root, NEXT] = state[FREED]
            state[FREED] = root
            state[USED] -= 1
            return True
        parent = nodes[node, PARENT]
        _remove_leaf(nodes, table, ranks, state, node)
        node = parent
    return False


@compiled
def insert_some(
    nodes: Rows, table: Table, ranks: Ranks, state: State, capacity: int, root: int, tokens: NDArray[np.int32],
    first: int, last: int, counted: int, branch_length: int, min_match: int,
) -> int:  # fmt: skip
    """Inserts the paths tokens[i : i + branch_length] for i from `first` to `last` - 1 below `root`.

    A path too short to hold a continuation of a match (no more than `min_match` tokens) is left out. Tokens before
    `counted` were inserted by an earlier call, so nodes at those positions are only refreshed. Returns the first i not
    done: below `last` when the arrays must grow before it can be.
    """
    length = len(tokens)
    kept = is_kept(nodes, root)
    uses = root if kept else 0
    for i in range(first, min(last, length - min_match)):
        end = min(i + branch_length, length)
        free = len(nodes) - state[USED]
        if (len(nodes) < capacity and free < branch_length) or (state[HASHED] + 2) * 10 > len(table) * 7:
            return i
        if state[UNRANKED] == 0 and state[RANKED] == len(ranks):
            return i
        known = counted if i + min_match < counted else i
        node, anchor, at = root, uses, i
        while at < end:
            child = find_child(nodes, table, node, tokens[at])
            if child == 0:
                break
            if at >= known and nodes[child, FREQ] < MAX_FREQ:
                nodes[child, FREQ] += 1
                row = rank_row(nodes, node)
                if row != 0 and nodes[child, FREQ] == ranks[row, BAR] + 1:
                    raise_child(nodes, ranks, row, child)
            _to_front(nodes, child)
            if nodes[anchor, OLDER] != child:
                _unuse(nodes, child)
                _use_after(nodes, anchor, child)
            node, anchor, at = child, child, at + 1
        if len(nodes) - state[USED] < end - at:  # asked here, too, as a call takes longer
            _evict(nodes, table, ranks, state, end - at)
        if kept:
            state[KEPT] += end - at
        while at < end:
            child = _allocate(nodes, state, node, tokens[at])
            _link_child(nodes, table, ranks, state, node, child)
            _use_after(nodes, anchor, child)
            node, anchor, at = child, child, at + 1
    return last
