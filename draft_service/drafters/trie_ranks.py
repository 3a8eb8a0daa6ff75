"""The most frequent children of the n-gram trie's nodes, compiled by numba.

A child list is in the order of recency, and a common token's node may have tens of thousands of children. So a node
with more than MAX_RANKED has a row of ranks: how many it holds, a bar, and that many of its children, in no order. The
counts of those are not below the bar, and the counts of all others not above it. Counts rise by one, so whoever passes
the bar is at the bar + 1 then and there, and nothing else is to be looked at.

Ranked children that are removed leave gaps. Once fewer than MIN_RANKED are left the row is filled again from the whole
list, the recent ones first of equals: they are evicted last, so that it will be long until the next time.

The PREV of a list's first child, which has none before it, says how its parent stands: minus the number of its children
up to MAX_RANKED, minus MAX_RANKED and the row of ranks beyond; 0 where nobody counts. Those are the lists below roots,
at which no lookup ends, and lists that are being dropped.
"""

from __future__ import annotations

from draft_service.drafters.compiled import compiled
from draft_service.drafters.trie_rows import CHILD, FREQ, NEXT, PREV, RANKED, UNRANKED, Ranks, Rows, State

MAX_RANKED = 64
MIN_RANKED = 48
# Columns of a row of ranks: how many are ranked (of a free row: the next free one), the bar, the first of them.
COUNT, BAR, FIRST = range(3)
RANK_COLUMNS = FIRST + MAX_RANKED


@compiled
def rank_row(nodes: Rows, node: int) -> int:
    """The row of ranks of a node's children, or 0."""
    return max(0, -nodes[nodes[node, CHILD], PREV] - MAX_RANKED)


@compiled
def begin_ranks(nodes: Rows, ranks: Ranks, state: State, first: int) -> None:
    """Gives the list that begins with `first` a row of ranks, of which one must be free."""
    row = state[UNRANKED]
    if row != 0:
        state[UNRANKED] = ranks[row, COUNT]
    else:
        row = state[RANKED]
        state[RANKED] += 1
    nodes[first, PREV] = -(MAX_RANKED + row)
    _fill(nodes, ranks, row, first)


@compiled
def raise_child(nodes: Rows, ranks: Ranks, row: int, child: int) -> None:
    """Ranks a child whose count has risen by one and is at the bar + 1."""
    end = FIRST + ranks[row, COUNT]
    if _slot(ranks, row, child) < end:
        return
    if end == RANK_COLUMNS:
        end = FIRST
        for slot in range(FIRST + 1, RANK_COLUMNS):
            if nodes[ranks[row, slot], FREQ] <= nodes[ranks[row, end], FREQ]:
                end = slot
        if nodes[ranks[row, end], FREQ] > ranks[row, BAR]:
            ranks[row, BAR] = nodes[ranks[row, end], FREQ]
            return
    else:
        ranks[row, COUNT] += 1
    ranks[row, end] = child


@compiled
def lose_ranked(nodes: Rows, ranks: Ranks, state: State, first: int, child: int) -> None:
    """Ranks a child no more that was taken from its list, which has ranks and begins with `first` now."""
    row = -nodes[first, PREV] - MAX_RANKED
    if nodes[child, FREQ] < ranks[row, BAR]:
        return
    slot, last = _slot(ranks, row, child), FIRST + ranks[row, COUNT] - 1
    if slot > last:
        return
    ranks[row, slot] = ranks[row, last]
    ranks[row, COUNT] -= 1
    if ranks[row, COUNT] < MIN_RANKED:
        num_children = _fill(nodes, ranks, row, first)
        if num_children <= MAX_RANKED:
            _free(ranks, state, row)
            nodes[first, PREV] = -num_children


@compiled
def forget_children(nodes: Rows, ranks: Ranks, state: State, node: int) -> None:
    """Counts a node's children no more: all of them are about to be removed."""
    row = rank_row(nodes, node)
    if row != 0:
        _free(ranks, state, row)
    nodes[nodes[node, CHILD], PREV] = 0


@compiled
def _slot(ranks: Ranks, row: int, child: int) -> int:
    """The slot that holds a child, or the one after the last."""
    slot, end = FIRST, FIRST + ranks[row, COUNT]
    while slot < end and ranks[row, slot] != child:
        slot += 1
    return slot


@compiled
def _fill(nodes: Rows, ranks: Ranks, row: int, first: int) -> int:
    """Fills a row from the list that begins with `first`; returns the list's length."""
    end, num_children, child = FIRST, 0, first
    while child != 0:
        num_children += 1
        freq = nodes[child, FREQ]
        if end < RANK_COLUMNS or nodes[ranks[row, end - 1], FREQ] < freq:
            end = min(end + 1, RANK_COLUMNS)
            slot = end - 1
            while slot > FIRST and nodes[ranks[row, slot - 1], FREQ] < freq:
                ranks[row, slot] = ranks[row, slot - 1]
                slot -= 1
            ranks[row, slot] = child
        child = nodes[child, NEXT]
    ranks[row, COUNT] = end - FIRST
    ranks[row, BAR] = nodes[ranks[row, end - 1], FREQ]
    return num_children


@compiled
def _free(ranks: Ranks, state: State, row: int) -> None:
    ranks[row, COUNT] = state[UNRANKED]
    state[UNRANKED] = row
