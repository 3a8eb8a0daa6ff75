"""Rounds waiting for one drafter: joined while it reads slowly, bounded in bytes. Pure state, no sockets.

The engine adds, the event loop takes; a lock keeps the two apart. A session's pending verdicts coalesce: the
first base_len, tokens joined, credits in order, times summed, steps counted, the last `next` and node_budget. Verdicts
with a node budget of 0 after one that said so are withheld, without rows, until the budget is above 0 again.
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


class RoundOutbox:
    """What one drafter has yet to be told."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened: dict[Key, verify_pb2.Opened] = {}
        self._features: dict[Key, list[verify_pb2.SessionFeatures]] = {}
        self._verdicts: dict[Key, verify_pb2.Verdict] = {}
        self._withheld: dict[Key, verify_pb2.Verdict] = {}
        self._silent: set[Key] = set()
        self._closed: collections.deque[verify_pb2.Closed] = collections.deque()
        self._rejected: collections.deque[verify_pb2.Rejected] = collections.deque()
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
    def has_unread_slow(self) -> bool:
        """Whether a notice that a session was closed for slow reading waits to be read."""
        with self._lock:
            return any(closed.reason == verify_pb2.CLOSE_REASON_SLOW for closed in self._closed)

    def sessions_by_size(self) -> list[Key]:
        """Sessions with something pending, the largest first."""
        with self._lock:
            sizes: dict[Key, int] = {}
            for pending in (self._opened, self._verdicts, self._withheld):
                for key, message in pending.items():
                    sizes[key] = sizes.get(key, 0) + size_of(message)
            for key, chunks in self._features.items():
                sizes[key] = sizes.get(key, 0) + sum(size_of(chunk) for chunk in chunks)
        return sorted(sizes, key=lambda key: -sizes[key])

    def open(self, opened: verify_pb2.Opened) -> None:
        """A session is now the drafter's."""
        with self._lock:
            self._opened[opened.session, opened.generation] = opened
            self._bytes += size_of(opened)

    def feature_rows(self, features: verify_pb2.SessionFeatures) -> None:
        """Rows of a prompt, or of recomputed text."""
        with self._lock:
            self._features.setdefault((features.session, features.generation), []).append(features)
            self._bytes += size_of(features)

    def verdict(self, verdict: verify_pb2.Verdict) -> None:
        """What a step committed."""
        key = verdict.session, verdict.generation
        with self._lock:
            budget_is_zero = verdict.HasField("node_budget") and verdict.node_budget == 0
            if budget_is_zero and key in self._silent:
                _announce_rows(verdict)
                self._join(self._withheld, key, verdict)
                return
            if budget_is_zero:
                self._silent.add(key)
            else:
                self._silent.discard(key)
            earlier = self._withheld.pop(key, None)
            if earlier is not None:
                self._bytes -= size_of(earlier)
                self._join(self._verdicts, key, earlier)
            self._join(self._verdicts, key, verdict)

    def close(self, session: int, generation: int, reason: verify_pb2.CloseReason) -> None:
        """A session is no longer the drafter's; a withheld verdict goes out with the notice."""
        key = session, generation
        with self._lock:
            self._silent.discard(key)
            withheld = self._withheld.pop(key, None)
            if withheld is not None:
                self._bytes -= size_of(withheld)
                self._join(self._verdicts, key, withheld)
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
            for pending in (self._opened, self._verdicts, self._withheld):
                message = pending.pop(key, None)
                if message is not None:
                    self._bytes -= size_of(message)
            self._bytes -= sum(size_of(chunk) for chunk in self._features.pop(key, ()))
            self._silent.discard(key)

    def reject(self, rejected: verify_pb2.Rejected) -> None:
        """A proposal was refused."""
        with self._lock:
            self._rejected.append(rejected)
            self._bytes += size_of(rejected)

    def name_no_slots_before(self, end: int) -> None:
        """No message that is added from now on names slots of the ring before number `end`."""
        with self._lock:
            self._slot_seq_end = end

    def take(self, frame: verify_pb2.Round) -> bool:
        """Moves what is pending to an empty frame, or as much of it as a message may hold; whether there was any."""
        room = FRAME_BYTES
        with self._lock:
            before = self._bytes
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
            if self._bytes == before:
                return False
            if self._slot_seq_end is not None and not (self._features or self._verdicts):
                frame.slot_seq_end, self._slot_seq_end = self._slot_seq_end, None
            return True

    def _put(self, field: Any, message: Any) -> int:
        """Moves a message into a repeated field of a frame; returns its size."""
        field.append(message)
        size = size_of(message)
        self._bytes -= size
        return size

    def _add_closed(self, session: int, generation: int, reason: verify_pb2.CloseReason) -> None:
        closed = verify_pb2.Closed(session=session, generation=generation, reason=reason)
        self._closed.append(closed)
        self._bytes += size_of(closed)

    def _join(self, pending: dict[Key, verify_pb2.Verdict], key: Key, verdict: verify_pb2.Verdict) -> None:
        earlier = pending.get(key)
        if earlier is None:
            pending[key] = verdict
            self._bytes += size_of(verdict)
            return
        self._bytes -= size_of(earlier)
        join_verdicts(earlier, verdict)
        self._bytes += size_of(earlier)


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


def _announce_rows(verdict: verify_pb2.Verdict) -> None:
    if verdict.HasField("features"):
        verdict.features.announced = True
