"""Who runs in the next step: admission by tokens, chunked prefill, preemption when pages run out.

A preempted session gives its pages back and waits at the head of the queue; its tokens are recomputed, and since every
draw is keyed by output position, they go on as if nothing had happened. The oldest session is never preempted for a
younger one, and the pool holds at least one whole session, so there is always progress.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from engine.pages import OutOfPages, PagePool
from engine.radix_cache import RadixCache
from outrider.errors import RETRY_SOON_S, ResourceExhausted
from verify_service.session import Phase, Session

Slots = NDArray[np.int32]

# Longer queues are served in order of arrival: matching every prompt each step would cost more than it saves.
_MOST_MATCHED = 128
# Later ones that may be admitted before a session whose prefix is cached less; then it goes in its turn.
_MOST_OVERTAKING = 32


class Scheduler:
    """Queues and pages. Owned by the engine.

    cache: keeps what finished sessions computed, and shares it; None: nothing is shared. move(source, target): copies
    KV between slots; needed for page sizes above 1, where accepted nodes move to the positions they have taken.
    """

    def __init__(
        self,
        pool: PagePool,
        slot_table: Slots,
        *,
        max_running: int,
        max_queued: int,
        chunk: int,
        cache: RadixCache | None,
        move: Callable[[Slots, Slots], None] | None = None,
        longest_prefix_first: bool,
    ) -> None:
        self.pool = pool
        self.slot_table = slot_table
        self.cache = cache
        self.chunk = chunk
        self.running: list[Session] = []  # oldest admission first
        self.waiting: list[Session] = []  # next to be admitted first
        self.num_preemptions = 0
        self._move = move
        self._max_queued = max_queued
        self._longest_prefix_first = longest_prefix_first and cache is not None
        self._rows = list(range(max_running))[::-1]
        self._admissions = 0
        self._dropped: list[int] = []  # pages, not with the pool yet
        self._too_little: int | None = None  # room with which nobody could begin; None: the queue or the cache changed

    @property
    def num_available(self) -> int:
        """Pages that can be had without preempting anybody."""
        return self.pool.num_free + len(self._dropped) + (self.cache.num_evictable if self.cache is not None else 0)

    def submit(self, sessions: list[Session]) -> None:
        """Queues the choices of one request. ResourceExhausted (and nothing queued) when too many wait."""
        if len(self.waiting) + len(sessions) > self._max_queued + len(self._rows):
            raise ResourceExhausted(
                f"the queue has no room for {len(sessions)} more: {len(self.waiting)} sessions wait, "
                f"{len(self._rows)} can begin, and at most {self._max_queued} may be left waiting; try again later",
                retry_after_s=RETRY_SOON_S,
            )
        self._too_little = None
        for session in sessions:
            bisect.insort(self.waiting, session, key=_order)

    def admit(self) -> list[Session]:
        """Moves waiting sessions into the batch while rows and pages for their known tokens are there."""
        admitted: list[Session] = []
        if not self.waiting or not self._rows:  # before prefixes are looked up for nothing, and count as just used
            return admitted
        promised = sum(session.num_uncomputed for session in self.running)
        if self._too_little is not None and self._room(promised) <= self._too_little:
            return admitted
        self._too_little = None
        for session in self._in_order():
            if not self._rows:
                break
            if self._awaits_beginning(session):
                continue
            overtaken = self._overtaken_by(session)
            if any(one.num_overtaking >= _MOST_OVERTAKING for one in overtaken):
                break  # that one is first from the next step on
            self._share_prefix(session)
            if self.running and session.num_uncomputed > self._room(promised):
                self._let_go(session)
                self._too_little = self._room(promised)
                break
            for one in overtaken:
                one.num_overtaking += 1
            self.waiting.remove(session)
            promised += session.num_uncomputed
            self._start(session)
            admitted.append(session)
        return admitted

    def flush_cache(self) -> tuple[int, int]:
        """Evicts all that no session reads; returns the pages that were freed, and those that stay."""
        self._too_little = None
        return (self.cache.clear(), self.cache.num_pages) if self.cache is not None else (0, 0)

    def take_slots(self, session: Session, count: int) -> list[int] | None:
        """Slots for the `count` positions from kv_len on, preempting younger sessions if need be.

        None: the session itself is the youngest and was sent back to the queue.
        """
        while True:
            try:
                self._grow(session, session.kv_len + count)
            except OutOfPages:
                youngest = self.running[-1]
                self.preempt(youngest)
                if youngest is session:
                    return None
            else:
                return self._slots(session, session.kv_len, count)

    def take_spare_slots(self, session: Session, taken: int, count: int) -> list[int]:
        """Up to `count` slots for the positions after the `taken` ones from kv_len on, preempting nobody."""
        first = session.kv_len + taken
        held = len(session.pages) + self.num_available
        count = min(count, held * self.pool.page_size - first)
        self._grow(session, first + count)
        return self._slots(session, first, count)

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
        self._too_little = None
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

    def preempt(self, session: Session) -> None:
        """Sends a running session back to the head of the queue without its pages."""
        self._stop(session)
        self._too_little = None
        session.phase = Phase.WAITING
        if session.wants_prompt_rows:
            session.prompt_logprobs = []
        self.waiting.insert(0, session)
        self.num_preemptions += 1

    def remove(self, session: Session, *, reusable: bool = True) -> None:
        """Takes a session out, wherever it is, and its pages back; `reusable`: what it computed may be cached."""
        self._too_little = None
        if session.phase is Phase.WAITING:
            if session in self.waiting:
                self.waiting.remove(session)
        elif session.phase is not Phase.FINISHED:
            self._stop(session, reusable=reusable)
        session.phase = Phase.FINISHED

    def sessions(self) -> Iterable[Session]:
        """All sessions, running and waiting."""
        yield from self.running
        yield from self.waiting

    def _room(self, promised: int) -> int:
        """Tokens that a newcomer may have uncomputed, once `promised` ones of those that run have their pages.

        A page more for each session that runs, so that a newcomer is not preempted in its next step.
        """
        return (self.num_available - len(self.running) - 1) * self.pool.page_size - promised

    def _in_order(self) -> list[Session]:
        """Waiting sessions in the order in which they may be admitted."""
        if not self._longest_prefix_first or len(self.waiting) > _MOST_MATCHED:
            return list(self.waiting)
        assert self.cache is not None
        cache = self.cache

        def unmatched(session: Session) -> float:
            if session.num_overtaking >= _MOST_OVERTAKING:
                return -math.inf
            return -len(cache.match(session.committed, session.cache_salt).pages)

        return sorted(self.waiting, key=lambda session: (_order(session), unmatched(session)))

    def _overtaken_by(self, session: Session) -> list[Session]:
        """The sessions that came before this one and could begin as well."""
        if not self._longest_prefix_first:
            return []
        return [one for one in self.waiting[: self.waiting.index(session)] if not self._awaits_beginning(one)]

    def _awaits_beginning(self, session: Session) -> bool:
        """Whether somebody is just computing a prompt whose KV will soon spare this session half of its work."""
        if self.cache is None or session.wants_prompt_rows:
            return False
        return any(running.output_len == 0 and self._spares_half(running, session) for running in self.running)

    def _spares_half(self, first: Session, then: Session) -> bool:
        """Whether two prompts have one beginning, as far as to the middle of what the cache has not got of `then`.

        What it had of `first` it has of both, if that is a part of the beginning. Nobody waits for a prompt that will
        take more than twice as long as its own.
        """
        size = self.pool.page_size
        middle = -(-(first.cached_len + then.committed_len) // (2 * size)) * size
        if first.cache_salt != then.cache_salt or not first.cached_len < middle <= first.prompt_len:
            return False
        if first.num_uncomputed > 2 * (then.committed_len - first.cached_len):
            return False
        if middle >= then.committed_len or first.tokens[middle - 1] != then.tokens[middle - 1]:
            return False
        return np.array_equal(first.tokens[:middle], then.tokens[:middle])

    def _share_prefix(self, session: Session) -> None:
        """Gives a waiting session the cached pages of its prefix; its newest token is always computed."""
        if self.cache is None or session.wants_prompt_rows:
            return
        prefix = self.cache.match(session.tokens[: session.committed_len - 1], session.cache_salt)
        self.cache.lock(prefix)
        session.prefix = prefix
        session.pages = prefix.pages.tolist()
        session.kv_len = len(prefix.pages) * self.pool.page_size

    def _let_go(self, session: Session) -> None:
        """Undoes _share_prefix."""
        if self.cache is not None and session.prefix is not None:
            self.cache.unlock(session.prefix)
        session.prefix, session.pages, session.kv_len = None, [], 0

    def _start(self, session: Session) -> None:
        session.table_row = self._rows.pop()
        self.slot_table[session.table_row, : session.kv_len] = self._expand(np.array(session.pages, np.int32))
        session.phase = Phase.RUNNING
        if not session.admitted:
            session.cached_len = min(session.kv_len, session.prompt_len)
        self._admissions += 1
        session.admitted = self._admissions
        self.running.append(session)

    def _stop(self, session: Session, *, reusable: bool = True) -> None:
        if reusable:
            self.share(session)
        shared = len(session.prefix.pages) if session.prefix is not None else 0
        self.pool.free(np.array(session.pages[shared:], np.int32))
        self._rows.append(session.table_row)
        self.running.remove(session)
        self._let_go(session)
        session.table_row = -1

    def _grow(self, session: Session, end: int) -> None:
        """Pages for the positions up to `end`, evicting cached ones if need be. OutOfPages: nothing was taken."""
        missing = -(-end // self.pool.page_size) - len(session.pages)
        if missing <= 0:
            return
        if missing > self.pool.num_free:
            self.settle()
        if self.cache is not None and missing > self.pool.num_free:
            self.cache.evict(missing - self.pool.num_free)
            if self._longest_prefix_first:  # another may be the first now
                self._too_little = None
        session.pages += self.pool.take(missing)

    def _slots(self, session: Session, first: int, count: int) -> list[int]:
        """Slots of `count` positions; as numbers, since a decoding session has few, and numpy is slow to begin."""
        size = self.pool.page_size
        if size == 1:
            return session.pages[first : first + count]
        return [session.pages[position // size] * size + position % size for position in range(first, first + count)]

    def _expand(self, pages: Slots) -> Slots:
        """int32 [len(pages) * page_size]: the slots of whole pages."""
        size = self.pool.page_size
        return (pages[:, None] * size + np.arange(size, dtype=np.int32)).reshape(-1)


def _order(session: Session) -> tuple[bool, int]:
    """Preempted sessions first, then by priority; equals keep their order of arrival."""
    return (False, 0) if session.admitted else (True, -session.priority)
