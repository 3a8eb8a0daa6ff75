"""The target's hidden states on their way to a head: read from the wire, checked, and kept until they are used.

Rows of a session may come in any order of position (a late drafter's are fetched while new ones arrive), each once; a
head gets them without gaps.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

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
_NONE: Mapping[int, torch.Tensor] = MappingProxyType({})


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


def read_together(
    wanted: Sequence[tuple[RowReader | None, common_pb2.FeatureRows]], width: int
) -> dict[int, torch.Tensor]:
    """Rows by their first number, of messages whose rows lie one behind another in one ring, read in one go.

    What cannot be had like this is left out: whoever reads it alone learns why.
    """
    found: dict[int, torch.Tensor] = {}
    ring = wanted[0][0] if len(wanted) > 1 else None
    if ring is None or any(own is not ring or rows.WhichOneof("location") != "slot_seq" for own, rows in wanted):
        return found
    firsts, counts = [rows.slot_seq for _, rows in wanted], [rows.count for _, rows in wanted]
    if firsts[1:] == [first + count for first, count in zip(firsts, counts, strict=True)][:-1]:
        with contextlib.suppress(UnusableFeatures):
            found.update(zip(firsts, read_shared(ring, firsts[0], sum(counts), width).split(counts), strict=True))
    return found


def one_tensor(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Pieces [n, width] as one tensor: without a copy where they are slices that lie one behind another."""
    first, count = pieces[0], len(pieces[0])
    for piece in pieces[1:]:
        follows = piece.data_ptr() == first.data_ptr() + count * first.stride(0) * first.itemsize
        if not follows or piece.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return torch.cat(list(pieces))
        count += len(piece)
    return first.as_strided((count, *first.shape[1:]), first.stride())


def warm_up() -> None:
    """Compiles, or loads, what reads rows: of each dtype, from a message and from shared memory."""
    for dtype, infinity in _INFINITY.items():
        row = np.zeros((1, infinity.itemsize), np.uint8)
        for rows in (row, np.frombuffer(row.tobytes(), np.uint8).reshape(row.shape)):
            _copied(rows, dtype)


def _copied(rows: Rows, dtype: common_pb2.Dtype) -> torch.Tensor:
    """A copy of rows uint8 [n, bytes of a row], as numbers; UnusableFeatures for NaN or infinity."""
    infinity = _INFINITY[dtype]
    bits = np.empty((len(rows), rows.shape[1] // infinity.itemsize), infinity.dtype)
    if not _copy_finite(rows.reshape(-1).view(infinity.dtype), bits.reshape(-1), infinity):
        raise UnusableFeatures("feature rows hold NaN or infinity")
    return torch.from_numpy(bits).view(_DTYPES[dtype])


@njit(cache=True, nogil=True)
def _copy_finite(source: NDArray[Any], target: NDArray[Any], infinity: Any) -> bool:
    """In one pass, since rows are large: whether none of the numbers has all of infinity's bits set, as NaN has."""
    found = 0
    for i in range(source.size):
        bits = source[i]
        target[i] = bits
        found += (bits & infinity) == infinity
    return found == 0


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
        self._pieces: list[torch.Tensor] = []
        self._early: dict[int, torch.Tensor] = {}
        self._end = 0

    @property
    def end(self) -> int:
        """Position after the last row before the first gap."""
        return self._end

    def add(
        self, rows: common_pb2.FeatureRows, ring: RowReader | None = None, shared: Mapping[int, torch.Tensor] = _NONE
    ) -> None:
        """Takes rows that are inline, or in `ring`; those only announced come later, fetched. shared: read already.

        UnusableFeatures for nonsense.
        """
        match rows.WhichOneof("location"):
            case "rows":
                values = read_tensor(rows.rows, self._width)
            case "slot_seq":
                values = shared.get(rows.slot_seq)
                if values is None:
                    values = read_shared(ring, rows.slot_seq, rows.count, self._width)
            case _:
                return
        if len(values) != rows.count:
            raise UnusableFeatures(f"{len(values)} feature rows where {rows.count} are named")
        self.put(rows.first_pos, values)

    def put(self, first_pos: int, values: torch.Tensor) -> None:
        """Takes rows [n, width] for the positions from `first_pos` on; those that are known already are left out."""
        if first_pos == self._end and not self._early:
            self._pieces.append(values)
            self._end += len(values)
            return
        if len(values) > len(self._early.get(first_pos, ())):
            self._early[first_pos] = values
        while (found := next((pos for pos in self._early if pos <= self._end), None)) is not None:
            fresh = self._early.pop(found)[self._end - found :]
            if len(fresh):
                self._pieces.append(fresh)
                self._end += len(fresh)

    def rows(self, first: int, end: int) -> torch.Tensor:
        """Rows [end - first, width] of positions within start..end."""
        if len(self._pieces) > 1:
            self._pieces = [torch.cat([piece.to(self._pieces[0].dtype) for piece in self._pieces])]
        return self._pieces[0][first - self.start : end - self.start]

    def drop(self, before: int) -> None:
        """Forgets the rows of positions before `before`, which is at most `end`."""
        if before == self._end:
            self._pieces, self.start = [], before
        elif before > self.start:
            rest = self.rows(before, self._end)
            self._pieces = [rest.clone()]  # a view would keep what is dropped
            self.start = before
