"""The n-gram trie's storage, compiled by numba: rows, child lookup, insertion, eviction.

A node is a row of eight int32 (32 bytes, half a cache line). Row 0 is no node: it stands for "none" in every link and
anchors the circular use list. A root is a row without parent that is not in the use list, so it is never evicted.

A node's children form a list, the most recently inserted first. Children that have siblings are also in one
open-addressing hash table over (parent, token), at most 7/10 full: 4 bytes a slot, so 6 to 12 bytes per such child. An
only child is found through its parent alone, and in the long unbranched tails that most text makes, no hashing happens.

The use list orders all nodes by last insertion through them, and of one path the shallower come first; so its end is
always a leaf, and that is what eviction takes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from draft_service.drafters.compiled import compiled

# Columns of a row.
TOKEN, PARENT, FREQ, CHILD, NEXT, PREV, NEWER, OLDER = range(8)
NUM_COLUMNS = 8
# Entries of the state array (int64): rows in use, first row never used, head of the freed rows' list, hashed children.
USED, FRESH, FREED, HASHED = range(4)
NUM_STATE = 4

MAX_FREQ = 2**31 - 1
_FIBONACCI = np.uint64(0x9E3779B97F4A7C15)
_32 = np.uint64(32)

Rows = NDArray[np.int32]
Table = NDArray[np.int32]
State = NDArray[np.int64]


@compiled
def _home(table: Table, parent: int, token: int) -> int:
    """Slot at which the search for (parent, token) starts; the table's size is a power of two."""
    key = (np.uint64(parent) << _32) | np.uint64(np.uint32(token))
    return int((key * _FIBONACCI) >> _32) & (len(table) - 1)


@compiled
def hash_add(table: Table, nodes: Rows, node: int) -> None:
    """Puts a child into the table; it must not be there."""
    mask = len(table) - 1
    slot = _home(table, nodes[node, PARENT], nodes[node, TOKEN])
    while table[slot] != 0:
        slot = (slot + 1) & mask
    table[slot] = node


@compiled
def _hash_remove(table: Table, nodes: Rows, node: int) -> None:
    """Takes a child out; later entries of its run move back, so searches never meet a tombstone."""
    mask = len(table) - 1
    hole = _home(table, nodes[node, PARENT], nodes[node, TOKEN])
    while table[hole] != node:
        hole = (hole + 1) & mask
    slot = hole
    while True:
        slot = (slot + 1) & mask
        other = table[slot]
        if other == 0:
            break
        home = _home(table, nodes[other, PARENT], nodes[other, TOKEN])
        if (slot - home) & mask >= (slot - hole) & mask:
            table[hole] = other
            hole = slot
    table[hole] = 0


@compiled
def find_child(nodes: Rows, table: Table, node: int, token: int) -> int:
    """The child of `node` that holds `token`, or 0."""
    first = nodes[node, CHILD]
    if first == 0 or nodes[first, TOKEN] == token:
        return first
    if nodes[first, NEXT] == 0:
        return 0
    mask = len(table) - 1
    slot = _home(table, node, token)
    while True:
        child = table[slot]
        if child == 0 or (nodes[child, PARENT] == node and nodes[child, TOKEN] == token):
            return child
        slot = (slot + 1) & mask


@compiled
def _link_child(nodes: Rows, table: Table, state: State, parent: int, node: int) -> None:
    """Makes `node` the most recent child of `parent`; its PARENT and TOKEN are set."""
    first = nodes[parent, CHILD]
    if first != 0:
        if nodes[first, NEXT] == 0:
            hash_add(table, nodes, first)
            state[HASHED] += 1
        hash_add(table, nodes, node)
        state[HASHED] += 1
        nodes[first, PREV] = node
    nodes[node, PREV] = 0
    nodes[node, NEXT] = first
    nodes[parent, CHILD] = node


@compiled
def _unlink_child(nodes: Rows, table: Table, state: State, node: int) -> None:
    parent, before, after = nodes[node, PARENT], nodes[node, PREV], nodes[node, NEXT]
    if before == 0 and after == 0:
        nodes[parent, CHILD] = 0
        return
    _hash_remove(table, nodes, node)
    state[HASHED] -= 1
    if before == 0:
        nodes[parent, CHILD] = after
    else:
        nodes[before, NEXT] = after
    if after != 0:
        nodes[after, PREV] = before
    left = nodes[parent, CHILD]
    if nodes[left, NEXT] == 0:
        _hash_remove(table, nodes, left)
        state[HASHED] -= 1


