"""Rounds waiting for one drafter: joined while it reads slowly, bounded in bytes. Pure state, no sockets.

Whoever runs the engine adds, the event loop takes, often from another thread: a lock keeps the two apart. A session's
pending verdicts coalesce: the first base_len, tokens joined, credits in order, times summed, steps counted, the last
`next` and node_budget.
"""

from __future__ import annotations

import collections
import math
import threading
from typing import Any

from engine.feature_wire import TORCH_DTYPES
from outrider.v1 import common_pb2, verify_pb2
from outrider.wire import INLINE_FEATURE_BYTES, MAX_MESSAGE_BYTES

_ITEM_BYTES = {number: dtype.itemsize for number, dtype in TORCH_DTYPES.items()}
_ABOUT_BYTES = 128  # of a message beside its rows
FRAME_BYTES = MAX_MESSAGE_BYTES // 2  # a frame is ended by the message that goes over it

Key = tuple[int, int]  # session, generation
Sized = tuple[Any, int]  # a message, and its size as it was measured when it was added


class RoundOutbox:
    """What one drafter has yet to be told."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened: dict[Key, Sized] = {}
        self._features: dict[Key, list[Sized]] = {}
        self._verdicts: dict[Key, Sized] = {}
        self._closed: collections.deque[Sized] = collections.deque()
        self._rejected: collections.deque[Sized] = collections.deque()
        self._bytes = 0
        self.most_with_rows: float = math.inf
        """Bytes pending up to which rows are put in messages; beyond, they are announced."""
        self._slot_seq_end: int | None = None  # to be said once no message that waits can name slots before it

    @property
    def num_bytes(self) -> int:
        """Serialised size of what is pending, about."""
        return self._bytes

    @property
    def room_for_rows(self) -> float:
        """Bytes of rows that may be added now."""
        return self.most_with_rows - self._bytes

    @property
    def num_unread_closed(self) -> int:
        """Sessions that the drafter has yet to be told are closed, and holds until then."""
        return len(self._closed)

    @property
    def has_unread_slow(self) -> bool:
        """Whether a notice that a session was closed for slow reading waits to be read."""
        with self._lock:
            return any(closed.reason == verify_pb2.CLOSE_REASON_SLOW for closed, _ in self._closed)

    def sessions_by_size(self) -> list[Key]:
        """Sessions with something pending, the largest first."""
        with self._lock:
            sizes: dict[Key, int] = {}
            for pending in (self._opened, self._verdicts):
                for key, (_, size) in pending.items():
                    sizes[key] = sizes.get(key, 0) + size
            for key, chunks in self._features.items():
                sizes[key] = sizes.get(key, 0) + sum(size for _, size in chunks)
        return sorted(sizes, key=lambda key: -sizes[key])

    def open(self, opened: verify_pb2.Opened) -> None:
        """Adds that a session is now the drafter's."""
        with self._lock:
            self._opened[opened.session, opened.generation] = self._sized(opened)

    def feature_rows(self, features: verify_pb2.SessionFeatures) -> None:
        """Adds rows of a prompt, or of recomputed text."""
        with self._lock:
            self._features.setdefault((features.session, features.generation), []).append(self._sized(features))

    def verdict(self, verdict: verify_pb2.Verdict) -> None:
        """Adds what a step committed."""
        key = verdict.session, verdict.generation
        with self._lock:
            if (pending := self._verdicts.get(key)) is not None:
                earlier, size = pending
                self._bytes -= size
                join_verdicts(earlier, verdict)
                verdict = earlier
            self._verdicts[key] = self._sized(verdict)

    def close(self, session: int, generation: int, reason: verify_pb2.CloseReason) -> None:
        """Adds that a session is no longer the drafter's."""
        with self._lock:
            self._add_closed(session, generation, reason)

    def close_slow(self, session: int, generation: int) -> None:
        """Drops what is pending of a session and closes it for reading slowly."""
        self.drop(session, generation)
        with self._lock:
            self._add_closed(session, generation, verify_pb2.CLOSE_REASON_SLOW)

    def drop(self, session: int, generation: int) -> None:
        """Drops what is pending of a session that is closed, or about to be; the notice of it stays."""
        key = session, generation
        with self._lock:
            dropped = [*self._features.pop(key, ())]
            dropped += [pending.pop(key) for pending in (self._opened, self._verdicts) if key in pending]
            self._bytes -= sum(size for _, size in dropped)

    def reject(self, rejected: verify_pb2.Rejected) -> None:
        """Adds that a proposal was refused."""
        with self._lock:
            self._rejected.append(self._sized(rejected))

    def name_no_slots_before(self, end: int) -> None:
        """Notes that no message added from now on names slots of the ring before number `end`."""
        with self._lock:
            self._slot_seq_end = end

    def take(self, frame: verify_pb2.Round) -> bool:
        """Moves what is pending to an empty frame, or as much of it as a message may hold; whether there was any."""
        room = FRAME_BYTES
        with self._lock:
            if not self._bytes:
                return False
            while self._opened and room > 0:
                room -= self._put(frame.opened, self._opened.pop(next(iter(self._opened))))
            while self._features and room > 0:
                key, chunks = next(iter(self._features.items()))
                room -= self._put(frame.features, chunks.pop(0))
                if not chunks:
                    del self._features[key]
            while self._verdicts and room > 0:
                room -= self._put(frame.verdicts, self._verdicts.pop(next(iter(self._verdicts))))
            while self._closed and room > 0:
                room -= self._put(frame.closed, self._closed.popleft())
            while self._rejected and room > 0:
                room -= self._put(frame.rejected, self._rejected.popleft())
            if self._slot_seq_end is not None and not (self._features or self._verdicts):
                frame.slot_seq_end, self._slot_seq_end = self._slot_seq_end, None
            return True

    def _sized(self, message: Any) -> Sized:
        """Counts a message that waits from now on."""
        size = size_of(message)
        self._bytes += size
        return message, size

    def _put(self, field: Any, sized: Sized) -> int:
        """Moves a message into a repeated field of a frame; returns its size."""
        message, size = sized
        field.append(message)
        self._bytes -= size
        return size

    def _add_closed(self, session: int, generation: int, reason: verify_pb2.CloseReason) -> None:
        closed = verify_pb2.Closed(session=session, generation=generation, reason=reason)
        self._closed.append(self._sized(closed))


