"""Which pages a session has, and the slots of its positions: growth, what a step keeps, what the cache shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from engine.pages import PagePool
from engine.radix_cache import RadixCache
from verify_service.session import Session

Slots = NDArray[np.int32]


class SessionPages:
    """A pool's pages in the hands of sessions and of the prefix cache. Owned by the engine.

    slot_table: int32 [rows, context], the slots of running sessions' positions. cache: keeps what finished sessions
    computed, and shares it; None: nothing is shared. move(source, target): copies KV between slots; needed for page
    sizes above 1, where accepted nodes move to the positions they have taken.
    """

    def __init__(
        self,
        pool: PagePool,
        slot_table: Slots,
        *,
        cache: RadixCache | None,
        move: Callable[[Slots, Slots], None] | None = None,
    ) -> None:
        self.pool = pool
        self.slot_table = slot_table
        self.cache = cache
        self.num_shared = 0  # times that the cache was given pages
        self.num_evictions = 0  # times that it gave some up
        self._move = move
        self._dropped: list[int] = []  # pages, not with the pool yet

    @property
    def page_size(self) -> int:
        """Positions of a page."""
        return self.pool.page_size

    @property
    def num_available(self) -> int:
        """Pages that can be had without preempting anybody."""
        return self.pool.num_free + len(self._dropped) + (self.cache.num_evictable if self.cache is not None else 0)

    def take_spare_slots(self, session: Session, taken: int, count: int) -> list[int]:
        """Up to `count` slots for the positions after the `taken` ones from kv_len on, preempting nobody."""
        first = session.kv_len + taken
        held = len(session.pages) + self.num_available
        count = min(count, held * self.pool.page_size - first)
        self.grow(session, first + count)
        return self.slots(session, first, count)

    def keep(self, session: Session, slots: Sequence[int], rows: list[int]) -> None:
        """After a step: of the slots written, those of `rows`, ascending, become the next positions'.

        Pages that are not held any more go back to the pool with `settle`, or when they are needed.
        """
        start, end = session.kv_len, session.kv_len + len(rows)
        if self.pool.page_size == 1:
            left = list(slots)
            chosen = [left[row] for row in rows]
            for row in reversed(rows):
                del left[row]
            session.pages[start : start + len(slots)] = chosen + left
            self.slot_table[session.table_row, start:end] = chosen
        else:
            written = np.array(slots, np.int32)
            target, moved = written[: len(rows)], np.array(rows, np.intp) != np.arange(len(rows))
            if moved.any():
                assert self._move is not None
                self._move(written[rows][moved], target[moved])
            self.slot_table[session.table_row, start:end] = target
        session.kv_len = end
        held = -(-end // self.pool.page_size)
        self._dropped += session.pages[held:]
        del session.pages[held:]

    def settle(self) -> None:
        """Gives the pool the pages that sessions have dropped, those of all at once."""
        if self._dropped:
            dropped, self._dropped = self._dropped, []
            self.pool.free(dropped)

    def share(self, session: Session) -> None:
        """Puts the whole pages that a running session has computed into the cache, for others to read."""
        if self.cache is None:
            return
        self.num_shared += 1
        count = session.kv_len // self.pool.page_size
        pages = np.array(session.pages[:count], np.int32)
        prefix = self.cache.insert(session.tokens[: count * self.pool.page_size], pages, session.cache_salt)
        self.cache.lock(prefix)
        if session.prefix is not None:
            self.cache.unlock(session.prefix)
        session.prefix = prefix
        session.pages[:count] = prefix.pages.tolist()
        if session.table_row >= 0:
            self.slot_table[session.table_row, : count * self.pool.page_size] = self._expand(prefix.pages)

    def is_looked_up(self, session: Session) -> bool:
        """Whether the cache is asked for a session's prefix."""
        return self.cache is not None and not session.wants_prompt_rows

    def share_prefix(self, session: Session) -> None:
        """Gives a waiting session the cached pages of its prefix; its newest token is always computed."""
        if self.cache is None or not self.is_looked_up(session):
            return
        prefix = self.cache.match(session.tokens[: session.committed_len - 1], session.cache_salt)
        self.cache.lock(prefix)
        session.prefix = prefix
        session.pages = prefix.pages.tolist()
        session.kv_len = len(prefix.pages) * self.pool.page_size

    def let_go(self, session: Session) -> None:
        """Undoes share_prefix."""
        if self.cache is not None and session.prefix is not None:
            self.cache.unlock(session.prefix)
        session.prefix, session.pages, session.kv_len = None, [], 0

    def enter(self, session: Session) -> None:
        """Writes the slots of a session's prefix into the row of the slot table that it has got."""
        self.slot_table[session.table_row, : session.kv_len] = self._expand(np.array(session.pages, np.int32))

    def give_back(self, session: Session) -> None:
        """Frees the pages that are a session's own, and leaves those of its prefix to the cache."""
        shared = len(session.prefix.pages) if session.prefix is not None else 0
        self.pool.free(np.array(session.pages[shared:], np.int32))
        self.let_go(session)

    def flush_cache(self) -> tuple[int, int]:
        """Evicts all that no session reads; returns the pages that were freed, and those that stay."""
        self.num_evictions += 1
        return (self.cache.clear(), self.cache.num_pages) if self.cache is not None else (0, 0)

    def grow(self, session: Session, end: int) -> None:
        """Pages for the positions up to `end`, evicting cached ones if need be. OutOfPages: nothing was taken."""
        missing = -(-end // self.pool.page_size) - len(session.pages)
        if missing <= 0:
            return
        if missing > self.pool.num_free:
            self.settle()
        if self.cache is not None and missing > self.pool.num_free:
            self.cache.evict(missing - self.pool.num_free)
            self.num_evictions += 1
        session.pages += self.pool.take(missing)

    def slots(self, session: Session, first: int, count: int) -> list[int]:
        """Slots of `count` positions; as numbers, since a decoding session has few, and numpy is slow to begin."""
        size = self.pool.page_size
        if size == 1:
            return session.pages[first : first + count]
        return [session.pages[position // size] * size + position % size for position in range(first, first + count)]

    def _expand(self, pages: Slots) -> Slots:
        """int32 [len(pages) * page_size]: the slots of whole pages."""
        size = self.pool.page_size
        return (pages[:, None] * size + np.arange(size, dtype=np.int32)).reshape(-1)
