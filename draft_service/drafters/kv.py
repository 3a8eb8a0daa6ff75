"""A drafter's own pages: which slots hold which session's rows, and what is taken for drafting and given back.

Bookkeeping only, without tensors; the slot table that it writes is the one that the draft model reads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.pages import OutOfPages, PagePool


class NoRoom(Exception):
    """The drafter's pool, its table, or the draft model's context has no room for what was asked; nothing was taken."""


@dataclass(eq=False, slots=True)
class CacheRows:
    """Rows of one session: row i's slot stands at slot_table[table_row, i]; those before `first_own` are another's."""

    table_row: int
    num_rows: int = 0
    first_own: int = 0


class DraftCache:
    """Hands slots out to sequences. A page is one slot."""

    def __init__(self, slot_table: NDArray[np.int32], num_slots: int) -> None:
        self.slot_table = slot_table
        self.max_len = slot_table.shape[1]
        """Most rows of a sequence."""
        self._pages = PagePool(num_slots)
        self._free_rows = list(range(len(slot_table) - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Slots that may be taken now."""
        return self._pages.num_free

    def open(self) -> CacheRows:
        """A sequence without rows. NoRoom when the table is full."""
        if not self._free_rows:
            raise NoRoom(f"all {len(self.slot_table)} rows of the slot table are taken")
        return CacheRows(self._free_rows.pop())

    def append(self, sequence: CacheRows, count: int) -> list[int]:
        """`count` rows more: their slots. NoRoom when there are too few, or the context ends."""
        end = sequence.num_rows + count
        if end > self.max_len:
            raise NoRoom(f"{end} rows; the draft model's context has {self.max_len}")
        slots = self.scratch(count)
        self.slot_table[sequence.table_row, sequence.num_rows : end] = slots
        sequence.num_rows = end
        return slots

    def truncate(self, sequence: CacheRows, num_rows: int) -> None:
        """Gives the rows from `num_rows` on back."""
        first = max(num_rows, sequence.first_own)
        self._pages.free(self.slot_table[sequence.table_row, first : sequence.num_rows])
        sequence.num_rows = first

    def fork(self, sequence: CacheRows, num_rows: int) -> CacheRows:
        """Another sequence over its first `num_rows` rows; it goes its own way after them.

        It is closed before the first one is.
        """
        forked = self.open()
        self.slot_table[forked.table_row, :num_rows] = self.slot_table[sequence.table_row, :num_rows]
        forked.num_rows = forked.first_own = num_rows
        return forked

    def adopt(self, sequence: CacheRows, forked: CacheRows, count: int) -> None:
        """Makes the first `count` own rows of a fork, which follow all of the sequence's, the sequence's."""
        first, end = sequence.num_rows, sequence.num_rows + count
        if forked.first_own != first or forked.num_rows < end:
            raise ValueError(
                f"{count} rows from {first} on are not the fork's own {forked.first_own}..{forked.num_rows}"
            )
        self.slot_table[sequence.table_row, first:end] = self.slot_table[forked.table_row, first:end]
        sequence.num_rows = forked.first_own = end

    def close(self, sequence: CacheRows) -> None:
        """Gives all back; the sequence must not be used again."""
        self.truncate(sequence, 0)
        self._free_rows.append(sequence.table_row)

    def scratch(self, count: int) -> list[int]:
        """Slots that belong to no sequence, for `release`. NoRoom when there are too few."""
        try:
            return self._pages.take(count)
        except OutOfPages as error:
            raise NoRoom(f"the drafter's pool: {error}") from error

    def release(self, slots: list[int]) -> None:
        """Takes scratch slots back."""
        self._pages.free(slots)

    def check(self, sequences: list[CacheRows]) -> None:
        """RuntimeError unless these sequences hold exactly what is not free, each slot and table row once."""
        self._pages.check()
        own = [self.slot_table[s.table_row, s.first_own : s.num_rows] for s in sequences]
        held = np.concatenate(own) if own else np.empty(0, np.int32)
        if len(np.unique(held)) != len(held) or len(held) + self.num_free != self._pages.num_pages:
            raise RuntimeError(f"{len(held)} slots held and {self.num_free} free of {self._pages.num_pages}")
        rows = sorted([s.table_row for s in sequences] + self._free_rows)
        if rows != list(range(len(self.slot_table))):
            raise RuntimeError(f"table rows are lost or held twice: {rows}")