@compiled
def _to_front(nodes: Rows, child: int) -> None:
    """Makes a child the most recent one of its parent."""
    before = nodes[child, PREV]
    if before == 0:
        return
    after, parent = nodes[child, NEXT], nodes[child, PARENT]
    nodes[before, NEXT] = after
    if after != 0:
        nodes[after, PREV] = before
    first = nodes[parent, CHILD]
    nodes[first, PREV] = child
    nodes[child, PREV] = 0
    nodes[child, NEXT] = first
    nodes[parent, CHILD] = child


@compiled
def _use_after(nodes: Rows, anchor: int, node: int) -> None:
    """Puts `node` into the use list next to `anchor`, on the older side (anchor 0: newest of all)."""
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
def _remove_leaf(nodes: Rows, table: Table, state: State, node: int) -> None:
    _unlink_child(nodes, table, state, node)
    _unuse(nodes, node)
    nodes[node, NEXT] = state[FREED]
    state[FREED] = node
    state[USED] -= 1


@compiled
def _evict(nodes: Rows, table: Table, state: State, num_free: int) -> None:
    """Removes least recently used leaves until `num_free` rows are free."""
    while len(nodes) - state[USED] < num_free:
        _remove_leaf(nodes, table, state, nodes[0, NEWER])


@compiled
def new_root(nodes: Rows, table: Table, state: State) -> int:
    """A root, in place of the least recently used leaf when every row is taken."""
    _evict(nodes, table, state, 1)
    root = _allocate(nodes, state, 0, -1)
    nodes[root, FREQ] = 0
    return root


@compiled
def drop_some(nodes: Rows, table: Table, state: State, root: int, limit: int) -> bool:
    """Removes at most `limit` nodes below `root`, deepest first; True when the root itself is gone too."""
    node = root
    for _ in range(limit):
        while nodes[node, CHILD] != 0:
            node = nodes[node, CHILD]
        if node == root:
            nodes[root, NEXT] = state[FREED]
            state[FREED] = root
            state[USED] -= 1
            return True
        parent = nodes[node, PARENT]
        _remove_leaf(nodes, table, state, node)
        node = parent
    return False


@compiled
def insert_some(
    nodes: Rows, table: Table, state: State, capacity: int, root: int, tokens: NDArray[np.int32],
    first: int, last: int, counted: int, branch_length: int, min_match: int,
) -> int:  # fmt: skip
    """Inserts the paths tokens[i : i + branch_length] for i from `first` to `last` - 1 below `root`.

    A path too short to hold a continuation of a match (no more than `min_match` tokens) is left out. Tokens before
    `counted` were inserted by an earlier call, so nodes at those positions are only refreshed. Returns the first i not
    done: below `last` when the arrays must grow before it can be.
    """
    length = len(tokens)
    for i in range(first, min(last, length - min_match)):
        end = min(i + branch_length, length)
        free = len(nodes) - state[USED]
        if (len(nodes) < capacity and free < branch_length) or (state[HASHED] + 2) * 10 > len(table) * 7:
            return i
        known = counted if i + min_match < counted else i
        node, anchor, at = root, 0, i
        while at < end:
            child = find_child(nodes, table, node, tokens[at])
            if child == 0:
                break
            if at >= known and nodes[child, FREQ] < MAX_FREQ:
                nodes[child, FREQ] += 1
            _to_front(nodes, child)
            if nodes[anchor, OLDER] != child:
                _unuse(nodes, child)
                _use_after(nodes, anchor, child)
            node, anchor, at = child, child, at + 1
        _evict(nodes, table, state, end - at)
        while at < end:
            child = _allocate(nodes, state, node, tokens[at])
            _link_child(nodes, table, state, node, child)
            _use_after(nodes, anchor, child)
            node, anchor, at = child, child, at + 1
    return last


@compiled
def rehash(old: Table, new: Table, nodes: Rows) -> None:
    """Moves every entry of `old` into the empty `new`."""
    for slot in range(len(old)):
        if old[slot] != 0:
            hash_add(new, nodes, old[slot])
