"""The target's hidden states on their way to a head: read from the wire, checked, and kept until they are used.

Rows of a session may come in any order of position (a late drafter's are fetched while new ones arrive), each once; a
head gets them without gaps.
"""

from __future__ import annotations

import ctypes
import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from engine.cpu_kernels import cpu_kernels
from engine.feature_wire import TORCH_DTYPES, WIRE_DTYPES
from outrider.row_ring import RowReader
from outrider.v1 import common_pb2

_INFINITY = {torch.float32: 0x7F80_0000, torch.float16: 0x7C00, torch.bfloat16: 0x7F80}  # its bits
_WORDS = {2: ctypes.c_uint16, 4: ctypes.c_uint32}
_MOST_IN_ROOM = 32  # rows of a session that are read into memory which the next ones are read into as well


class UnusableFeatures(Exception):
    """Rows that no head should go on from."""


def read_tensor(tensor: common_pb2.Tensor, width: int) -> torch.Tensor:
    """Rows [n, width] in the dtype that they came in. UnusableFeatures for another shape, dtype or size, or NaN."""
    dtype = TORCH_DTYPES.get(tensor.dtype)
    if dtype is None:
        raise UnusableFeatures(f"feature rows of dtype {tensor.dtype}")
    if len(tensor.shape) != 2 or tensor.shape[0] < 1 or tensor.shape[1] != width:
        raise UnusableFeatures(f"feature rows of shape {list(tensor.shape)}; {width} numbers a row are needed")
    wanted = math.prod(tensor.shape) * dtype.itemsize
    if len(tensor.data) != wanted:
        raise UnusableFeatures(f"{len(tensor.data)} bytes of feature rows; their shape takes {wanted}")
    room = Room(tensor.shape[0], width, dtype)
    room.fill(tensor.data, tensor.shape[0])
    return room.rows


def read_shared(
    ring: RowReader | None, first: int, count: int, width: int, room: Room | None = None
) -> torch.Tensor:  # fmt: skip
    """Rows from shared memory: [count, width], or `room`'s, whose first `count` they are then.

    UnusableFeatures where there are none, for another width, or NaN.
    """
    if ring is None:
        raise UnusableFeatures("feature rows in memory that is not shared with this process")
    dtype = TORCH_DTYPES.get(ring.dtype)
    if dtype is None:
        raise UnusableFeatures(f"feature rows of dtype {ring.dtype}")
    if ring.slot_bytes != width * dtype.itemsize:
        raise UnusableFeatures(f"feature rows of {ring.slot_bytes / dtype.itemsize:g} numbers; {width} are needed")
    try:
        address = ring.address(first, count)
    except ValueError as error:
        raise UnusableFeatures(str(error)) from error
    if room is None or room.dtype is not dtype:
        room = Room(count, width, dtype)
    room.fill(address, count)
    return room.rows


class Room:
    """Memory for rows [num_rows, width], uninitialised."""

    def __init__(self, num_rows: int, width: int, dtype: torch.dtype) -> None:
        self.num_rows, self.dtype = num_rows, dtype
        self.rows = torch.empty(num_rows, width, dtype=dtype)
        self._address, self._width = self.rows.data_ptr(), width
        self._bytes, self._infinity = dtype.itemsize, _INFINITY[dtype]

    def fill(self, source: int | bytes, count: int) -> None:
        """Copies rows from an address, or of a message, to the first ones. UnusableFeatures for NaN or infinity."""
        copy = _copy_finite()
        if not copy(self._address, source, count * self._width, self._bytes, self._infinity):
            raise UnusableFeatures("feature rows hold NaN or infinity")


@cache
def _copy_finite() -> Callable[[int, int | bytes, int, int, int], int]:
    """outrider_copy_finite of the C kernels, or the same in numpy where they cannot be had."""
    library = cpu_kernels()
    return _copy_finite_plainly if library is None else library.outrider_copy_finite


def _copy_finite_plainly(target: int, source: int | bytes, count: int, width: int, infinity: int) -> int:
    ctypes.memmove(target, source, count * width)
    words = np.ctypeslib.as_array((_WORDS[width] * count).from_address(target))
    return not bool((words & infinity == infinity).any())


class Piece(NamedTuple):
    """Rows first..end-1 of a tensor [n, width] that may hold other sessions' beside them."""

    whole: torch.Tensor
    first: int
    end: int

    @property
    def num_rows(self) -> int:
        """How many they are."""
        return self.end - self.first

    @property
    def rows(self) -> torch.Tensor:
        """They alone, as a view."""
        return self.whole[self.first : self.end]

    def part(self, first: int, end: int) -> Piece:
        """Rows first..end-1 of it."""
        return Piece(self.whole, self.first + first, self.first + end)


