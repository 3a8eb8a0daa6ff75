"""The target's hidden states on their way to a head: read from the wire, checked, and kept until they are used.

Rows of a session may come in any order of position (a late drafter's are fetched while new ones arrive), each once; a
head gets them without gaps.
"""

from __future__ import annotations

import math

import torch

from outrider.row_ring import RowReader
from outrider.v1 import common_pb2

_DTYPES = {
    common_pb2.DTYPE_FLOAT32: torch.float32,
    common_pb2.DTYPE_FLOAT16: torch.float16,
    common_pb2.DTYPE_BFLOAT16: torch.bfloat16,
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
    # Copied: the message's bytes must not be written to, and its other parts need not be kept.
    return _finite(torch.frombuffer(bytearray(tensor.data), dtype=dtype).view(*tensor.shape))


def read_shared(ring: RowReader | None, first: int, count: int, width: int) -> torch.Tensor:
    """Rows [count, width] from shared memory. UnusableFeatures where there are none, for another width, or NaN."""
    if ring is None:
        raise UnusableFeatures("feature rows in memory that is not shared with this process")
    dtype = _DTYPES.get(ring.dtype)
    if dtype is None:
        raise UnusableFeatures(f"feature rows of dtype {ring.dtype}")
    try:
        rows = torch.from_numpy(ring.rows(first, count)).view(dtype)
    except (ValueError, RuntimeError) as error:
        raise UnusableFeatures(str(error)) from error
    if rows.shape[1] != width:
        raise UnusableFeatures(f"feature rows of {rows.shape[1]} numbers; {width} are needed")
    return _finite(rows)


def _finite(rows: torch.Tensor) -> torch.Tensor:
    if not all(math.isfinite(bound) for bound in torch.aminmax(rows)):
        raise UnusableFeatures("feature rows hold NaN or infinity")
    return rows


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

    def add(self, rows: common_pb2.FeatureRows, ring: RowReader | None = None) -> None:
        """Takes rows that are inline, or in `ring`; those only announced come later, fetched.

        UnusableFeatures for nonsense.
        """
        match rows.WhichOneof("location"):
            case "rows":
                values = read_tensor(rows.rows, self._width)
            case "slot_seq":
                values = read_shared(ring, rows.slot_seq, rows.count, self._width)
            case _:
                return
        if len(values) != rows.count:
            raise UnusableFeatures(f"{len(values)} feature rows where {rows.count} are named")
        self.put(rows.first_pos, values)

    def put(self, first_pos: int, values: torch.Tensor) -> None:
        """Takes rows [n, width] for the positions from `first_pos` on; those that are known already are left out."""
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
        if before > self.start:
            rest = self.rows(before, self._end)
            # A copy, unless nothing is left: a view would keep what is dropped.
            self._pieces = [rest.clone()] if len(rest) else []
            self.start = before
