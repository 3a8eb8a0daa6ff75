"""The target's rows on their way to a head: right ones in every order, none written over before it was used."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draft_service.drafters import features
from draft_service.drafters.features import FeatureBuffer, Piece, Room, UnusableFeatures, joined
from outrider.row_ring import HEADER_BYTES, RowReader, RowRing
from outrider.v1 import common_pb2

_WIDTH = 8
_DTYPES = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


def rows_of(first: int, count: int) -> torch.Tensor:
    """Rows that begin with their position."""
    rows = torch.zeros(count, _WIDTH, dtype=torch.bfloat16)
    rows[:, 0] = torch.arange(first, first + count)
    return rows


class Shared:
    """A ring with both its ends."""

    def __init__(self) -> None:
        self.ring = RowRing(2 * _WIDTH, 64)
        self.reader = RowReader(
            self.ring.name, num_slots=64, slot_bytes=2 * _WIDTH, header_bytes=HEADER_BYTES,
            dtype=common_pb2.DTYPE_BFLOAT16,
        )  # fmt: skip
        self.ring.prove(self.reader.nonce)

    def put(self, first: int, count: int) -> common_pb2.FeatureRows:
        """Rows of positions from `first` on, as a verdict names them."""
        data = rows_of(first, count).view(torch.uint8).numpy()
        number = self.ring.put(count, lambda rows: np.copyto(rows, data))
        assert number is not None
        return common_pb2.FeatureRows(first_pos=first, count=count, slot_seq=number)

    def take(self, buffer: FeatureBuffer, rows: common_pb2.FeatureRows) -> None:
        """Reads them; the ring has room again."""
        buffer.add(rows, self.reader)
        assert self.reader.last is not None
        self.ring.read(self.reader.last)


@given(st.lists(st.tuples(st.integers(1, 6), st.booleans(), st.integers(0, 12)), max_size=30))
def test_rows_are_those_of_their_positions_however_they_come_and_are_used(
    steps: list[tuple[int, bool, int]],
) -> None:
    """Two at a time may come in the wrong order; what is there is used at once, in part, or with what follows."""
    shared, buffer = Shared(), FeatureBuffer(_WIDTH)
    end = used = 0
    for count, is_swapped, num_used in steps:
        parts = [(end, count), (end + count, count)]
        for first, own in reversed(parts) if is_swapped else parts:
            shared.take(buffer, shared.put(first, own))
        end += 2 * count
        assert buffer.end == end
        if num_used:
            stop = min(end, used + num_used)
            assert torch.equal(buffer.rows(used, stop).rows, rows_of(used, stop - used))
            buffer.drop(stop)
            used = stop
    if end > used:
        assert torch.equal(buffer.rows(used, end).rows, rows_of(used, end - used))


def test_rows_that_are_used_one_verdict_after_another_lie_in_the_same_memory() -> None:
    shared, buffer = Shared(), FeatureBuffer(_WIDTH)
    wholes: list[torch.Tensor] = []
    for first in range(0, 12, 3):
        shared.take(buffer, shared.put(first, 3))
        piece = buffer.rows(first, first + 3)
        assert torch.equal(piece.rows, rows_of(first, 3))
        wholes.append(piece.whole)
        buffer.drop(first + 3)
    assert all(whole is wholes[0] for whole in wholes)


def test_what_is_used_piece_by_piece_is_not_copied_until_half_of_its_memory_is_of_no_use() -> None:
    buffer, pieces = FeatureBuffer(_WIDTH), [Piece(rows_of(first, 8), 0, 8) for first in (0, 8, 16)]
    for index, piece in enumerate(pieces):
        buffer.put(8 * index, piece)
    for first in range(24):
        left = buffer.rows(first, 8 * (first // 8 + 1))
        assert torch.equal(left.rows, rows_of(first, left.num_rows))
        assert (left.whole is pieces[first // 8].whole) is (first % 8 <= 4)
        assert len(left.whole) <= 2 * left.num_rows
        buffer.drop(first + 1)


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("in_c", [True, False])
def test_numbers_that_are_not_finite_are_found(dtype: torch.dtype, in_c: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not in_c:
        monkeypatch.setattr(features, "_copy_finite", lambda: features._copy_finite_plainly)
    good = torch.randn(3, _WIDTH).to(dtype)
    good[1] = torch.finfo(dtype).max
    good[2] = -torch.finfo(dtype).tiny
    room = Room(4, _WIDTH, dtype)
    for source in (good.data_ptr(), ctypes.string_at(good.data_ptr(), good.nbytes)):
        room.rows.zero_()
        room.fill(source, 3)
        assert torch.equal(room.rows[:3], good)
    for wrong in (torch.inf, -torch.inf, torch.nan, -torch.nan):
        bad = good.clone()
        bad[1, 5] = wrong
        with pytest.raises(UnusableFeatures, match="NaN or infinity"):
            room.fill(bad.data_ptr(), 3)


def test_pieces_are_joined_without_a_copy_where_they_follow_one_another() -> None:
    whole = rows_of(0, 6)
    together = joined([Piece(whole, 1, 3), Piece(whole, 3, 4)])
    assert together.whole is whole
    assert torch.equal(together.rows, whole[1:4])
    apart = joined([Piece(whole, 4, 6), Piece(whole, 0, 1)])
    assert torch.equal(apart.rows, torch.cat([whole[4:6], whole[:1]]))