def size_of(message: Any) -> int:
    """Bytes of a message of a round, about: one with rows is not serialised to be measured."""
    features = getattr(message, "features", None) or getattr(message, "rows", None)
    if features is None or features.WhichOneof("location") != "rows" or not features.rows.shape:
        return message.ByteSize()
    return math.prod(features.rows.shape) * _ITEM_BYTES.get(features.rows.dtype, 1) + _ABOUT_BYTES


def join_verdicts(earlier: verify_pb2.Verdict, later: verify_pb2.Verdict) -> None:
    """Adds `later`, which follows directly, to `earlier`."""
    if earlier.base_len + len(earlier.tokens) != later.base_len:
        raise ValueError(f"verdict at {later.base_len} does not follow {earlier.base_len} + {len(earlier.tokens)}")
    if later.HasField("features"):
        _join_rows(earlier, later)
    else:
        earlier.ClearField("features")  # a session's last verdict needs no rows
    earlier.tokens.extend(later.tokens)
    earlier.credits.extend(later.credits)
    earlier.verify_us += later.verify_us
    earlier.batch_tokens += later.batch_tokens
    earlier.steps += later.steps
    earlier.ClearField("node_budget")
    if later.HasField("node_budget"):
        earlier.node_budget = later.node_budget
    earlier.next.CopyFrom(later.next)


def _join_rows(earlier: verify_pb2.Verdict, later: verify_pb2.Verdict) -> None:
    first, second = earlier.features, later.features
    inline = first.WhichOneof("location") == second.WhichOneof("location") == "rows"
    total = first.count + second.count
    if inline and len(first.rows.data) + len(second.rows.data) <= INLINE_FEATURE_BYTES:
        rows = common_pb2.Tensor(
            dtype=first.rows.dtype,
            shape=[total, first.rows.shape[1]],
            data=first.rows.data + second.rows.data,
        )
        joined = common_pb2.FeatureRows(first_pos=first.first_pos, count=total, rows=rows)
    else:
        joined = common_pb2.FeatureRows(first_pos=first.first_pos, count=total, announced=True)
    earlier.features.CopyFrom(joined)