def read_together(wanted: Sequence[tuple[RowReader | None, common_pb2.FeatureRows]], width: int) -> list[Piece] | None:
    """The rows of messages whose rows lie one behind another in one ring, read in one go.

    None where they cannot be had like this: whoever reads each alone learns why.
    """
    ring = wanted[0][0] if len(wanted) > 1 else None
    if ring is None or any(own is not ring for own, _ in wanted):
        return None
    first, count = wanted[0][1].slot_seq, 0
    ends: list[int] = []
    for _, rows in wanted:
        if not rows.HasField("slot_seq") or rows.slot_seq != first + count or not rows.count:
            return None
        count += rows.count
        ends.append(count)
    try:
        whole = read_shared(ring, first, count, width)
    except UnusableFeatures:
        return None
    return [Piece(whole, begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def joined(pieces: Sequence[Piece]) -> Piece:
    """Pieces as one: without a copy where they lie one behind another."""
    whole, first, end = pieces[0]
    for piece in pieces[1:]:
        if piece.whole is not whole or piece.first != end:
            rows = torch.cat([piece.rows for piece in pieces])
            return Piece(rows, 0, len(rows))
        end = piece.end
    return Piece(whole, first, end)


def warm_up() -> None:
    """Loads what reads rows, or compiles it."""
    _copy_finite()


def pack_rows(rows: torch.Tensor) -> common_pb2.Tensor:
    """Rows [n, width] as read_tensor takes them."""
    data = rows.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return common_pb2.Tensor(dtype=WIRE_DTYPES[rows.dtype], shape=list(rows.shape), data=data)


class FeatureBuffer:
    """One session's rows, by position; those before `start` were used, and rows from `start` to `end` have no gap."""

    def __init__(self, width: int) -> None:
        self.start = 0
        self._width = width
        self._pieces: deque[Piece] = deque()
        self._early: dict[int, Piece] = {}
        self._room: Room | None = None
        self.end = 0
        """Position after the last row before the first gap."""

    def add(self, rows: common_pb2.FeatureRows, ring: RowReader | None = None) -> None:
        """Takes rows that are inline, or in `ring`; those only announced come later, fetched.

        UnusableFeatures for nonsense.
        """
        count = rows.count
        match rows.WhichOneof("location"):
            case "rows":
                values = read_tensor(rows.rows, self._width)
                if len(values) != count:
                    raise UnusableFeatures(f"{len(values)} feature rows where {count} are named")
            case "slot_seq":
                values = read_shared(ring, rows.slot_seq, count, self._width, self._room_for(count, ring))
            case _:
                return
        self.put(rows.first_pos, Piece(values, 0, count))

    def _room_for(self, count: int, ring: RowReader | None) -> Room | None:
        """Memory that rows lay in which were used since; None where some are still there, and for many."""
        dtype = None if ring is None else TORCH_DTYPES.get(ring.dtype)
        if self._pieces or self._early or dtype is None or count > _MOST_IN_ROOM:
            return None
        if self._room is None or self._room.num_rows < count:
            self._room = Room(2 * count, self._width, dtype)
        return self._room

    def put(self, first_pos: int, piece: Piece) -> None:
        """Takes rows for the positions from `first_pos` on; those that are known already are left out."""
        count = piece.num_rows
        if first_pos == self.end and not self._early:
            self._pieces.append(piece)
            self.end += count
            return
        early = self._early.get(first_pos)
        if early is None or count > early.num_rows:
            self._early[first_pos] = piece
        while (found := next((pos for pos in self._early if pos <= self.end), None)) is not None:
            fresh = self._early.pop(found)
            fresh = fresh.part(min(self.end - found, fresh.num_rows), fresh.num_rows)
            if fresh.num_rows:
                self._pieces.append(fresh)
                self.end += fresh.num_rows

    def rows(self, first: int, end: int) -> Piece:
        """Rows of positions within start..end: a copy where they came apart."""
        found: list[Piece] = []
        pos = self.start
        for piece in self._pieces:
            if pos >= end:
                break
            if pos + piece.num_rows > first:
                found.append(piece.part(max(0, first - pos), min(piece.num_rows, end - pos)))
            pos += piece.num_rows
        return joined(found)

    def drop(self, before: int) -> None:
        """Forgets the rows of positions before `before`, which is at most `end`."""
        if before == self.end:
            self._pieces.clear()
            self.start = before
            return
        while before - self.start >= self._pieces[0].num_rows:
            self.start += self._pieces.popleft().num_rows
        first = self._pieces[0].part(before - self.start, self._pieces[0].num_rows)
        if 2 * first.num_rows < len(first.whole):  # a view would keep what is dropped
            first = Piece(first.rows.clone(), 0, first.num_rows)
        self._pieces[0], self.start = first, before
