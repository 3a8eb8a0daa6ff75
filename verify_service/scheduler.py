"""Who runs in the next step: admission by tokens, preemption when pages run out.

A preempted session gives its pages back and waits at the head of the queue; its tokens are recomputed, and since every
draw is keyed by output position, they go on as if nothing had happened. The oldest session is never preempted for a
younger one, and the pool holds at least one whole session, so there is always progress.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from engine.pages import OutOfPages
from outrider.errors import RETRY_SOON_S, ResourceExhausted
from verify_service.session import Phase, Session
from verify_service.session_pages import SessionPages

# Longer queues are served in order of arrival: matching every prompt each step would cost more than it saves.
_MOST_MATCHED = 128
# Later ones that may be admitted before a session whose prefix is cached less; then it goes in its turn.
_MOST_OVERTAKING = 32
# Tokens; fewer are computed beside others at next to no cost.
_WORTH_WAITING = 8


class _Fruitless(NamedTuple):
    """How things were when nobody more could begin: nobody can with no more room, unless something changed."""

    changes: int
    room: float


class Scheduler:
    """The queue and the batch. Owned by the engine."""

    def __init__(
        self, pages: SessionPages, *, max_running: int, max_queued: int, chunk: int, longest_prefix_first: bool
    ) -> None:
        self.pages = pages
        self.chunk = chunk
        self.running: list[Session] = []  # oldest admission first
        self.waiting: list[Session] = []  # next to be admitted first
        self.parked: list[Session] = []  # preempted, for something that is not pages
        self.num_preemptions = 0
        self._max_queued = max_queued
        self._longest_prefix_first = longest_prefix_first and pages.cache is not None
        self._rows = list(range(max_running))[::-1]
        self._admissions = 0
        self._requeued = 0  # changes of the queue
        self._fruitless: _Fruitless | None = None

    def submit(self, sessions: list[Session]) -> None:
        """Queues the choices of one request. ResourceExhausted (and nothing queued) when too many wait."""
        if len(self.waiting) + len(sessions) > self._max_queued + len(self._rows):
            raise ResourceExhausted(
                f"the queue has no room for {len(sessions)} more: {len(self.waiting)} sessions wait, "
                f"{len(self._rows)} can begin, and at most {self._max_queued} may be left waiting; try again later",
                retry_after_s=RETRY_SOON_S,
            )
        self._requeued += 1
        for session in sessions:
            bisect.insort(self.waiting, session, key=_order)

    def admit(self) -> list[Session]:
        """Moves waiting sessions into the batch while rows and pages for their known tokens are there."""
        admitted: list[Session] = []
        if not self.waiting or not self._rows:  # before prefixes are looked up for nothing, and count as just used
            return admitted
        promised = sum(session.num_uncomputed for session in self.running)
        changes, fruitless = self._changes(), self._fruitless
        if fruitless is not None and fruitless.changes == changes and self._room(promised) <= fruitless.room:
            return admitted
        self._fruitless = None
        held_back: set[Session] = set()
        reserved = 0  # tokens, for those
        for session in self._in_order():
            if len(self._rows) <= len(held_back):
                break
            if self._awaits_beginning(session):  # its row and its pages are kept for it
                held_back.add(session)
                reserved += session.num_uncomputed
                continue
            overtaken = [one for one in self._before(session) if one not in held_back]
            if any(one.num_overtaking >= _MOST_OVERTAKING for one in overtaken):
                break  # that one is first from the next step on
            self.pages.share_prefix(session)
            if self.running and session.num_uncomputed > self._room(promised + reserved):
                self.pages.let_go(session)
                self._fruitless = _Fruitless(changes, self._room(promised))
                break
            for one in overtaken:
                one.num_overtaking += 1
            self.waiting.remove(session)
            promised += session.num_uncomputed
            self._start(session)
            admitted.append(session)
        if held_back and self._fruitless is None:
            self._fruitless = _Fruitless(changes, math.inf)  # what they wait for is a change
        return admitted

    def take_slots(self, session: Session, count: int) -> list[int] | None:
        """Slots for the `count` positions from kv_len on, preempting younger sessions if need be.

        None: the session itself is the youngest and was sent back to the queue.
        """
        while True:
            try:
                self.pages.grow(session, session.kv_len + count)
            except OutOfPages:
                youngest = self.running[-1]
                self.preempt(youngest)
                if youngest is session:
                    return None
            else:
                return self.pages.slots(session, session.kv_len, count)

    def preempt(self, session: Session) -> None:
        """Sends a running session back to the head of the queue without its pages."""
        self._set_aside(session)
        self.waiting.insert(0, session)
        self.num_preemptions += 1

    def park(self, session: Session) -> None:
        """Takes a running session's pages back, until `unpark`."""
        self._set_aside(session)
        self.parked.append(session)

    def unpark(self, session: Session) -> None:
        """Sends a parked session back to the head of the queue."""
        self.parked.remove(session)
        self._requeued += 1
        self.waiting.insert(0, session)

    def remove(self, session: Session, *, reusable: bool = True) -> None:
        """Takes a session out, wherever it is, and its pages back; `reusable`: what it computed may be cached."""
        self._requeued += 1
        if session.phase is Phase.WAITING:
            for place in (self.waiting, self.parked):
                if session in place:
                    place.remove(session)
        elif session.phase is not Phase.FINISHED:
            self._stop(session, reusable=reusable)
        session.phase = Phase.FINISHED

    def sessions(self) -> Iterable[Session]:
        """All sessions, running, waiting and parked."""
        yield from self.running
        yield from self.waiting
        yield from self.parked

    def _room(self, promised: int) -> int:
        """Tokens that a newcomer may have uncomputed, once `promised` ones of those that run have their pages.

        A page more for each session that runs, so that a newcomer is not preempted in its next step.
        """
        return (self.pages.num_available - len(self.running) - 1) * self.pages.page_size - promised

    def _changes(self) -> int:
        """Counts what may let somebody begin who could not with the same room."""
        evictions = self.pages.num_evictions if self._longest_prefix_first else 0  # another may be the first now
        return self._requeued + self.pages.num_shared + evictions

    def _in_order(self) -> list[Session]:
        """Waiting sessions in the order in which they may be admitted."""
        if not self._longest_prefix_first or len(self.waiting) > _MOST_MATCHED:
            return list(self.waiting)
        cache = self.pages.cache
        assert cache is not None

        def unmatched(session: Session) -> float:
            if session.num_overtaking >= _MOST_OVERTAKING:
                return -math.inf
            return -len(cache.match(session.committed, session.cache_salt).pages)

        return sorted(self.waiting, key=lambda session: (_order(session), unmatched(session)))

    def _before(self, session: Session) -> list[Session]:
        """Those that came before a session that is to be admitted now."""
        return self.waiting[: self.waiting.index(session)] if self._longest_prefix_first else []

    def _awaits_beginning(self, session: Session) -> bool:
        """Whether somebody is just computing a prompt whose KV will soon spare this session half of its work.

        Somebody who was looked up: of others it is not known what the cache has of their prompt already.
        """
        looked_up = self.pages.is_looked_up
        return looked_up(session) and any(
            running.output_len == 0 and looked_up(running) and self._spares_half(running, session)
            for running in self.running
        )

    def _spares_half(self, first: Session, then: Session) -> bool:
        """Whether two prompts have one beginning, as far as to the middle of what the cache has not got of `then`.

        What it had of `first` it has of both, if that is a part of the beginning. Nobody waits for a few tokens, nor
        for a prompt that will take more than twice as long as its own.
        """
        size = self.pages.page_size
        middle = -(-(first.cached_len + then.committed_len) // (2 * size)) * size
        if first.cache_salt != then.cache_salt or not first.cached_len + _WORTH_WAITING <= middle <= first.prompt_len:
            return False
        if first.num_uncomputed > 2 * (then.committed_len - first.cached_len):
            return False
        if middle >= then.committed_len or first.tokens[middle - 1] != then.tokens[middle - 1]:
            return False
        return np.array_equal(first.tokens[:middle], then.tokens[:middle])

    def _start(self, session: Session) -> None:
        session.table_row = self._rows.pop()
        self.pages.enter(session)
        session.phase = Phase.RUNNING
        if not session.admitted:
            session.queried_len = session.prompt_len if self.pages.is_looked_up(session) else 0
            session.cached_len = min(session.kv_len, session.prompt_len)
        self._admissions += 1
        session.admitted = self._admissions
        self.running.append(session)

    def _set_aside(self, session: Session) -> None:
        self._stop(session)
        self._requeued += 1
        session.phase = Phase.WAITING
        session.drop_prompt_logprobs()

    def _stop(self, session: Session, *, reusable: bool = True) -> None:
        if reusable:
            self.pages.share(session)
        self.pages.give_back(session)
        self._rows.append(session.table_row)
        self.running.remove(session)
        session.table_row = -1


def _order(session: Session) -> tuple[bool, int]:
    """Preempted sessions first, then by priority; equals keep their order of arrival."""
    return (False, 0) if session.admitted else (True, -session.priority)
