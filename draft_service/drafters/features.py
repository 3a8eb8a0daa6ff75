"""The target's hidden states on their way to a head: read from the wire, checked, and kept until they are used.

Rows of a session may come in any order of position (a late drafter's are fetched while new ones arrive), each once; a
head gets them without gaps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from draft_service.drafters.compiled import compiled
from outrider.row_ring import RowReader, Rows
from outrider.v1 import common_pb2

_DTYPES = {
    common_pb2.DTYPE_FLOAT32: torch.float32,
    common_pb2.DTYPE_FLOAT16: torch.float16,
    common_pb2.DTYPE_BFLOAT16: torch.bfloat16,
}
# Infinity's bits.
_INFINITY = {
    common_pb2.DTYPE_FLOAT32: np.uint32(0x7F80_0000),
    common_pb2.DTYPE_FLOAT16: np.uint16(0x7C00),
    common_pb2.DTYPE_BFLOAT16: np.uint16(0x7F80),
}


class UnusableFeatures(Exception):
    """Rows that no head should go on from."""


def read_tensor(tensor: common_pb2.Tensor, width: int) -> torch.Tensor:
    """Rows [n, width] in the dtype that they came in. UnusableFeatures for another shape, dtype or size, or NaN."""
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise UnusableFeatures(f"feature rows of dtype {tensor.dtype}")
    if len(tensor.shape) != 2 or tensor.shape[0] < 1 or tensor.shape[1] != width:
        raise UnusableFeatures(f"feature rows of shape {list(tensor.shape)}; {width} numbers a row are needed")
    wanted = math.prod(tensor.shape) * dtype.itemsize
    if len(tensor.data) != wanted:
        raise UnusableFeatures(f"{len(tensor.data)} bytes of feature rows; their shape takes {wanted}")
    return _copied(np.frombuffer(tensor.data, np.uint8).reshape(tensor.shape[0], -1), tensor.dtype)


def read_shared(ring: RowReader | None, first: int, count: int, width: int) -> torch.Tensor:
    """Rows [count, width] from shared memory. UnusableFeatures where there are none, for another width, or NaN."""
    if ring is None:
        raise UnusableFeatures("feature rows in memory that is not shared with this process")
    dtype = _DTYPES.get(ring.dtype)
    if dtype is None:
        raise UnusableFeatures(f"feature rows of dtype {ring.dtype}")
    try:
        rows = ring.rows(first, count)
    except ValueError as error:
        raise UnusableFeatures(str(error)) from error
    if rows.shape[1] != width * dtype.itemsize:
        raise UnusableFeatures(f"feature rows of {rows.shape[1] / dtype.itemsize:g} numbers; {width} are needed")
    return _copied(rows, ring.dtype)


class Piece(NamedTuple):
    """Rows first..end-1 of a tensor [n, width] that may hold other sessions' beside them."""

    whole: torch.Tensor
    first: int
    end: int

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


def one_tensor(pieces: Sequence[Piece]) -> torch.Tensor:
    """Pieces as one tensor: without a copy where they lie one behind another."""
    whole, first, end = pieces[0]
    for piece in pieces[1:]:
        if piece.whole is not whole or piece.first != end:
            return torch.cat([piece.rows for piece in pieces])
        end = piece.end
    return whole[first:end]


def warm_up() -> None:
    """Compiles, or loads, what reads rows: of each dtype, from a message and from shared memory."""
    for dtype, infinity in _INFINITY.items():
        row = np.zeros((1, infinity.itemsize), np.uint8)
        for rows in (row, np.frombuffer(row.tobytes(), np.uint8).reshape(row.shape)):
            _copied(rows, dtype)


def _copied(rows: Rows, dtype: common_pb2.Dtype) -> torch.Tensor:
    """A copy of rows uint8 [n, bytes of a row], as numbers; UnusableFeatures for NaN or infinity."""
    infinity = _INFINITY[dtype]
    source = rows.view(infinity.dtype)
    bits = np.empty(source.shape, source.dtype)
    if not _copy_finite(source, bits, infinity):
        raise UnusableFeatures("feature rows hold NaN or infinity")
    return torch.from_numpy(bits).view(_DTYPES[dtype])


@compiled
def _copy_finite(source: NDArray[Any], target: NDArray[Any], infinity: Any) -> bool:
    """In one pass, since rows are large: whether none of the numbers has all of infinity's bits set, as NaN has."""
    highest = infinity ^ infinity
    for row in range(len(source)):
        for i in range(source.shape[1]):
            bits = source[row, i]
            target[row, i] = bits
            highest = max(highest, bits & infinity)
    return highest != infinity


def pack_rows(rows: torch.Tensor) -> common_pb2.Tensor:
    """Rows [n, width] as read_tensor takes them."""
    dtype = next(wire for wire, dtype in _DTYPES.items() if dtype == rows.dtype)
    data = rows.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return common_pb2.Tensor(dtype=dtype, shape=list(rows.shape), data=data)


class FeatureBuffer:
    """One session's rows, by position; those before `start` were used, and rows from `start` to `end` have no gap."""

    def __init__(self, width: int) -> None:
        self.start = 0
        self._width = width
        self._pieces: list[Piece] = []
        self._early: dict[int, Piece] = {}
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
                values = read_shared(ring, rows.slot_seq, count, self._width)
            case _:
                return
        self.put(rows.first_pos, Piece(values, 0, count))

    def put(self, first_pos: int, piece: Piece) -> None:
        """Takes rows for the positions from `first_pos` on; those that are known already are left out."""
        count = piece.end - piece.first
        if first_pos == self.end and not self._early:
            self._pieces.append(piece)
            self.end += count
            return
        early = self._early.get(first_pos)
        if early is None or count > early.end - early.first:
            self._early[first_pos] = piece
        while (found := next((pos for pos in self._early if pos <= self.end), None)) is not None:
            fresh = self._early.pop(found)
            fresh = fresh.part(min(self.end - found, fresh.end - fresh.first), fresh.end - fresh.first)
            if fresh.end > fresh.first:
                self._pieces.append(fresh)
                self.end += fresh.end - fresh.first

    def rows(self, first: int, end: int) -> Piece:
        """Rows of positions within start..end."""
        if len(self._pieces) > 1:
            joined = torch.cat([piece.rows.to(self._pieces[0].whole.dtype) for piece in self._pieces])
            self._pieces = [Piece(joined, 0, len(joined))]
        return self._pieces[0].part(first - self.start, end - self.start)

    def drop(self, before: int) -> None:
        """Forgets the rows of positions before `before`, which is at most `end`."""
        if before == self.end:
            self._pieces, self.start = [], before
        elif before > self.start:
            rest = self.rows(before, self.end).rows.clone()  # a view would keep what is dropped
            self._pieces = [Piece(rest, 0, len(rest))]
            self.start = before
