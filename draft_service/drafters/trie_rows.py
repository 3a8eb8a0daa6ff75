"""The n-gram trie's rows, and how a child is found, compiled by numba.

A node is a row of eight int32 (32 bytes, half a cache line). Row 0 is no node: it stands for "none" in every link and
anchors the circular use list.

A node's children form a list, the most recently inserted first. Children that have siblings are also in one
open-addressing hash table over (parent, token), at most 7/10 full: 4 bytes a slot, so 6 to 12 bytes per such child. An
only child is found through its parent alone, and in the long unbranched tails that most text makes, no hashing happens.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from draft_service.drafters.compiled import compiled

# Columns of a row.
TOKEN, PARENT, FREQ, CHILD, NEXT, PREV, NEWER, OLDER = range(8)
NUM_COLUMNS = 8
# Entries of the state array (int64): rows in use, first row never used, head of the freed rows' list, hashed children,
# nodes that are kept, first rank row never used, head of the freed rank rows' list.
USED, FRESH, FREED, HASHED, KEPT, RANKED, UNRANKED = range(7)
NUM_STATE = 7

MAX_FREQ = 2**31 - 1
_FIBONACCI = np.uint64(0x9E3779B97F4A7C15)
_32 = np.uint64(32)

Rows = NDArray[np.int32]
Table = NDArray[np.int32]
Ranks = NDArray[np.int32]
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
def hash_remove(table: Table, nodes: Rows, node: int) -> None:
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
def rehash(old: Table, new: Table, nodes: Rows) -> None:
    """Moves every entry of `old` into the empty `new`."""
    for slot in range(len(old)):
        if old[slot] != 0:
            hash_add(new, nodes, old[slot])
