"""Segments to rows, and what is refused before a kernel sees it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine.batch import Batch, BatchBuffers, Segment


def fill(segments: list[Segment], slot_table: np.ndarray) -> Batch:
    return BatchBuffers(slot_table, vocab_size=50, num_slots=40, num_positions=20, max_tokens=16).fill(segments)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def table() -> np.ndarray:
    return np.arange(60, dtype=np.int32).reshape(3, 20) % 40


def test_rows_of_three_kinds() -> None:
    mask = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], np.bool_)
    batch = fill(
        [
            Segment(0, 5, ints(1, 2), ints(10, 11), num_logits=0),
            Segment(2, 7, ints(3, 4, 5), ints(12, 13, 14), ints(0, 1, 1), mask, 3),
            Segment(1, 0, ints(6), ints(15)),
        ],
        table(),
    )
    layout = batch.layout
    assert batch.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert batch.num_tokens == 6
    assert batch.logit_rows.tolist() == [2, 3, 4, 5]
    assert layout.positions.tolist() == [5, 6, 7, 8, 8, 0]
    assert layout.slots.tolist() == [10, 11, 12, 13, 14, 15]
    assert layout.first_rows.tolist() == [0, 2, 5]
    assert layout.num_rows.tolist() == [2, 3, 1]
    assert layout.mask_starts.tolist() == [-1, 0, -1]
    assert layout.masks.tolist() == mask.ravel().tolist()
    for array in (batch.tokens, batch.logit_rows, layout.positions, layout.slots, layout.table_rows):
        assert array.dtype == np.int32
        assert array.flags.c_contiguous


def test_a_step_of_the_same_size_is_another_step() -> None:
    """Backends plan once for each layout; the second one's slots are not the first one's."""
    buffers = BatchBuffers(table(), vocab_size=50, num_slots=40, num_positions=20, max_tokens=16)
    first = buffers.fill([Segment(0, 2, ints(1), ints(10))]).layout
    planned = [part.slots.tolist() for part in first.plan(torch.device("cpu"))]
    second = buffers.fill([Segment(1, 2, ints(7), [11])]).layout
    assert second is not first
    assert planned == [[0, 1, 10]]
    assert [part.slots.tolist() for part in second.plan(torch.device("cpu"))] == [[20, 21, 11]]
    assert second.positions.tolist() == [2]


@pytest.mark.parametrize(
    "segment",
    [
        Segment(0, 0, ints(), ints()),
        Segment(0, 0, ints(1, 2), ints(1)),
        Segment(0, 0, ints(1), ints(1), depths=ints(0, 1)),
        Segment(0, 0, ints(1), ints(1), mask=np.ones((1, 2), np.bool_)),
        Segment(0, 0, ints(1), ints(1), mask=np.ones((1, 1), np.int8)),
        Segment(0, 0, ints(1), ints(1), num_logits=2),
        Segment(0, 0, ints(1), ints(1), num_logits=-1),
        Segment(0, 0, np.ones((1, 1), np.int32), ints(1)),
    ],
)
def test_arrays_that_do_not_agree(segment: Segment) -> None:
    with pytest.raises(ValueError, match=r"a segment of|logits wanted"):
        fill([segment], table())


def test_an_empty_step() -> None:
    with pytest.raises(ValueError, match="at least one"):
        fill([], table())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": ints(50)}, "token"),
        ({"tokens": ints(-1)}, "token"),
        ({"slots": ints(40)}, "slot"),
        ({"slots": ints(-1)}, "slot"),
        ({"prefix_len": 20}, "position"),
        ({"prefix_len": -1}, "prefix of -1"),
        ({"prefix_len": 21}, "prefix of 21"),
        ({"depths": ints(-1)}, "depth -1"),
        ({"depths": ints(15)}, "position"),
        ({"table_row": 3}, "table row"),
        ({"table_row": -1}, "table row"),
        ({"tokens": np.ones(17, np.int32), "slots": np.arange(17, dtype=np.int32), "prefix_len": 0}, "limit is 16"),
    ],
)
def test_numbers_out_of_bounds(changes: dict[str, Any], words: str) -> None:
    fields: dict[str, Any] = {"table_row": 0, "prefix_len": 5, "tokens": ints(1), "slots": ints(1)}
    with pytest.raises(ValueError, match=words):
        fill([Segment(**(fields | changes))], table())


def test_a_prefix_slot_out_of_bounds() -> None:
    slots = table()
    slots[1, 4] = 40
    fill([Segment(1, 4, ints(1), ints(1))], slots)
    with pytest.raises(ValueError, match="of a prefix is out of bounds"):
        fill([Segment(1, 5, ints(1), ints(1))], slots)


def test_of_a_prefix_what_earlier_steps_had_is_not_looked_at_again() -> None:
    slots = table()
    buffers = BatchBuffers(slots, vocab_size=50, num_slots=40, num_positions=20, max_tokens=16)
    buffers.fill([Segment(1, 4, ints(1), ints(1))])
    slots[1, 6] = 40
    buffers.fill([Segment(1, 6, ints(1), ints(1))])
    for _ in range(2):  # what is refused was not looked at
        with pytest.raises(ValueError, match="of a prefix is out of bounds"):
            buffers.fill([Segment(1, 8, ints(1), ints(1))])
    slots[1, 2] = 40
    with pytest.raises(ValueError, match="of a prefix is out of bounds"):  # another session's row now
        buffers.fill([Segment(1, 3, ints(1), ints(1))])
    slots[1, :8] = [7, 8, 40, 9, 10, 11, 12, 13]
    with pytest.raises(ValueError, match="of a prefix is out of bounds"):  # and so it is where its prefix is longer
        buffers.fill([Segment(1, 7, ints(1), ints(1))])


def test_buffers_are_used_again_and_masks_grow() -> None:
    buffers = BatchBuffers(
        np.zeros((9, 600), np.int32), vocab_size=50, num_slots=5000, num_positions=600, max_tokens=1000
    )
    rng = np.random.default_rng(0)
    for count in (3, 70, 5, 200, 1):
        masks = [np.tri(count, dtype=np.bool_) & (rng.random((count, count)) < 0.5) for _ in range(3)]
        rows = [np.arange(count, dtype=np.int32) for _ in masks]
        segments = [Segment(2, 7, row % 50, row, None, mask, count) for row, mask in zip(rows, masks, strict=True)]
        batch = buffers.fill([*segments, Segment(1, 0, ints(1, 2), ints(3, 4), num_logits=0)])
        assert batch.num_tokens == 3 * count + 2
        assert len(batch.logit_rows) == 3 * count
        assert len(batch.layout.first_rows) == 4
        for index, mask in enumerate(masks):
            start = batch.layout.mask_starts[index]
            assert np.array_equal(batch.layout.masks[start : start + count * count].reshape(count, count), mask)
