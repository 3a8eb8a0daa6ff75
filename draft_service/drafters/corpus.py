"""Named texts in one n-gram trie, inserted by a thread of its own so that drafting never waits for a long one.

Texts wait in a bounded queue. The thread takes a few hundred positions at a time, sessions' texts before corpora;
between two pieces a lookup gets its turn, and growing copies happen without holding it up. So a lookup waits for half
a millisecond at most. The few tokens that a step commits go in at once: that takes less time than waking the thread,
and the next lookup sees them.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

import numpy as np

from draft_service.drafters.trie import MAX_ROOTS_PER_MATCH, Match, MatchRules, NgramTrie, OwnTexts, plain
from outrider.errors import RETRY_SOON_S, ResourceExhausted
from outrider.telemetry import get_logger
from outrider.wire import Ids

log = get_logger(__name__)

Name = tuple[str, ...]

_STARTS_PER_PIECE = 512
_DROPS_PER_PIECE = 4096
_STARTS_AT_ONCE = 64


class FairLock:
    """A lock whose waiter goes before whoever comes back for it: the one at the turnstile has it next."""

    def __init__(self) -> None:
        self._turnstile = threading.Lock()
        self._held = threading.Lock()

    def __enter__(self) -> None:
        with self._turnstile:
            self._held.acquire()

    def __exit__(self, *_: object) -> None:
        self._held.release()


@dataclass(slots=True)
class _Job:
    """A text to insert, or (tokens None) a name to drop."""

    name: Name
    tokens: Ids | None
    counted: int
    start: int
    is_corpus: bool = False
    done: Future[None] = field(default_factory=Future)


_DONE: Future[None] = Future()
_DONE.set_result(None)


class Corpus:
    """Texts by name, of two kinds.

    Sessions' texts make room for newer ones: node by node, and whole names, of which there are at most `max_names`; the
    one longest without an insertion goes first. Corpora, whose names are others, stay until they are unloaded; where
    they would not fit the trie's share for them, they are refused.
    """

    def __init__(self, trie: NgramTrie, *, max_pending_tokens: int, max_names: int = 4096) -> None:
        self._trie = trie
        self._max_pending_tokens = max_pending_tokens
        self._max_names = max_names
        self._roots: dict[Name, int] = {}  # oldest insertion first; written under the lock
        self._lock = FairLock()
        self._texts: deque[_Job] = deque()
        self._corpora: deque[_Job] = deque()
        self._kept: set[Name] = set()  # names of corpora that have a root
        self._pending_names: Counter[Name] = Counter()  # of queued jobs
        self._growing = False  # the thread copies the trie: nothing may be written until it is done
        self._wake = threading.Condition()
        self._closing = False
        self._pending_tokens = 0
        self.num_dropped_tokens = 0
        self._thread = threading.Thread(target=self._run, name="ngram-insert", daemon=True)
        self._thread.start()

    @property
    def num_bytes(self) -> int:
        """Bytes that the trie's arrays take."""
        return self._trie.num_bytes

    @property
    def num_nodes(self) -> int:
        """Nodes of the trie in use."""
        return self._trie.num_nodes

    @property
    def capacity(self) -> int:
        """Nodes that the trie may hold."""
        return self._trie.capacity

    @property
    def branch_length(self) -> int:
        """Tokens in the trie's longest path."""
        return self._trie.branch_length

    def insert(self, name: Name, tokens: Ids, counted: int = 0) -> Future[None]:
        """Inserts or queues a session's text; tokens before `counted` went in before, and only the last need be given.

        Over the limit of pending tokens the text is left out: its drafts get poorer, and `num_dropped_tokens` says so.
        """
        job = _Job(name, plain(tokens), counted, self._trie.first_start(counted))
        if len(tokens) - job.start <= _STARTS_AT_ONCE and self._insert_at_once(job):
            return _DONE
        if not self._queue(self._texts, job):
            self.num_dropped_tokens += len(tokens) - counted
            return _DONE
        return job.done

    def load(self, name: Name, tokens: Ids) -> Future[None]:
        """Queues a corpus's text behind all sessions' texts. ResourceExhausted where trie or queue have no room for it.

        One thread at a time may load.
        """
        self._check_room(len(tokens))
        job = _Job(name, plain(tokens), 0, 0, is_corpus=True)
        if not self._queue(self._corpora, job):
            raise ResourceExhausted(
                f"{len(tokens)} tokens do not fit the insertion queue, which takes {self._max_pending_tokens}",
                retry_after_s=RETRY_SOON_S if len(tokens) <= self._max_pending_tokens else None,
            )
        return job.done

    def unload(self, name: Name) -> Future[None]:
        """Queues the removal of a corpus behind the texts that were loaded before."""
        job = _Job(name, None, 0, 0)
        self._queue(self._corpora, job)
        return job.done

    def drop(self, name: Name) -> Future[None]:
        """Queues the removal of all that was inserted under a name."""
        job = _Job(name, None, 0, 0)
        self._queue(self._texts, job)
        return job.done

    def match(
        self,
        names: Sequence[Name],
        suffix: Ids,
        rules: MatchRules,
        *,
        num_nodes: int,
        max_depth: int,
        vocab_size: int,
        own: OwnTexts | None = None,
    ) -> tuple[Match, list[Name]]:
        """A tree that continues `suffix`, from `own` and the texts of these names; and which of these it read.

        Its sources' bits mean those, in this order.
        """
        most = MAX_ROOTS_PER_MATCH - (0 if own is None else len(own.roots))
        with self._lock:
            known = [name for name in names if name in self._roots][:most]
            roots = np.array([self._roots[name] for name in known], np.int32)
            match = self._trie.match(
                roots, suffix, rules, num_nodes=num_nodes, max_depth=max_depth, vocab_size=vocab_size, own=own
            )
        return match, known

    def flush(self) -> None:
        """Returns when all that was queued is in, or was cancelled, or has failed."""
        with self._wake:
            jobs = [*self._texts, *self._corpora]
        wait(job.done for job in jobs)

    def close(self) -> None:
        """Ends the thread; what is still queued is cancelled."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        for job in (*self._texts, *self._corpora):
            job.done.cancel()

    def _check_room(self, num_tokens: int) -> None:
        """Whether the trie has room for one more corpus text, were all that wait to take the most they can."""
        most = self._trie.most_nodes
        with self._wake:
            queued = sum(most(len(job.tokens) - job.start) for job in self._corpora if job.tokens is not None)
        held = queued + self._trie.num_kept  # read last: what went in meanwhile counts twice, not never
        if held + most(num_tokens) > self._trie.max_kept:
            raise ResourceExhausted(
                f"a text of {num_tokens} tokens may take {most(num_tokens)} nodes of the trie, in which corpora have "
                f"{held} of the {self._trie.max_kept} that are for them (half of --speculative-ngram-capacity)",
                field="tokens",
            )

    def _queue(self, lane: deque[_Job], job: _Job) -> bool:
        size = 0 if job.tokens is None else len(job.tokens)
        with self._wake:
            if size and self._pending_tokens + size > self._max_pending_tokens:
                return False
            self._pending_tokens += size
            self._pending_names[job.name] += 1
            lane.append(job)
            self._wake.notify()
        return True

    def _insert_at_once(self, job: _Job) -> bool:
        """Inserts a short text of a known name, unless it must wait its turn or for the trie to grow."""
        assert job.tokens is not None
        if job.name in self._pending_names or job.name not in self._roots:
            return False
        with self._lock:
            root = self._roots.pop(job.name, None)
            if root is None:
                return False
            self._roots[job.name] = root
            if self._growing:
                return False
            job.start = self._trie.insert_some(root, job.tokens, job.start, len(job.tokens), job.counted)
        return job.start >= len(job.tokens)

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closing or self._texts or self._corpora)
                if self._closing:
                    return
                lane = self._texts or self._corpora
                job = lane[0]
            if not self._finished(job):
                continue
            with self._wake:
                lane.popleft()
                self._pending_tokens -= 0 if job.tokens is None else len(job.tokens)
                self._pending_names[job.name] -= 1
                if not self._pending_names[job.name]:
                    del self._pending_names[job.name]

    def _finished(self, job: _Job) -> bool:
        """Does one piece of a job; True when there is no more of it, be it that it was cancelled or has failed."""
        if not (job.done.running() or job.done.set_running_or_notify_cancel()):
            return True
        try:
            if not self._advance(job):
                return False
            job.done.set_result(None)
        except Exception as error:
            log.error("n-gram insertion failed", kind=job.name[0], exc_info=error)
            job.done.set_exception(error)
        return True

    def _advance(self, job: _Job) -> bool:
        """Does one piece of a job; True when it is done."""
        if job.tokens is None:
            return self._drop_piece(job.name)
        stop = min(job.start + _STARTS_PER_PIECE, len(job.tokens))
        root = self._root(job.name, kept=job.is_corpus)
        with self._lock:
            job.start = self._trie.insert_some(root, job.tokens, job.start, stop, job.counted)
            self._growing = job.start < stop
        if self._growing:
            growth = self._trie.grown()  # lookups go on meanwhile
            with self._lock:
                self._trie.adopt(growth)
                self._growing = False
        return job.start >= len(job.tokens)

    def _drop_piece(self, name: Name) -> bool:
        with self._lock:
            root = self._roots.get(name)
            if root is None:
                return True
            if not self._trie.drop_some(root, _DROPS_PER_PIECE):
                return False
            del self._roots[name]
            self._kept.discard(name)
            return True

    def _root(self, name: Name, *, kept: bool) -> int:
        """The name's root, now the youngest; a new one of a session's text may cost the oldest such name its place."""
        while True:
            with self._lock:
                root = self._roots.pop(name, None)
                if root is None and (kept or len(self._roots) - len(self._kept) < self._max_names):
                    root = self._trie.new_root(kept=kept)
                    if kept:
                        self._kept.add(name)
                if root is not None:
                    self._roots[name] = root
                    return root
                oldest = next(name for name in self._roots if name not in self._kept)
            while not self._drop_piece(oldest):
                pass
