"""Rows shared in memory: found where they were put, never written over before they were read, gone with their users."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.row_ring import HEADER_BYTES, RowReader, RowRing, Rows, remove_left_behind
from outrider.v1 import common_pb2

ROW_BYTES = 12


def reader_of(ring: RowRing) -> RowReader:
    return RowReader(
        ring.name, num_slots=ring.num_slots, slot_bytes=ring.slot_bytes, header_bytes=HEADER_BYTES,
        dtype=common_pb2.DTYPE_BFLOAT16,
    )  # fmt: skip


def put(ring: RowRing, values: list[int]) -> int | None:
    def fill(rows: Rows) -> None:
        assert rows.shape == (len(values), ring.slot_bytes)
        rows[:] = np.array(values, np.uint8)[:, None]

    return ring.put(len(values), fill)


@given(st.lists(st.tuples(st.integers(1, 4), st.booleans()), max_size=60), st.integers(4, 9))
def test_what_is_read_is_what_was_put_and_room_comes_back(steps: list[tuple[int, bool]], num_slots: int) -> None:
    ring = RowRing(ROW_BYTES, num_slots)
    reader = reader_of(ring)
    ring.prove(reader.nonce)
    unread: list[tuple[int, list[int]]] = []
    value = 0
    for count, reads in steps:
        values = [(value + i) % 256 for i in range(count)]
        first = put(ring, values)
        if first is None:
            assert unread or count > num_slots
        else:
            value += count
            unread.append((first, values))
        if reads:
            for number, expected in unread:
                rows = reader.rows(number, len(expected))
                assert rows[:, 0].tolist() == rows[:, -1].tolist() == expected
            unread = []
            if reader.last is not None:
                ring.read(reader.last)
    for number, expected in unread:
        assert reader.rows(number, len(expected))[:, 0].tolist() == expected


def test_nothing_is_written_before_the_reader_has_shown_that_it_sees_it() -> None:
    ring = RowRing(ROW_BYTES, 4)
    reader = reader_of(ring)
    ring.prove(b"0" * 16)
    assert put(ring, [1]) is None
    ring.prove(reader.nonce)
    assert put(ring, [1]) == 0
    with pytest.raises(OSError, match="No such file"):
        reader_of(ring)
    assert reader.rows(0, 1)[0].tolist() == [1] * ROW_BYTES


def test_a_ring_full_of_rows_that_nobody_asks_for_is_used_again_once_the_reader_skips_them() -> None:
    ring = RowRing(ROW_BYTES, 3)
    reader = reader_of(ring)
    assert put(ring, [1]) is None
    assert not ring.was_full  # it was not used yet
    ring.prove(reader.nonce)
    assert put(ring, [1, 2, 3]) == 0
    assert not ring.was_full
    assert put(ring, [4]) is None
    assert ring.was_full
    reader.skip(ring.end)
    assert reader.last == 2
    ring.read(reader.last)
    assert put(ring, [4]) == 3
    assert reader.rows(3, 1)[0].tolist() == [4] * ROW_BYTES
    reader.skip(2)  # told late
    assert reader.last == 3


def test_what_a_killed_writer_left_is_removed_and_nothing_else() -> None:
    writer = (
        "import sys; from outrider.row_ring import RowRing as R; print(R(12, 2).name, flush=True); sys.stdin.read()"
    )
    mine = RowRing(ROW_BYTES, 4)
    with subprocess.Popen(
        [sys.executable, "-c", writer], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        left = Path("/dev/shm", process.stdout.readline().strip())
        remove_left_behind()
        assert left.exists()
        process.kill()
        process.wait()
        remove_left_behind()  # or a service did that starts just now
    assert not left.exists()
    reader_of(mine)
    mine.unlink()
    mine.unlink()
    assert not Path("/dev/shm", mine.name).exists()


@pytest.mark.parametrize("step", ["fcntl.flock", "os.posix_fallocate", "os.link"])
def test_a_ring_that_cannot_be_had_leaves_nothing(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError("no locks available")

    def left() -> tuple[int, set[Path]]:
        return len(os.listdir("/proc/self/fd")), set(Path("/dev/shm").glob(f"*outrider-{os.getpid()}-*"))

    before = left()
    with monkeypatch.context() as patched:
        patched.setattr(f"outrider.row_ring.{step}", fails)
        with pytest.raises(OSError, match="no locks"):
            RowRing(ROW_BYTES, 4)
    assert left() == before


def test_rows_that_were_not_written_cannot_have_been_read() -> None:
    ring = RowRing(ROW_BYTES, 2)
    ring.prove(reader_of(ring).nonce)
    assert put(ring, [1, 2]) == 0
    for last in (2, 99, 2**63):
        ring.read(last)
        assert put(ring, [3]) is None
    ring.read(0)
    assert put(ring, [3]) == 2
    assert put(ring, [4]) is None


def test_nonsense_is_refused_on_the_readers_side() -> None:
    ring = RowRing(ROW_BYTES, 4)
    for name in ("../../etc/passwd", "outrider-/x", "", "other"):
        with pytest.raises(ValueError, match="no ring"):
            RowReader(name, num_slots=4, slot_bytes=12, header_bytes=HEADER_BYTES, dtype=common_pb2.DTYPE_FLOAT32)
    reader = reader_of(ring)
    for first, count in ((2, 3), (0, 0), (0, 5)):
        with pytest.raises(ValueError, match="rows from slot"):
            reader.rows(first, count)
    ring.unlink()
    assert not Path("/dev/shm", ring.name).exists()
